"""Jobs that are put together in Python: scorers and tasks that are given, and settings that are checked as a file's are."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import own_scorer
from helpers.brief import BRIEF
from helpers.own_scorer import Bonus, double_bonus, nearness

from llamarl import Job, Run
from llamarl.config import Config, EvaluateConfig, RewardConfig, ScheduleConfig, TrainerConfig
from llamarl.config.file import load_config
from llamarl.errors import ConfigError, JobFailed
from llamarl.types import Problem


def brief(*settings: str) -> Config:
    return load_config(None, [*BRIEF, *settings])


class Doubles:
    """A task of one's own; no file of settings knows it."""

    def problem(self, ordinal: int) -> Problem:
        number = ordinal % 50
        return Problem(f"{number}+{number}=", str(2 * number), columns={"number": number})

    def evaluation(self, count: int, split: str = "held_out") -> Sequence[Problem]:
        return [self.problem(number) for number in range(50, 50 + count)]


def test_any_callable_is_a_scorer_in_this_process(tmp_path: Path) -> None:
    seen: list[str] = []

    def score(completion: str, answer: str) -> float:
        seen.append(completion)
        return float(len(completion))

    summary = Job(brief(), scorer=score).run(tmp_path / "run")
    assert (summary.outcome, summary.groups_dropped, summary.score_failures) == ("finished", 0, 0)
    assert len(seen) == 2 + 2 * 4 * 4 + 2 * 8, "the first problem's answer twice, two updates, two evaluations"
    assert summary.reward_first > 1.0
    assert "scorer: python:test_any" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_job_shows_itself_in_the_terminal_if_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Job(brief()).run(tmp_path / "silent")
    assert not capsys.readouterr().out
    with pytest.raises(ConfigError, match="display: expected 'terminal' or a Display, got 'termnal'"):
        Job(brief()).run(tmp_path / "shown", display="termnal")  # type: ignore[arg-type]
    Job(brief()).run(tmp_path / "shown", display="terminal")
    assert "update    2 of 2" in capsys.readouterr().out


def test_coroutines_and_batches_are_scorers_too(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def score(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0.001)
        sizes.append(len(completions))
        return [float(one == other) for one, other in zip(completions, answer, strict=True)]

    summary = Job(brief("evaluate.prompts=0"), scorer=score).run(tmp_path / "run")
    assert summary.outcome == "finished"
    assert sizes == [2] + [4] * 8, "the first problem's answer twice, then whole groups"


@pytest.mark.parametrize("settings", [[], ["reward.trusted=true"]], ids=["workers", "trusted"])
def test_a_function_of_a_file_is_found_by_other_processes(tmp_path: Path, settings: list[str]) -> None:
    job = Job(brief("engine=local", "schedule.updates=1", *settings), scorer=nearness)
    assert job.config.reward.scorer == f"{own_scorer.__file__}:nearness"
    summary = job.run(tmp_path / "run")
    assert (summary.outcome, summary.score_failures) == ("finished", 0)


def test_an_object_of_a_file_is_found_by_other_processes(tmp_path: Path) -> None:
    job = Job(brief("engine=local", "schedule.updates=1"), scorer=double_bonus)
    assert job.config.reward.scorer == f"{own_scorer.__file__}:double_bonus"
    summary = job.run(tmp_path / "run")
    assert (summary.outcome, summary.score_failures) == ("finished", 0)
    rewards = {reward for place in Run(tmp_path / "run").rollouts.places(0) for reward in place.rewards}
    assert rewards <= {0.0, 2.0}
    with pytest.raises(ConfigError, match="or an object that such a file holds"):
        Job(brief("engine=local"), scorer=Bonus(3.0))


def test_what_other_processes_cannot_find_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"scorer: with engine=local it must be a function at the top of a \.py file"):
        Job(brief("engine=local"), scorer=lambda completion: 0.0)
    with pytest.raises(ConfigError, match=r"reward\.scorer: is set, and a scorer is given"):
        Job(brief("reward.scorer=exact"), scorer=nearness)
    with pytest.raises(ConfigError, match="scorer: must be a function, is a int"):
        Job(brief(), scorer=3)  # type: ignore[arg-type]


