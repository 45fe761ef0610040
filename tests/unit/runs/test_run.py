"""A run folder as data: what `llamarl.Run` and `llamarl runs` say is what the files hold, in every state of a run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import llamarl
from helpers.killing import KillAt, Killed

from llamarl import Job, Run
from llamarl.cli.runs import _columns, _table
from llamarl.config.file import load_config
from llamarl.errors import InputError, JobFailed
from llamarl.observe.run_lock import RunLock, is_locked
from llamarl.runs.listing import RunEntry

SHORT = [
    "engine=inline",
    "schedule.updates=3",
    "schedule.groups_per_update=4",
    "evaluate.prompts=0",
    "snapshots.every=1",
]


def test_everything_is_there_as_data(run: Path) -> None:
    found = Run(str(run))
    assert (found.state, found.updates, found.config.schedule.updates) == ("finished", 3, 3)
    metrics = found.metrics()
    assert metrics["update"].tolist() == [0, 1, 2]
    assert all(len(values) == 3 for values in metrics.values()) and "role" not in metrics
    assert metrics["reward"].mean() == pytest.approx(
        np.mean([rollout.reward for u in range(3) for group in found.rollouts.groups(u) for rollout in group.rollouts])
    )
    assert found.metrics("nobody") == {}
    assert (found.timings()["update_s"] > 0).all()
    assert [point.version for point in found.evaluations()] == [0, 3]
    summary, start = found.summary, found.last_start
    assert summary is not None and start is not None
    assert summary.eval_after == found.evaluations()[-1].accuracy
    assert found.wall_s == summary.wall_s
    assert (start.run, start.version) == (0, 0)
    assert found.audit().clean
    spans = found.timeline()
    assert {span.executor for span in spans} == {"generator/0", "reward/0", "trainer/0"}
    assert all(0 <= span.start_s <= span.end_s <= summary.wall_s + 1 for span in spans)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        Run(tmp_path)


def test_a_run_that_is_at_work_is_running_and_its_reader_never_gets_in_the_way(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    lock = RunLock(tmp_path / "run")
    assert is_locked(tmp_path / "run") and Run(tmp_path / "run").state == "running"
    lock.release()
    assert not is_locked(tmp_path / "run") and Run(tmp_path / "run").state == "finished"
    RunLock(tmp_path / "run").release()
    assert not is_locked(tmp_path)


def test_killed_resumed_and_failed_runs_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        Job(load_config(None, SHORT), builders={"trainer": KillAt(2)}).run(folder)
    (folder / "summary.json").unlink()  # a real kill leaves none
    killed = Run(folder)
    assert (killed.state, killed.updates, killed.summary) == ("crashed", 2, None)
    assert killed.rollouts.updates == [0, 1]
    Job.resume(folder)
    assert (Run(folder).state, Run(folder).updates) == ("finished", 3)
    killed.rollouts.refresh()
    assert killed.rollouts.updates == [0, 1, 2]


def test_the_summary_of_an_earlier_start_does_not_count(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    row = json.loads((tmp_path / "run" / "starts.jsonl").read_text().splitlines()[0])
    with (tmp_path / "run" / "starts.jsonl").open("a") as file:
        file.write(json.dumps({**row, "run": 1, "at": "2999-01-01T00:00:00+00:00"}) + "\n")
    assert Run(tmp_path / "run").state == "crashed"


def test_a_job_that_fails_is_failed(tmp_path: Path) -> None:
    def broken(completion: str, answer: str) -> float:
        if completion != answer:  # the answer itself is tried before the job starts
            raise RuntimeError("out of ideas")
        return 1.0

    with pytest.raises(JobFailed):
        Job(load_config(None, SHORT), scorer=broken).run(tmp_path / "run")
    found = Run(tmp_path / "run")
    assert found.state == "failed" and found.summary is not None and "out of ideas" in found.summary.outcome


# llamarl runs


def test_runs_are_listed_with_the_settings_that_differ(run: Path, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    shutil.copytree(run, tmp_path / "deep" / "er" / "one")
    shutil.copytree(run, tmp_path / "two")
    starts = tmp_path / "two" / "starts.jsonl"
    row = json.loads(starts.read_text())
    row["config"]["trainer"]["lr"] = 0.125
    del row["digest"]
    starts.write_text(json.dumps(row) + "\n")
    shown = llamarl("runs", tmp_path)
    assert shown.code == 0, shown.err
    head, *lines = shown.out.splitlines()
    assert head.split()[:2] == ["run", "state"]
    assert len(lines) == 2 and all("finished  3 of 3" in line and "trainer.lr=" in line for line in lines)
    assert any("trainer.lr=0.125" in line and str(tmp_path / "two") in line for line in lines)
    rows = [json.loads(line) for line in llamarl("runs", tmp_path, "--json").out.splitlines()]
    assert {tuple(row["settings"]) for row in rows} == {("trainer.lr",)}
    assert {(row["state"], row["updates"], row["score_name"]) for row in rows} == {("finished", 3, "accuracy")}


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_settings_go_on_in_the_next_line_where_a_terminal_is_narrow(columns: int) -> None:
    settings = {f"trainer.setting_{number}": "x" * 60 if number == 4 else number for number in range(9)}
    entry = RunEntry("runs/gsm8k-lora", "finished", 3, 3, None, "accuracy", 7.0, "", "", settings)
    head, whole = _table([entry])
    assert all(f"{key}={value}" in whole for key, value in settings.items())
    lines = list(_table([entry], columns))
    assert max(map(len, lines)) <= columns
    beside = head.index("settings that")
    assert lines[0] == (head if columns >= 100 else head[:beside].rstrip())
    first = next(number for number, line in enumerate(lines) if "gsm8k" in line)
    assert "".join(lines[first:]).replace(" ", "") == whole.replace(" ", "")


def test_a_list_keeps_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where its output is read on one."""
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _columns() == 70
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert _columns() == sys.maxsize


