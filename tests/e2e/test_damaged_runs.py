"""Run folders that something happened to: full disks, torn files, lost ends, copies made too soon, edited settings."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.disk import Disk, watching
from helpers.fingerprint import fingerprint
from helpers.killing import TINY, KillAt, Killed
from helpers.notes import Notes
from helpers.small_model import small_model

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import Trained, encode_record, read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import ConfigError, InputError, JobFailed
from llamarl.io.record_log import SegmentWriter

UPDATES = 10
SETTINGS = [
    *TINY,
    *small_model(),
    "engine=inline",
    f"schedule.updates={UPDATES}",
    "schedule.deterministic=true",
    "snapshots.every=2",
    "evaluate.prompts=8",
    "evaluate.every=4",
]
DERIVED = ["metrics.jsonl", "timings.jsonl", "evaluations.jsonl", "spans.jsonl", "events.jsonl.gz", "starts.jsonl"]


def job(*settings: str, update: int | None = None) -> Job:
    builders = {} if update is None else {"trainer": KillAt(update)}
    return Job(load_config(None, [*SETTINGS, *settings]), builders=builders)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    job().run(folder)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed when update 7 began; the snapshots of versions 4 and 6 are there. A job leaves one out while the disk is still
    busy with the one before."""
    for _ in range(5):
        folder = tmp_path_factory.mktemp("killed") / "run"
        with pytest.raises(Killed):
            job(update=7).run(folder)
        if sorted(path.name for path in (folder / "snapshots").iterdir()) == ["4", "6"]:
            return folder
    raise AssertionError("the disk is too slow for these tests")


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def resume(folder: Path, *overrides: str) -> list[str]:
    """What it said; the run must end well."""
    notes = Notes()
    assert Job.resume(folder, overrides=overrides, display=notes).outcome == "finished"
    found = audit(read_ledger(folder / "ledger"))
    assert found.clean and found.max_staleness <= 1
    return notes.seen


# Files that nothing is resumed from


