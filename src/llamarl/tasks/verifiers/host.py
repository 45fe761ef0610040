"""Runs in the virtual environment of verifiers, as a program: prints the tasks of an environment, or serves it.

    python host.py check CONFIG ''         # whether its environment can be used
    python host.py tasks CONFIG COUNT     # one line of JSON for each task
    python host.py serve CONFIG ADDRESS   # prints the address it listens at; ends with its standard input

Nothing of LlamaRL is imported here. CONFIG is JSON. The last line on stderr is the reason for an exit code that is not 0.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any

MARK = "llamarl "  # before every line that is meant for us: environments print what they like
OLDEST = (0, 4)  # version of verifiers whose server speaks as we do


class Unusable(Exception):
    """Why this virtual environment cannot run the environment."""


class _Told:
    """Takes the address in place of a queue."""

    def put(self, address: str) -> None:
        print(f"{MARK}{address}", flush=True)


def _end_with_parent() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock would make a failing start end with another error
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def check_version() -> None:
    """Raises Unusable without verifiers, or with one that is too old."""
    wanted = ".".join(map(str, OLDEST))
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise Unusable(
            f"there is no package verifiers at {sys.executable}; install verifiers>={wanted} there"
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise Unusable(
            f"verifiers {version} is too old; install verifiers>={wanted}, whose environments are tasksets (v1)"
        )


def check_taskset(name: str) -> None:
    """Raises Unusable for an environment of the old interface, and whatever the package raises if there is none."""
    from verifiers.v1.utils.loaders import import_taskset, taskset_class

    module = import_taskset(name)
    if callable(getattr(module, "load_environment", None)) and not hasattr(module, "__all__"):
        raise Unusable(
            f"{name} has the old interface of verifiers (v0, load_environment); only tasksets (v1) are supported"
        )
    taskset_class(name)


def resolved(config: dict[str, Any]) -> Any:
    """The environment's own config object. Harnesses are processes of this machine and run no code that the model writes,
    unless the config or the environment says otherwise."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    name = config["taskset"]["id"]
    for role, field in env_config_type(name, config.get("id", "")).model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        defaults: dict[str, Any] = {"runtime": {"type": "subprocess"}}
        if field.default.harness is None and default_harness_id(name) == "bash":
            defaults["harness"] = {"id": "null"}
        config[role] = {**defaults, **config.get(role, {})}
    return resolve_env_config(config)


def print_tasks(config: Any, count: int) -> None:
    from verifiers.v1.utils.loaders import load_environment

    for task in load_environment(config).taskset.take(count):
        print(MARK + json.dumps(task.data.model_dump(mode="json")))


def serve(config: Any, address: str) -> None:
    from verifiers.v1.serve import serve_env

    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve_env(max_workers=1, address=address, address_queue=_Told(), config=config)


def run(action: str, given: dict[str, Any], argument: str) -> None:
    check_version()
    if "taskset" in given:
        check_taskset(given["taskset"]["id"])
    if action == "tasks":
        print_tasks(resolved(given), int(argument))
    elif action == "serve":
        serve(resolved(given), argument)


def main() -> None:
    action, config_json, argument = sys.argv[1:]
    try:
        run(action, json.loads(config_json), argument)
    except Unusable as error:
        sys.exit(str(error))
    except Exception as error:  # code of others may raise anything; the last line is the reason
        traceback.print_exc()
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
