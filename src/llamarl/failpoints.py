"""Named places at every change of state, where a test can inject a fault. Only tests arm them.

`failpoint("snapshot.rename")` does nothing unless that name is armed, by `arm` or by the environment variable
LLAMARL_FAILPOINT=NAME:ACTION:NTH:FLAG. ACTION is raise, delay, kill or stop. It happens when the place is reached for the
NTH time, and only if the file FLAG can be created, so that it happens once over all processes and restarts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from llamarl.errors import InputError

VARIABLE = "LLAMARL_FAILPOINT"
DELAY_S = 0.2
Action = Literal["raise", "delay", "kill", "stop"]


class Fault(OSError):
    """The error that an armed failpoint raises; it stands for a failing disk or peer."""


class Armed(Struct):
    """An armed failpoint, and how often it has been reached."""

    name: str
    action: Action
    nth: int
    flag: str
    reached: int = 0


def _from_environment() -> Armed | None:
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        name, action, nth, flag = text.split(":", 3)
        if action not in get_args(Action):
            raise ValueError
        return Armed(name, action, int(nth), flag)  # type: ignore[arg-type]
    except ValueError:
        raise InputError(f"{VARIABLE}: expected NAME:ACTION:NTH:FLAG, found '{text}'") from None


_armed = _from_environment()


def failpoint(name: str) -> None:
    """Inject a fault here if this name is armed."""
    if _armed is not None and _armed.name == name:
        _reach(_armed)


def _reach(armed: Armed) -> None:
    armed.reached += 1
    if armed.reached < armed.nth or not _first(armed.flag):
        return
    match armed.action:
        case "raise":
            raise Fault(f"failpoint {armed.name}")
        case "delay":
            time.sleep(DELAY_S)
        case "kill":
            signal.raise_signal(signal.SIGKILL)
        case "stop":
            signal.raise_signal(signal.SIGSTOP)


def _first(flag: str) -> bool:
    with suppress(FileExistsError):
        Path(flag).touch(exist_ok=False)
        return True
    return False


@contextmanager
def arm(name: str, action: Action, flag: Path, nth: int = 1) -> Iterator[None]:
    """Arm a failpoint in this process and in those that it starts in the meantime."""
    global _armed  # noqa: PLW0603
    before, variable = _armed, os.environ.get(VARIABLE)
    _armed = Armed(name, action, nth, str(flag))
    os.environ[VARIABLE] = f"{name}:{action}:{nth}:{flag}"
    try:
        yield
    finally:
        _armed = before
        os.environ.pop(VARIABLE)
        if variable is not None:
            os.environ[VARIABLE] = variable
