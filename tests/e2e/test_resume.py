"""A run that was killed and resumed is the run that was never killed, bit for bit (inline, S = 0, CPU)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.fingerprint import fingerprint
from helpers.killing import TINY, CopyAtEach, KillAt, Killed
from helpers.notes import Notes
from helpers.small_model import small_model

from llamarl import Job, Run
from llamarl.config.file import load_config, read_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import ConfigError, InputError
from llamarl.observe.run_folder import RunFolder

UPDATES = 20
SETTINGS = [
    *TINY,
    *small_model(),
    "engine=inline",
    f"schedule.updates={UPDATES}",
    "schedule.max_staleness=0",
    "snapshots.every=3",
    "evaluate.prompts=16",
    "evaluate.every=5",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is never killed, in `straight`, and for each update a copy as a kill at its beginning would leave it."""
    folder = tmp_path_factory.mktemp("runs")
    run = folder / "straight"
    Job(load_config(None, SETTINGS), builders={"trainer": CopyAtEach(run, folder)}).run(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == UPDATES and all(row["trained_tokens"] for row in rows), "weights that stay prove nothing"
    return folder


@pytest.fixture
def straight(runs: Path) -> Path:
    return runs / "straight"


def run_until_killed(folder: Path, update: int) -> None:
    with pytest.raises(Killed):
        Job(load_config(None, SETTINGS), builders={"trainer": KillAt(update)}).run(folder)


@pytest.mark.parametrize("cut", range(UPDATES))
def test_killed_at_any_update_and_resumed_equals_never_killed(
    cut: int, runs: Path, straight: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / str(cut), tmp_path / "run")
    summary = Job.resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(straight, UPDATES)
    assert summary.updates == UPDATES
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean


def test_a_damaged_snapshot_is_named_and_the_one_before_is_used(straight: Path, tmp_path: Path) -> None:
    run_until_killed(tmp_path / "run", 8)
    weights = tmp_path / "run" / "snapshots" / "6" / "policy" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    notes = Notes()
    Job.resume(tmp_path / "run", display=notes)
    assert any("snapshot 6" in note and "model.safetensors" in note for note in notes.seen)
    assert any("version 3" in note for note in notes.seen)
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(straight, UPDATES)


def test_settings_that_would_make_it_another_run_are_refused_by_name(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "4", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"trainer\.weight_decay was 0\.0 and is now 0\.1"):
        Job.resume(tmp_path / "run", overrides=["trainer.weight_decay=0.1"])


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    config = load_config(None, [*TINY, *small_model()])
    (tmp_path / "mine").write_text("something")
    with pytest.raises(InputError, match="holds no run"):
        Job.resume(tmp_path, config=config)
    assert (tmp_path / "mine").read_text() == "something"
    (tmp_path / "mine").write_text("")
    (tmp_path / "there").symlink_to(tmp_path)
    with pytest.raises(InputError, match="holds no run"):
        Job.resume(tmp_path, config=config)
    (tmp_path / "there").unlink()
    with pytest.raises(InputError, match="holds no run"):
        Job.resume(tmp_path)  # nothing says which job


def test_a_run_that_was_killed_before_anything_was_recorded_begins(tmp_path: Path) -> None:
    brief = [
        *TINY,
        *small_model(),
        "engine=inline",
        "schedule.updates=2",
        "evaluate.prompts=0",
        "snapshots.at_end=none",
    ]
    config = load_config(None, brief)
    RunFolder.create(tmp_path / "killed").lock.release()  # and no more
    for begun in ("killed", "missing"):
        notes = Notes()
        assert Job.resume(tmp_path / begun, config=config, display=notes).updates == 2
        assert any("the run begins" in note for note in notes.seen)
    folder = RunFolder.create(tmp_path / "at work")
    with pytest.raises(InputError, match=r"process \d+ on .* is at work there"):
        Job.resume(tmp_path / "at work", config=config)
    folder.close()


def test_a_run_goes_on_with_settings_in_vain_that_an_earlier_release_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = [*TINY, *small_model(), "engine=inline", "schedule.updates=2", "evaluate.prompts=0"]
    old = read_config(None, [*brief, "conversation.max_turns=8"])  # without a tool
    with pytest.raises(ConfigError, match=r"conversation\.max_turns: cannot take effect"):
        Job(old)
    with monkeypatch.context() as release:
        release.setattr("llamarl.jobs.job.refuse_settings_in_vain", lambda *_: None)
        Job(old).run(tmp_path)
    assert Run(tmp_path).config.conversation.max_turns == 8
    with pytest.raises(ConfigError, match=r"reward\.pattern: cannot take effect"):
        Job.resume(tmp_path, overrides=["reward.pattern=x"])
    assert Job.resume(tmp_path, overrides=["schedule.updates=4"]).updates == 4
    asked = llamarl("train", "--run", str(tmp_path), "--resume", "schedule.updates=6", "--quiet")
    assert (asked.code, asked.err) == (0, "")


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_run_that_kept_its_policy_alone_says_so_and_its_policy_can_be_trained_on(engine: str, tmp_path: Path) -> None:
    brief = [*TINY, *small_model(), f"engine={engine}", "schedule.updates=3", "snapshots.every=2", "evaluate.prompts=8"]
    folder = tmp_path / "run"
    summary = Job(load_config(None, [*brief, "snapshots.at_end=policy"])).run(folder)
    assert summary.policy == "snapshots/3/policy"
    assert not (folder / "snapshots" / "3" / "trainer").exists()
    assert (folder / "snapshots" / "2" / "trainer").exists()  # those in between can be gone on from
    with pytest.raises(InputError, match=r"ended after update 3 and kept its policy only .*snapshots/3/policy$"):
        Job.resume(folder)
    again = Job(load_config(None, [*brief, f"model.path={folder / summary.policy}", "snapshots.at_end=none"]))
    last = again.run(tmp_path / "again")
    assert last.updates == 3 and last.policy == "snapshots/2/policy"
    assert last.eval_before == summary.eval_after


def test_with_none_at_the_end_a_snapshot_under_way_is_still_finished(tmp_path: Path) -> None:
    brief = [*TINY, *small_model(), "engine=inline", "schedule.updates=4", "snapshots.every=4", "evaluate.prompts=8"]
    assert (
        Job(load_config(None, [*brief, "snapshots.at_end=none"])).run(tmp_path / "run").policy == "snapshots/4/policy"
    )
