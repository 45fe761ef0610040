"""Samples the main thread's stack of every process of a job, for `first_update.py --stacks`. Python runs this file at its
start if the folder is on PYTHONPATH; executors are forked, so they begin anew after the fork.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

FOLDER = os.environ.get("LLAMARL_STACKS", "")
_EVERY_S, _WRITTEN_S = 0.02, 0.5


def _sample() -> None:
    """Append a line for each sample: unix seconds, a tab, and the frames, outermost first."""
    file, main = Path(FOLDER) / str(os.getpid()), threading.main_thread().ident
    lines, written_s = list[str](), time.time()
    while True:
        time.sleep(_EVERY_S)
        frame, found = sys._current_frames().get(main or 0), list[str]()
        while frame is not None:
            found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
            frame = frame.f_back
        lines.append(f"{time.time():.3f}\t{';'.join(reversed(found))}\n")
        if time.time() - written_s > _WRITTEN_S:
            with file.open("a") as out:
                out.writelines(lines)
            lines, written_s = [], time.time()


def _start() -> None:
    threading.Thread(target=_sample, daemon=True).start()


def _start_in_executor(server: int) -> None:
    """What executors fork themselves, such as a sandbox, may have no threads."""
    if os.getppid() == server:
        _start()


if FOLDER and "fork_server" in " ".join(sys.orig_argv):  # which may have no threads
    os.register_at_fork(after_in_child=partial(_start_in_executor, os.getpid()))
elif FOLDER:
    _start()