def test_on_inline_what_a_trusted_scorer_raises_keeps_its_traceback(tmp_path: Path) -> None:
    """It is the engine for debugging: a debugger, and the traceback, end in the function itself."""

    def score(completion: str, answer: str) -> float:
        if completion != answer:
            raise LookupError(f"not {answer}")
        return 1.0

    with pytest.raises(
        JobFailed, match=r"reward/0 failed: LookupError: not \d+ \(.*test_from_python\.py:\d+\)"
    ) as failed:
        Job(brief(), scorer=score).run(tmp_path / "run")
    assert isinstance(failed.value.__cause__, LookupError)
    assert traceback.extract_tb(failed.value.__cause__.__traceback__)[-1].name == "score"
    with pytest.raises(ConfigError, match=r"first problem's own answer: ZeroDivisionError") as refused:
        Job(brief(), scorer=lambda completion: 1 / 0)
    assert isinstance(refused.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_script_that_starts_a_job_when_it_is_imported_is_told_of_the_guard(tmp_path: Path, trusted: bool) -> None:
    """Each process of the job imports the file with the function: it would start another job, and so on."""
    script = tmp_path / "script.py"
    script.write_text(
        "from llamarl import Job\nfrom llamarl.config import Config, RewardConfig\n"
        "def score(completion, answer):\n    return 1.0\n"
        f"Job(Config(reward=RewardConfig(trusted={trusted})), scorer=score).run({str(tmp_path / 'run')!r})\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert 'script.py starts a job when it is imported; put that under `if __name__ == "__main__":`' in done.stderr


def test_a_breakpoint_in_a_given_scorer_stops_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(sys._getframe(1).f_code.co_name))

    def score(completion: str) -> float:
        breakpoint()
        return 0.0

    Job(brief("schedule.updates=1", "evaluate.prompts=0"), scorer=score).run(tmp_path / "run")
    assert set(stopped) == {"score"}


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_task_of_ones_own_is_asked(tmp_path: Path, engine: str) -> None:
    summary = Job(brief(f"engine={engine}", "schedule.updates=1"), task=Doubles()).run(tmp_path / "run")
    assert (summary.outcome, summary.groups_dropped) == ("finished", 0)
    written = load_config(tmp_path / "run" / "config.yaml")
    assert (written.task.kind, written.reward.scorer) == ("given", "exact")


def test_a_task_of_ones_own_brings_columns(tmp_path: Path) -> None:
    def score(completion: str, number: int) -> float:
        return float(completion == str(2 * number))

    assert Job(brief("schedule.updates=1"), scorer=score, task=Doubles()).run(tmp_path / "run").outcome == "finished"

    def greedy(completion: str, size: int) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"asks for 'size', which is no column of the data; there are: .*number"):
        Job(brief(), scorer=greedy, task=Doubles())


def test_a_run_with_a_given_task_goes_on_only_with_it(tmp_path: Path) -> None:
    config = brief("snapshots.every=1", "engine=inline")
    Job(config, task=Doubles(), scorer=nearness).run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"task\.kind: the task of this job was given from Python"):
        Job.resume(tmp_path / "run")


def test_what_is_no_task_is_refused() -> None:
    class Half:
        def problem(self, ordinal: int) -> Problem:
            return Problem("1+1=", "2")

    class Words(Doubles):
        def problem(self, ordinal: int) -> Any:
            return "1+1="

    with pytest.raises(ConfigError, match="task: Half has no method 'evaluation'"):
        Job(brief(), task=Half())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"task: problem\(0\) must be a llamarl\.types\.Problem, is a str"):
        Job(brief(), task=Words())


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (Config(schedule=ScheduleConfig(updates=-3)), "schedule.updates=-3"),
        (Config(reward=RewardConfig(workers=0)), "reward.workers=0"),
        (Config(trainer=TrainerConfig(lr=float("nan"))), "trainer.lr=.nan"),
        (Config(trainer=TrainerConfig(lr="fast")), "trainer.lr=fast"),  # type: ignore[arg-type]
        (Config(evaluate=EvaluateConfig(split="both")), "evaluate.split=both"),  # type: ignore[arg-type]
        (Config(seed=-1), "seed=-1"),
    ],
)
def test_settings_made_in_python_are_checked_as_those_of_a_file_are(config: Config, setting: str) -> None:
    with pytest.raises(ConfigError) as of_a_file:
        load_config(None, [setting])
    with pytest.raises(ConfigError) as made_here:
        Job(config)
    assert str(made_here.value) == str(of_a_file.value).removeprefix("command line: ")
    assert made_here.value.exit_code == 2


def test_good_settings_are_left_as_they_are() -> None:
    config = load_config(None, [*BRIEF, "task.chat=false", "reward.combine={exact: 1.0, length: 0.1}"])
    assert Job(config).config == config


def test_a_file_that_another_process_cannot_import_ends_the_job_once(tmp_path: Path) -> None:
    main_pid = "import os\n\nif os.getpid() != {pid}:\n    raise ImportError('only at home')\n"
    code = main_pid.format(pid=os.getpid()) + "\ndef score(completion):\n    return 0.0\n"
    (tmp_path / "my.py").write_text(code)
    job = Job(brief("engine=local", f"reward.scorer={tmp_path}/my.py:score", "reward.trusted=true"))
    with pytest.raises(
        JobFailed, match=r"^reward/0: reward\.scorer: .*my\.py cannot be imported: ImportError: only at home"
    ):
        job.run(tmp_path / "run")


@pytest.mark.parametrize("overrides", ["seed=1", [("seed", 1)], ["seed=1", 2]])
def test_overrides_that_are_no_list_of_texts_are_refused(overrides: Any) -> None:
    with pytest.raises(
        ConfigError, match=r'overrides: must be a list of texts KEY=VALUE, such as \["trainer\.lr=1e-4"\]'
    ):
        Job.load(None, overrides)


@pytest.mark.parametrize("config", [None, "job.yaml", 3])
def test_settings_that_are_none_are_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"config: must be a llamarl\.Config, is a \w+; Job\.load reads a file"):
        Job(config)


def test_overrides_may_be_made_as_they_are_read() -> None:
    assert load_config(None, (f"seed={number}" for number in (1, 2))).seed == 2  # type: ignore[arg-type]


def test_a_given_task_reads_what_it_likes(tmp_path: Path) -> None:
    """Its path is none of ours: a database, or a name that it looks up."""
    summary = Job(brief(f"task.path={tmp_path}/problems.sqlite", "task.kind=jsonl"), task=Doubles()).run(
        tmp_path / "run"
    )
    assert summary.outcome == "finished"


def test_a_class_is_no_scorer() -> None:
    with pytest.raises(ConfigError, match="scorer: must be a function, is the class Bonus; give an object of it"):
        Job(brief(), scorer=Bonus)
