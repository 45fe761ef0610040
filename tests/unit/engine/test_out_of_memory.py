"""Whoever dies of a lack of memory is told of as that, with the settings that would help."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers.cli import llamarl

from llamarl.builders.context import BuildContext
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.engine.engine import Death
from llamarl.engine.envelope import Envelope
from llamarl.engine.out_of_memory import KILLED, explain_death
from llamarl.engine.supervision import Rank, Supervision
from llamarl.errors import JobFailed
from llamarl.executors.executor import Executor
from llamarl.jobs.job import Job
from llamarl.machine import KilledForMemory
from llamarl.messages import Failed


class Bystander(Supervision[Rank]):
    """An engine whose ranks are nobody."""

    exit_report_s = 0.0

    def __init__(self, root: Path) -> None:
        super().__init__(Config())
        self._killed_for_memory = KilledForMemory(root)

    def _cut(self, state: Rank) -> None:
        pass

    def _kill(self, state: Rank) -> None:
        pass

    def bear(self, executor: str) -> Rank:
        state = self._ranks[executor, 0] = Rank(executor, 0, 0)
        return state

    def death_of(self, state: Rank, reason: str) -> str:
        self._hear_of_death(state, reason)
        return self._told()

    def hear_last_words(self, state: Rank, reason: str) -> str:
        self._hear_envelope(state, Envelope((Failed(reason),), ()))
        self._check_deadlines()
        return self._told()

    def _told(self) -> str:
        (death,) = self._take_arrivals()
        assert isinstance(death, Death)
        return death.reason


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    kills(tmp_path, 3)
    return tmp_path


def kills(machine: Path, count: int) -> None:
    (machine / "sys/fs/cgroup/job/memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom 9\noom_kill {count}\n")


def test_a_kill_by_the_kernel_for_memory_is_told_apart_from_any_other(machine: Path) -> None:
    engine = Bystander(machine)
    assert engine.death_of(engine.bear("generator/0"), KILLED) == KILLED
    kills(machine, 4)
    told = engine.death_of(engine.bear("generator/0"), KILLED)
    assert told.startswith("out of memory: lower generator.slots, generator.kv_pages")
    assert engine.death_of(engine.bear("generator/0"), KILLED) == KILLED, "the same kill counts once"
    kills(machine, 5)
    assert engine.death_of(engine.bear("generator/0"), "exited with code 1") == "exited with code 1"


@pytest.mark.parametrize(
    "words",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "MemoryError: ",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes",
        "CudaRefused: weights: cuMemCreate failed: out of memory (2)",
    ],
)
def test_last_words_about_memory_name_the_settings_first(machine: Path, words: str) -> None:
    engine = Bystander(machine)
    told = engine.hear_last_words(engine.bear("trainer/0"), words)
    assert told.startswith("out of memory: lower trainer.tokens_per_pack, or set trainer.recompute=full")
    assert told.endswith(f"({words})")


def test_other_last_words_stay_as_they_are(machine: Path) -> None:
    engine = Bystander(machine)
    assert engine.hear_last_words(engine.bear("trainer/0"), "ValueError: no") == "ValueError: no"


def test_every_role_has_a_remedy_of_settings_that_exist() -> None:
    for role in ("generator", "trainer", "reference", "reward", "reward_model"):
        remedy = explain_death(f"{role}/0", "MemoryError: ", killed_for_memory=False)
        for key in (word.strip(",()").partition("=")[0] for word in remedy.split() if "." in word):
            section, _, name = key.partition(".")
            assert hasattr(getattr(Config(), section), name), key


def build_hungry(context: BuildContext) -> Executor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_an_inline_job_that_runs_out_of_memory_says_so(tmp_path: Path) -> None:
    job = Job(load_config(None, ["engine=inline"]), builders={"trainer": build_hungry})
    with pytest.raises(JobFailed, match=r"trainer/0 failed: out of memory: lower trainer\.tokens_per_pack"):
        job.run(tmp_path / "run")


def test_a_command_that_runs_out_of_memory_says_so_in_one_line() -> None:
    with patch("llamarl.generate.llm.load_merged", side_effect=torch.OutOfMemoryError("CUDA out of memory.\nTried")):
        code, out, err = llamarl("generate", "tiny", "--prompt", "1+1=")
    assert (code, out) == (3, "")
    assert err.splitlines()[-1] == "llamarl: out of memory: CUDA out of memory. Tried"


def test_another_error_keeps_its_traceback() -> None:
    with (
        patch("llamarl.generate.llm.load_merged", side_effect=RuntimeError("a bug")),
        pytest.raises(RuntimeError, match="a bug"),
    ):
        llamarl("generate", "tiny", "--prompt", "1+1=")
