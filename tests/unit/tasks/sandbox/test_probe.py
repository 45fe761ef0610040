"""Where the kernel lacks what a sandbox needs, nothing is run, and what is missing is named. Old kernels are simulated by a
filter that answers "not implemented"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.sandboxes import SYSTEM_PYTHON, skip_without_sandbox, works

from llamarl.config import RewardConfig, SandboxConfig
from llamarl.errors import ConfigError
from llamarl.tasks.judge import Judge
from llamarl.tasks.sandbox import probe
from llamarl.tasks.sandbox.probe import Features, missing, open_sandbox
from llamarl.tasks.sandbox.walls import Walls
from llamarl.types import Problem

TESTS = Path(__file__).parents[3]
HONEST, FORKS = (
    "print(int(input()) * 2)",
    "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint(int(input()) * 2)",
)


def score_without(calls: str, *programs: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    tests = [{"input": "21", "output": "42"}]
    lines = [json.dumps({"completion": program, "tests": tests}) for program in programs]
    command = [sys.executable, "-m", "llamarl.cli", "score", "code", "reward.workers=1", *settings]
    return subprocess.run(
        [sys.executable, "-m", "helpers.without", calls, *command],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"},
        check=False,
    )


@pytest.mark.parametrize(
    ("calls", "named"),
    [("landlock_create_ruleset", "Landlock"), ("seccomp", "seccomp"), ("landlock_create_ruleset,seccomp", "seccomp")],
)
def test_a_kernel_without_it_is_refused_by_name(calls: str, named: str) -> None:
    done = score_without(calls, HONEST)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr and "missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_namespaces_programs_run_and_start_nothing() -> None:
    if not works(Walls.BARE):
        pytest.skip("no Landlock of version 3, or no interpreter that everybody can read")
    done = score_without("unshare", HONEST, FORKS, HONEST, settings=(f"sandbox.python={SYSTEM_PYTHON}",))
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["reward"] for line in done.stdout.splitlines()] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (Features("riscv64", 7, True), ["riscv64", "x86_64, aarch64"]),
        (Features("x86_64", 0, True), ["Landlock"]),
        (Features("aarch64", 7, False), ["seccomp"]),
        (Features("aarch64", 0, False), ["Landlock", "seccomp"]),
    ],
)
def test_everything_missing_is_named(found: Features, named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        open_sandbox(SandboxConfig(), found)
    assert all(name in str(error.value) for name in named)


def test_nothing_is_missing_where_all_is_there() -> None:
    assert missing(Features("x86_64", 1, True)) == missing(Features("aarch64", 1, True)) == []


def test_an_old_landlock_is_not_enough_where_other_files_are_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "walls_to_try", lambda: (Walls.BARE,))
    with pytest.raises(ConfigError, match="Landlock ABI 3"):
        open_sandbox(SandboxConfig(), Features("x86_64", 2, True))


def test_a_machine_on_which_the_first_program_takes_long_is_not_refused() -> None:
    skip_without_sandbox()
    hasty = SandboxConfig(wall_s=0.001)
    assert open_sandbox(hasty)._limits is hasty, "programs themselves have the limit that was set"


def test_an_interpreter_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.python"):
        open_sandbox(SandboxConfig(python="/no/such/python"))


def test_an_interpreter_brings_its_packages_along_and_ours_has_none() -> None:
    skip_without_sandbox()
    program, problem = "import msgspec\nprint(1)", Problem("", '[{"output": "1"}]')
    for python, reward in (("", 0.0), (sys.executable, 1.0)):
        judge = Judge(RewardConfig(scorer="code", workers=1, retries=0), sandbox=SandboxConfig(python=python))
        assert judge.score(program, problem).reward == reward
        judge.close()