def test_a_damaged_run_is_left_out_with_a_line(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "one")
    shutil.copytree(run, tmp_path / "two")
    (tmp_path / "two" / "starts.jsonl").write_text("")
    (tmp_path / "two" / "config.yaml").write_text("schedule: [")
    shown = llamarl("runs", tmp_path)
    assert shown.code == 0 and len(shown.out.splitlines()) == 2
    assert shown.err.count("\n") == 1 and "left out" in shown.err


@pytest.mark.parametrize("what", ["empty", "missing"])
def test_no_runs_is_one_line(what: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shown = llamarl("runs", tmp_path / what)
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)


# llamarl rollouts


def test_the_newest_update_is_shown_and_any_other_on_request(run: Path) -> None:
    shown = llamarl("rollouts", run)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("update 2: 4 of 4 groups are kept\n\ngroup 8: expected ")
    assert shown.out.endswith("1 more groups: --all\n") and shown.out.count("] reward") == 3 * 4
    assert llamarl("rollouts", run, "--all").out.count("] reward ") == 16
    assert llamarl("rollouts", run, "--update", 0).out.startswith("update 0")
    one = llamarl("rollouts", run, "--group", 5).out
    assert one.startswith("update 1") and one.count("group 5:") == 1 and one.count("  [") == 4


def test_json_has_every_rollout_of_every_update(run: Path) -> None:
    rows = [json.loads(line) for line in llamarl("rollouts", run, "--json").out.splitlines()]
    assert [(row["update"], row["group"], row["number"]) for row in rows] == [
        (group // 4, group, number) for group in range(12) for number in range(4)
    ]
    assert "tokens" not in rows[0]
    row = json.loads(llamarl("rollouts", run, "--json", "--tokens", "--update", 1).out.splitlines()[0])
    assert len(row["tokens"]) == len(row["versions"]) == len(row["behavior_logprobs"]) == len(row["sampled"])


def test_worst_and_best_are_by_reward(run: Path) -> None:
    rows = [json.loads(line) for line in llamarl("rollouts", run, "--json", "--update", 1).out.splitlines()]
    rewards = sorted(row["reward"] for row in rows)
    for option, expected in (("--worst", rewards[:3]), ("--best", rewards[::-1][:3])):
        found = llamarl("rollouts", run, "--update", 1, option, 3, "--json").out.splitlines()
        assert [json.loads(line)["reward"] for line in found] == expected
        assert llamarl("rollouts", run, option, 1).code == 0


def test_a_damaged_group_is_left_out_with_a_line(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    place = Run(run).rollouts.places(1)[2]
    with (tmp_path / "run" / "rollouts" / "groups" / f"{place.segment:08}").open("r+b") as file:
        file.seek(place.offset + 20)
        file.write(b"\xff" * 8)
    shown = llamarl("rollouts", tmp_path / "run", "--json")
    assert shown.code == 0 and len(shown.out.splitlines()) == 11 * 4
    assert shown.err.count("\n") == 1 and f"group {place.ordinal} is left out" in shown.err
    worst = llamarl("rollouts", tmp_path / "run", "--update", 1, "--worst", 12, "--json")
    assert (worst.code, len(worst.out.splitlines()), worst.err.count("\n")) == (0, 12, 1), "others take its places"
    alone = llamarl("rollouts", tmp_path / "run", "--group", place.ordinal)
    assert alone.code == 2 and "no whole record" in alone.err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--update", "7"], "no rollouts of it; there are those of 0 to 2"),
        (["--group", "99"], "group 99 is not there"),
        (["--group", "1", "--update", "2"], "is of update 0, not 2"),
        (["--worst", "1", "--best", "1"], "--best: cannot take effect with --worst"),
        (["--tokens"], "cannot take effect without --json"),
        (["--worst", "0"], "--worst"),
    ],
)
def test_mistakes_are_one_line(args: list[str], told: str, run: Path) -> None:
    shown = llamarl("rollouts", run, *args)
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1) and told in shown.err


def test_a_run_without_rollouts_says_why(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "rollouts")
    assert "observe.rollouts_mb" in llamarl("rollouts", tmp_path / "run").err
    assert llamarl("rollouts", tmp_path).code == 2


def test_hostile_text_cannot_move_the_cursor(run: Path, tmp_path: Path) -> None:
    """Escape codes in an answer, a reward's name or a prompt are shown, not obeyed."""
    shutil.copytree(run, tmp_path / "run")
    tokenizer = tmp_path / "run" / "rollouts" / "tokenizer.json"
    vocabulary = json.loads(tokenizer.read_text())
    hostile = {"1": "\x1b[2J", "2": "\u202e", "3": "\x9b", "=": "\r"}
    vocabulary["model"]["vocab"] = {hostile.get(k, k): v for k, v in vocabulary["model"]["vocab"].items()}
    tokenizer.write_text(json.dumps(vocabulary))
    for args in ([], ["--json"], ["--all"]):
        shown = llamarl("rollouts", tmp_path / "run", *args)
        assert shown.code == 0, shown.err
        assert all(char.isprintable() or char == "\n" for char in shown.out)
        assert "x1b[2J" in shown.out or "u001b[2J" in shown.out
