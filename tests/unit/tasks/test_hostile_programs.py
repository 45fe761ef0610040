"""Whatever program a policy writes, it is paid for being right and for nothing else; it leaves no process and no file, reads
and changes nothing outside, and the next honest one is still right.

`make soak` (that is, $LLAMARL_HOSTILE) runs all of them as scripts and as functions, and behind every kind of walls.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.hostile_programs import FORGING, QUICK, hostile_programs
from helpers.sandboxes import BRIEF, Case, score_under, skip_without_sandbox, works
from msgspec.structs import replace

from llamarl.config import RewardConfig
from llamarl.tasks.judge import Judge, Judgment
from llamarl.tasks.sandbox.walls import UNPRIVILEGED, Walls
from llamarl.types import Problem

ASKED = "the input of the test"
EXPECTED = hashlib.sha256(ASKED.encode()).hexdigest()
TESTS = {
    "script": json.dumps([{"input": ASKED, "output": EXPECTED}]),
    "function": json.dumps([{"call": "digest", "args": [ASKED], "expected": EXPECTED}]),
}
HONEST = """
import hashlib, sys
def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()
if __name__ == "__main__":
    print(digest(sys.stdin.read()))
"""
MARK = f"llamarl_mark_{os.getpid()}"
ALL = "LLAMARL_HOSTILE" in os.environ


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file that holds what is expected, readable and writable by all, in a folder that is too; a home."""
    folder = tmp_path_factory.mktemp("outside")
    for part in (folder, *list(folder.parents)[:2]):
        part.chmod(0o777)
    secret = folder / "tests.json"
    secret.write_text(TESTS["script"])
    secret.chmod(0o666)
    os.environ["LLAMARL_CANARY"] = EXPECTED
    yield secret
    del os.environ["LLAMARL_CANARY"]


def programs(secret: Path) -> dict[str, str]:
    places = {"SECRET": str(secret), "MARK": MARK, "HOME_DIR": str(Path.home())}
    return {name: string.Template(text).safe_substitute(places) for name, text in hostile_programs().items()}


def check_nothing_is_left(secret: Path) -> None:
    state = secret.stat()
    assert (stat.S_IMODE(state.st_mode), secret.read_text()) == (0o666, TESTS["script"])
    assert state.st_mtime > 1e9, "aged"
    for folder in (secret.parent, Path.home(), Path("/tmp"), Path("/dev/shm"), Path.cwd()):
        assert not [path for path in folder.iterdir() if MARK in path.name], folder
    assert not running_programs()


def running_programs() -> list[str]:
    """Processes that are somebody's program: of the unprivileged user, or with the interpreter's options."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            owner = folder.stat().st_uid
        except OSError:
            continue
        if b"-X" in command and b"utf8" in command and b"-I" in command and owner in (UNPRIVILEGED, os.getuid()):
            found.append(f"{folder.name}: {command[:6]!r}")
        if MARK.encode() in b" ".join(command):
            found.append(f"{folder.name}: {command[:6]!r}")
    return found


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    skip_without_sandbox()
    judge = Judge(RewardConfig(scorer="code", workers=3, retries=0), sandbox=BRIEF)
    judge.prepare()
    yield judge
    judge.close()


def test_there_are_enough() -> None:
    assert len(hostile_programs()) >= 60


@pytest.mark.timeout(400)
def test_no_hostile_program_is_paid_and_none_leaves_anything(judge: Judge, outside: Path) -> None:
    pids, hostile = judge.worker_pids, programs(outside)
    asked = [(name, "script") for name in hostile]
    asked += [(name, "function") for name in (hostile if ALL else FORGING)]
    for name, kind in asked:
        judge.ask((name, kind), f"```python\n{hostile[name]}\n```", Problem("", TESTS[kind]))
    found: dict[object, Judgment] = {}
    while judge.num_pending:
        found |= dict(judge.collect(1.0))
    assert len(found) == len(asked)
    assert not {key: outcome for key, outcome in found.items() if outcome.reward != 0.0}
    assert not {key: outcome for key, outcome in found.items() if outcome.status != "ok" and not outcome.reason}
    assert judge.worker_pids == pids, "a worker had to be replaced"
    check_nothing_is_left(outside)
    for tests in TESTS.values():
        assert judge.score(HONEST, Problem("", tests)).reward == 1.0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("walls", list(Walls))
def test_every_kind_of_walls_holds_by_itself(walls: Walls, outside: Path) -> None:
    """The job takes the strongest; here each one is taken, with the system's interpreter."""
    if walls is Walls.ROOT and not ALL:
        pytest.skip("those of every job that root starts: tested above")
    if not works(walls):
        pytest.skip(f"this machine does not allow: {walls.value}")
    hostile = programs(outside)
    cases: list[Case] = [(name, hostile[name], TESTS["script"]) for name in (hostile if ALL else QUICK)]
    found = score_under(
        walls, [*cases, ("honest", HONEST, TESTS["script"]), ("honest call", HONEST, TESTS["function"])]
    )
    assert (found.pop("honest"), found.pop("honest call")) == (1.0, 1.0)
    assert not {name: reward for name, reward in found.items() if reward}
    check_nothing_is_left(outside)


@pytest.mark.parametrize(
    "name", ["reads the tests", "reads the environment", "walks out of its folder", "writes beside the tests"]
)
def test_what_they_try_would_work_without_walls(name: str, tmp_path: Path) -> None:
    """Else nothing would be shown by their failing."""
    secret = tmp_path / "tests.json"
    secret.write_text(TESTS["script"])
    done = subprocess.run(
        [sys.executable, "-c", programs(secret)[name]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"CANARY": EXPECTED},
        check=True,
        timeout=60,
    )
    assert EXPECTED in done.stdout or [path for path in tmp_path.iterdir() if MARK in path.name]


def test_a_program_does_not_outlive_the_worker_that_runs_it() -> None:
    skip_without_sandbox()
    judge = Judge(RewardConfig(scorer="code", workers=1, retries=0), sandbox=replace(BRIEF, wall_s=60.0))
    judge.prepare()
    judge.ask("sleeps", "import time\ntime.sleep(60)", Problem("", TESTS["script"]))
    wait_for(lambda: bool(running_programs()))
    os.kill(judge.worker_pids[0], signal.SIGKILL)
    wait_for(lambda: not running_programs())
    while not (done := judge.collect(1.0)):
        pass
    assert done[0][1].status == "error"
    judge.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)