@pytest.mark.parametrize("how", ["torn end", "torn middle", "zeros", "gone"])
def test_damaged_files_that_are_derived_never_stop_a_resume(killed: Path, tmp_path: Path, how: str) -> None:
    folder = copy(killed, tmp_path)
    for name in DERIVED:
        file = folder / name
        data = file.read_bytes()
        match how:
            case "torn end":
                file.write_bytes(data[:-5])
            case "torn middle":
                file.write_bytes(data[: len(data) // 3] + data[len(data) // 3 + 20 :])
            case "zeros":
                file.write_bytes(data[:-30] + bytes(30))
            case _:
                file.unlink()
    notes = resume(folder)
    assert any("metrics.jsonl" in note for note in notes) is (how in ("torn middle", "gone"))
    assert llamarl("audit", folder).code == 0
    for rows in DERIVED[:3]:
        assert (folder / rows).read_bytes().endswith(b"\n"), "nothing was written behind a torn line"


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl", "evaluations.jsonl", "ledger", "groups", "events"])
def test_a_disk_that_is_full_for_a_moment_tears_nothing_and_the_run_goes_on(
    straight: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "run"
    with watching(Disk(fails_at=3, full=True, only=f"run/{name}")) as disk:
        try:
            job().run(folder)
        except JobFailed as error:
            assert "No space left on device" in str(error)
    assert disk.failed
    if not (folder / "snapshots" / str(UPDATES)).exists():
        resume(folder)
    assert fingerprint(folder, UPDATES) == fingerprint(straight, UPDATES)


# Parts from different times


def test_a_ledger_older_than_the_newest_snapshot_goes_on_from_one_that_it_knows(
    straight: Path, killed: Path, tmp_path: Path
) -> None:
    early = tmp_path / "early"
    with pytest.raises(Killed):
        job(update=5).run(early)
    folder = copy(killed, tmp_path)
    for name in ("ledger", "groups"):
        shutil.rmtree(folder / name)
        shutil.copytree(early / name, folder / name)
    notes = resume(folder)
    assert "snapshot 6 cannot be used: the ledger ends with update 5" in notes
    assert any("resuming from the snapshot of version 4" in note for note in notes)
    assert (folder / "snapshots" / "6.set-aside").is_dir(), "it may be all that somebody has"
    assert fingerprint(folder, UPDATES) == fingerprint(straight, UPDATES)


def test_a_ledger_that_knows_no_snapshot_is_refused(killed: Path, tmp_path: Path) -> None:
    early, folder = tmp_path / "early", copy(killed, tmp_path)
    with pytest.raises(Killed):
        job(update=1).run(early)
    shutil.rmtree(folder / "ledger")
    shutil.copytree(early / "ledger", folder / "ledger")
    with pytest.raises(InputError, match=r"ledger ends with update 1, .* snapshot is of version 4: .* different times"):
        Job.resume(folder)


def test_without_its_ledger_a_run_is_refused_and_its_policy_named(killed: Path, tmp_path: Path) -> None:
    folder = copy(killed, tmp_path)
    shutil.rmtree(folder / "ledger")
    with pytest.raises(InputError, match=r"ledger is gone, .* model\.path=.*/snapshots/6/policy$"):
        Job.resume(folder)


def test_a_snapshot_that_lost_its_trainer_is_not_taken_for_the_end_of_a_run(
    straight: Path, killed: Path, tmp_path: Path
) -> None:
    folder = copy(killed, tmp_path)
    shutil.rmtree(folder / "snapshots" / "6" / "trainer")
    notes = resume(folder)
    assert any(note.startswith("snapshot 6 cannot be used: trainer/") for note in notes)
    assert fingerprint(folder, UPDATES) == fingerprint(straight, UPDATES)


# What a resumed run remembers, and what may change


def test_groups_dropped_before_a_resume_stay_in_the_summary(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    unscorable = tmp_path / "scorer.py"
    unscorable.write_text(
        "def score(completion, answer, prompt):\n    return float(answer[0]) if answer[0] > '1' else 1 / 0\n"
    )
    settings = [
        f"reward.scorer={unscorable}:score",
        "reward.max_chars=4000",
        "reward.retries=0",
        "reward.max_failure_share=1",
        "reward.workers=1",
        "schedule.updates=4",
        "schedule.deterministic=false",
    ]
    with pytest.raises(Killed):
        job(*settings, update=3).run(folder)
    before = sum(audit(read_ledger(folder / "ledger")).dropped.values())
    assert before
    summary = Job.resume(folder)
    assert summary.groups_dropped == sum(audit(read_ledger(folder / "ledger")).dropped.values()) >= before


def test_an_edited_config_is_told_or_refused_by_name(killed: Path, tmp_path: Path) -> None:
    folder = copy(killed, tmp_path)
    config = folder / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("weight_decay: 0.0", "weight_decay: 0.1"))
    with pytest.raises(ConfigError, match=r"trainer\.weight_decay was 0\.0 and is now 0\.1"):
        Job.resume(folder)
    config.write_text(text.replace("lr: 0.0001", "lr: 0.0002"))
    assert "trainer.lr: 0.0001 so far, 0.0002 from here on" in resume(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = {row["update"]: row["lr"] for row in rows if "lr" in row}
    before, after = ([rate for u, rate in rates.items() if (u < 6) is early] for early in (True, False))
    assert max(before) <= 1e-4 < min(after)


def test_speed_and_memory_may_change_and_more_updates_may_follow(killed: Path, tmp_path: Path) -> None:
    folder = copy(killed, tmp_path)
    resume(folder, "generator.slots=8", "trainer.tokens_per_pack=512", "trainer.recompute=full", "evaluate.every=0")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    notes = Notes()
    assert Job.resume(folder, display=notes).updates == UPDATES
    assert "this run is finished" in notes.seen[0]
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}, "nothing was touched"
    with pytest.raises(ConfigError, match=r"update 10 is sampled by version 9, which is gone"):
        Job.resume(folder, overrides=["schedule.updates=12"])
    with pytest.raises(ConfigError, match=r"schedule\.updates=3, but 10 updates are already made"):
        Job.resume(folder, overrides=["schedule.updates=3"])


@pytest.mark.parametrize("settings", [["schedule.deterministic=false"], ["schedule.max_staleness=0"]])
def test_a_finished_run_can_be_made_longer(tmp_path: Path, settings: list[str]) -> None:
    folder, notes = tmp_path / "run", Notes()
    job(*settings, "schedule.updates=4").run(folder)
    summary = Job.resume(folder, overrides=["schedule.updates=7"], display=notes)
    assert (summary.updates, summary.outcome) == (7, "finished")
    assert "schedule.updates: 4 so far, 7 from here on" in notes.seen
    found = audit(read_ledger(folder / "ledger"))
    assert found.clean and (found.updates, found.trained) == (7, 28)
    assert [json.loads(line)["update"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == list(
        range(7)
    )
    assert llamarl("replay", folder).code == 0


def test_a_run_goes_on_from_another_folder_and_a_changed_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Path("scorer.py").write_text("def score(completion, answer, prompt):\n    return float(len(completion))\n")
    with pytest.raises(Killed):
        job(
            "reward.scorer=scorer.py:score",
            "reward.max_chars=4000",
            "reward.workers=1",
            "evaluate.prompts=0",
            "evaluate.every=0",
            update=3,
        ).run("run")
    with Path("scorer.py").open("a") as file:
        file.write("# another thought\n")
    monkeypatch.chdir(tmp_path)
    notes = resume(tmp_path / "home" / "run")
    (told,) = [note for note in notes if "scorer.py has changed since this run was last started" in note]
    assert "another thought" not in Path(told.rpartition(" ")[2]).read_text()


# Replay


def test_replay_goes_over_a_resume_that_was_killed_early(killed: Path, tmp_path: Path) -> None:
    folder = copy(killed, tmp_path)
    (folder / "events.1.jsonl.gz").write_bytes(b"")
    resume(folder)
    assert (folder / "events.2.jsonl.gz").exists()
    done = llamarl("replay", folder)
    assert done.code == 0 and done.out.endswith("the replayed controller wrote the same\n"), done.out


def test_replay_of_a_run_whose_first_log_is_gone_compares_the_others(killed: Path, tmp_path: Path) -> None:
    folder = copy(killed, tmp_path)
    (folder / "events.jsonl.gz").unlink()
    resume(folder)
    assert (folder / "events.1.jsonl.gz").exists(), "the first log's number is not given to another"
    done = llamarl("replay", folder)
    assert done.code == 0 and "run 0: no events are left of it" in done.out, done.out


def test_replay_goes_as_far_as_a_damaged_log_does(straight: Path, tmp_path: Path) -> None:
    folder = copy(straight, tmp_path)
    log = folder / "events.jsonl.gz"
    lines = gzip.decompress(log.read_bytes()).splitlines(keepends=True)
    log.write_bytes(gzip.compress(b"".join([*lines[:40], b"\x00 garbage\n", *lines[41:]])))
    done = llamarl("replay", folder)
    assert done.code == 0 and "run 0: its log is damaged at event 40; it was replayed up to there" in done.out


def test_replay_holds_folded_records_against_a_digest(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamarl.controller.ledger_file.FOLD_BYTES", 1000)
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        job(update=7).run(folder)
    resume(folder)
    assert b'"Checkpoint"' in b"".join(path.read_bytes() for path in (folder / "ledger").iterdir())
    assert audit(read_ledger(folder / "ledger")) == audit([*read_ledger(folder / "ledger")])
    done = llamarl("replay", folder)
    assert done.code == 0, done.out
    plain = int(llamarl("replay", straight).out.split(" events, ")[1].split()[0].replace(",", ""))
    assert int(done.out.split(" events, ")[1].split()[0].replace(",", "")) >= plain, (
        "folded ones are held against it too"
    )
    log = folder / "events.jsonl.gz"
    lines = gzip.decompress(log.read_bytes()).splitlines(keepends=True)
    log.write_bytes(gzip.compress(b"".join(line for line in lines if b'"ordinal":3,' not in line)))
    done = llamarl("replay", folder)
    assert done.code == 1 and "now folded, were other ones" in done.out


def test_replay_is_not_content_with_a_ledger_that_contradicts_itself(straight: Path, tmp_path: Path) -> None:
    """As two owners at once left it."""
    folder = copy(straight, tmp_path)
    trained = next(record for record in read_ledger(folder / "ledger") if isinstance(record, Trained))
    writer = SegmentWriter(folder / "ledger")
    writer.append(encode_record(trained))
    writer.close()
    done = llamarl("replay", folder)
    assert done.code == 1 and "the ledger contradicts itself: 4 groups counted more than once" in done.out


def test_events_beyond_their_limit_are_not_written_and_the_job_goes_on(tmp_path: Path) -> None:
    job("observe.events_mb=0").run(tmp_path / "run")
    assert not (tmp_path / "run" / "events.jsonl.gz").read_bytes()
    done = llamarl("replay", tmp_path / "run")
    assert done.code == 1 and "run 0: no events are left of it" in done.out
    assert done.out.endswith("nothing was left to compare\n")


def test_a_log_of_events_that_got_full_is_replayed_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamarl.observe.event_log._MB", 1)
    monkeypatch.setattr("llamarl.controller.ledger_file.FOLD_BYTES", 1000)
    job("observe.events_mb=1000").run(tmp_path / "run")
    done = llamarl("replay", tmp_path / "run")
    assert 10 < int(done.out.split("1 runs, ")[1].split()[0]) < 150 and "differ" not in done.out
