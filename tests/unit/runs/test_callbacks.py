"""Callbacks are called once for each update, when it is on disk; one that fails neither stops nor changes the job."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers.killing import TINY, KillAt, Killed
from helpers.notes import Notes

from llamarl import Callback, EvaluationDone, Job, Run, StopTraining, UpdateDone
from llamarl.config.file import load_config
from llamarl.controller.ledger import Trained, read_ledger
from llamarl.errors import ConfigError
from llamarl.observe.callbacks import CallbackRunner
from llamarl.observe.summary import Summary

SETTINGS = (*TINY, "engine=inline", "schedule.updates=3", "evaluate.prompts=8", "snapshots.every=2")


class Witness(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_start(self, folder: Path) -> None:
        self.seen.append(("start", Run(folder).state))

    def on_update(self, event: UpdateDone) -> None:
        run = Run(event.folder)
        counted = [row.update for row in read_ledger(event.folder / "ledger") if isinstance(row, Trained)]
        assert counted[-1] == event.update, "the ledger on disk has it"
        assert run.metrics()["reward"][event.update] == event.metrics["reward"]
        assert len(list(run.rollouts.groups(event.update))) == 4, "its rollouts can be read"
        self.seen.append(("update", event.update, event.updates))

    def on_evaluation(self, event: EvaluationDone) -> None:
        self.seen.append(("evaluation", event.version, event.score_name))

    def on_end(self, summary: Summary) -> None:
        self.seen.append(("end", summary.outcome))


def test_each_update_is_told_once_when_it_is_on_disk(tmp_path: Path) -> None:
    witness, updates = Witness(), list[int]()
    notes = Notes()
    job = Job(load_config(None, SETTINGS), callbacks=[witness, lambda event: updates.append(event.update)])
    job.run(tmp_path / "run", display=notes)
    assert not [note for note in notes.seen if "callback" in note]
    assert witness.seen[0] == ("start", "running") and witness.seen[-1] == ("end", "finished")
    assert [one for one in witness.seen if one[0] == "update"] == [("update", update, 3) for update in range(3)]
    assert [one for one in witness.seen if one[0] == "evaluation"] == [
        ("evaluation", version, "accuracy") for version in (0, 3)
    ]
    assert updates == [0, 1, 2]


def test_a_callback_that_fails_is_not_called_again_and_the_job_goes_on(tmp_path: Path) -> None:
    calls = list[int]()

    def broken(event: UpdateDone) -> None:
        calls.append(event.update)
        raise LookupError("\x1b[2J nothing here")

    notes, witness = Notes(), Witness()
    summary = Job(load_config(None, SETTINGS), callbacks=[broken, witness]).run(tmp_path / "run", display=notes)
    assert (summary.outcome, calls) == ("finished", [0])
    assert len([one for one in witness.seen if one[0] == "update"]) == 3, "others are still called"
    (note,) = [note for note in notes.seen if "callback" in note]
    assert "broken failed and is not called again: LookupError" in note and "\x1b" not in note
    assert "LookupError" in (tmp_path / "run" / "logs" / "callbacks.log").read_text()


def test_a_callback_can_stop_the_job_which_can_be_resumed(tmp_path: Path) -> None:
    def stop(event: UpdateDone) -> None:
        raise StopTraining("good enough")

    notes = Notes()
    summary = Job(load_config(None, SETTINGS), callbacks=[stop]).run(tmp_path / "run", display=notes)
    assert summary.outcome == "stopped on request" and summary.updates < 3
    assert any("asked to stop: good enough" in note for note in notes.seen)
    assert Run(tmp_path / "run").state == "stopped"
    witness = Witness()
    assert Job.resume(tmp_path / "run", callbacks=[witness]).outcome == "finished"
    assert [one[1] for one in witness.seen if one[0] == "update"] == [*range(summary.updates, 3)]


def test_a_resumed_job_tells_the_updates_that_it_makes_again(tmp_path: Path) -> None:
    first, second = list[int](), list[int]()
    with pytest.raises(Killed):
        builders = {"trainer": KillAt(2)}
        Job(
            load_config(None, [*SETTINGS, "snapshots.every=1"]),
            builders=builders,
            callbacks=[lambda event: first.append(event.update)],
        ).run(tmp_path / "run")
    Job.resume(tmp_path / "run", callbacks=[lambda event: second.append(event.update)])
    assert first == [0, 1] and second[-1] == 2 and second == [*range(second[0], 3)]


def test_an_update_that_is_made_again_in_the_same_job_is_told_once(tmp_path: Path) -> None:
    told = list[int]()

    class Teller(Callback):
        def on_update(self, event: UpdateDone) -> None:
            told.append(event.update)

    runner = CallbackRunner(
        [Teller()], tmp_path, updates=4, score_name="accuracy", note=print, log=lambda name, text: tmp_path
    )
    for update in (0, 1, 0, 1, 2):  # the trainer died after update 1 and came back from the beginning
        runner.hear(update, {}, {})
        runner.count(update)
        runner.deliver()
    assert told == [0, 1, 2]


@pytest.mark.parametrize(("wrong", "told"), [(3, "is a int"), (Witness, "is the class Witness; give an object")])
def test_what_cannot_be_called_is_refused_before_the_start(wrong: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=f"callbacks: .* {told}"):
        Job(load_config(None, SETTINGS), callbacks=[wrong])


@pytest.mark.parametrize("wrong", [print, Witness(), "print"])
def test_callbacks_that_are_no_list_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"callbacks: must be a list .*: callbacks=\[mine\]"):
        Job(load_config(None, SETTINGS), callbacks=wrong)


def test_where_warnings_are_errors_a_note_does_not_end_the_job(tmp_path: Path) -> None:
    def broken(event: UpdateDone) -> None:
        raise LookupError("nothing here")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = Job(load_config(None, SETTINGS), callbacks=iter([broken])).run(tmp_path / "run")  # type: ignore[arg-type]
    assert (summary.outcome, summary.updates) == ("finished", 3)


def test_one_that_fails_where_nothing_is_shown_is_a_warning(tmp_path: Path) -> None:
    def broken(event: UpdateDone) -> None:
        raise LookupError("nothing here")

    with pytest.warns(UserWarning, match="broken failed and is not called again: LookupError: nothing here"):
        Job(load_config(None, SETTINGS), callbacks=[broken]).run(tmp_path / "run")
