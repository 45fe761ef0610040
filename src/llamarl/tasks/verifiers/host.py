"""Runs in the virtual environment of verifiers, as a program: prints the tasks of an environment, or serves it.

    python host.py tasks CONFIG COUNT     # one line of JSON for each task
    python host.py serve CONFIG ADDRESS   # prints the address it listens at; ends with its standard input

Nothing of LlamaRL is imported here. CONFIG is JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

MARK = "llamarl "  # before every line that is meant for us: environments print what they like


class _Told:
    """Takes the address in place of a queue."""

    def put(self, address: str) -> None:
        print(f"{MARK}{address}", flush=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    action, config_json, argument = sys.argv[1:]
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    config: Any = resolve_env_config(json.loads(config_json))
    if action == "tasks":
        for task in load_environment(config).taskset.take(int(argument)):
            print(MARK + json.dumps(task.data.model_dump(mode="json", exclude_none=True)))
        return
    from verifiers.v1.serve import serve_env

    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve_env(max_workers=1, address=argument, address_queue=_Told(), config=config)


if __name__ == "__main__":
    main()
