"""A snapshot is whole or not there: whatever dies, whatever is damaged, however full the disk is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree

import pytest
import torch
from helpers.disk import Disk, watching
from helpers.killing import TINY, Killed
from helpers.models import lively_model
from helpers.notes import Notes

from llamarl import Job
from llamarl.config import TrainerConfig
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.engine.snapshot_store import SnapshotStore, why_damaged
from llamarl.errors import InputError, JobFailed, ModelError
from llamarl.io.record_log import segment_files
from llamarl.model.checkpoint import load_model, save_model, widest_dtype
from llamarl.model.training_state import POLICY, keeps_policy_only
from llamarl.train.optimizer import AdamW
from llamarl.train.restore import restore
from llamarl.train.state import TrainingState

OLD, NEW = 3, 6


class Saver:
    """A model in training, and the snapshots of it."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.model = lively_model()
        self.optimizer = AdamW(dict(self.model.named_parameters()), TrainerConfig())
        self.state = TrainingState(self.model, self.optimizer, carry_from=load_config(None, []).model_folder)
        self.folder, self.snapshots = folder, SnapshotStore(folder, keep)

    def update(self) -> None:
        self.optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in self.model.parameters()).backward()  # type: ignore[union-attr]
        self.optimizer.step(lr=0.01)

    def save(self, version: int) -> None:
        """What driver and trainer do between them."""
        folder = self.snapshots.begin(version)
        self.state.take()
        self.snapshots.add_part(version, self.state.write(folder))
        self.snapshots.commit(version)
        self.snapshots.prune(version)


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    """With one snapshot, and a model that has moved on since."""
    saver = Saver(tmp_path / "snapshots")
    saver.update()
    saver.save(OLD)
    saver.update()
    return saver


def contents(snapshot: Path) -> dict[str, str]:
    files = sorted(path for path in snapshot.rglob("*") if path.is_file())
    return {str(path.relative_to(snapshot)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def loaded(snapshot: Path) -> list[bytes]:
    """Everything that a trainer takes from it."""
    model = load_model(snapshot / POLICY, device=torch.device("cpu"))
    optimizer = AdamW(dict(model.named_parameters()), TrainerConfig())
    restore(model, optimizer, snapshot)
    state = [torch.tensor(optimizer.num_steps), *optimizer.state_tensors().values()]
    return [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *state)]


def operations_of_a_save(saver: Saver, folder: Path) -> Disk:
    copytree(saver.folder, folder)
    saver.snapshots = SnapshotStore(folder, keep=1)
    with watching(Disk(only=str(folder))) as disk:
        saver.save(NEW)
    return disk


def test_death_at_every_operation_of_a_save_loads_exactly_the_old_or_the_new(saver: Saver, tmp_path: Path) -> None:
    count = len(operations_of_a_save(saver, tmp_path / "undisturbed").operations)
    assert count > 30, "a save has far more steps than that"
    expected = {OLD: contents(saver.folder / str(OLD)), NEW: contents(tmp_path / "undisturbed" / str(NEW))}
    state = {version: loaded(next(tmp_path.glob(f"*/{version}"))) for version in (OLD, NEW)}
    found = []
    for number in range(count):
        folder = tmp_path / str(number)
        copytree(saver.folder, folder)
        saver.snapshots = SnapshotStore(folder, keep=1)
        with watching(Disk(fails_at=number, only=str(folder))), pytest.raises(Killed):
            saver.save(NEW)
        version, problems = SnapshotStore(folder, keep=1).newest_whole()
        assert problems == []
        assert contents(folder / str(version)) == expected[version]
        found.append(version)
        saver.snapshots = SnapshotStore(folder, keep=1)
        saver.save(NEW) if version == OLD else saver.snapshots.prune(NEW)
        assert contents(folder / str(NEW)) == expected[NEW], "the next attempt is not hindered by what was left"
        assert saver.snapshots.versions() == [NEW]
        assert loaded(folder / str(version if version == NEW else NEW)) == state[NEW]
    assert found == sorted(found) and set(found) == {OLD, NEW}, "one moment divides the old from the new"


def test_everything_is_on_disk_before_a_snapshot_gets_its_name(saver: Saver) -> None:
    disk, checked = Disk(), []

    def check(source: Path, target: Path) -> None:
        if target == saver.folder / str(NEW):
            inodes = [path.stat().st_ino for path in (source, *source.rglob("*"))]
            checked.append(set(inodes) <= disk.synced)

    disk.on_rename = check
    with watching(disk):
        saver.save(NEW)
    assert checked == [True]


def damages(size: int) -> list[tuple[int, int]]:
    """(byte, bit) at the ends and in between, among them every bit of some bytes."""
    return [(at, bit) for at in {0, 1, size // 3, size // 2, size - 1} for bit in range(8)]


def test_any_flipped_bit_and_any_truncation_is_told_in_a_line_and_the_one_before_is_used(saver: Saver) -> None:
    saver.save(NEW)
    files = [path for path in (saver.folder / str(NEW)).rglob("*") if path.is_file()]
    assert len(files) > 4
    for file in files:
        whole = file.read_bytes()
        positions = [(at, bit) for at in range(len(whole)) for bit in (0, 5, 7)] if file.suffix == ".json" else []
        for at, bit in [*damages(len(whole)), *positions[:: max(1, len(positions) // 500)]]:
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert_previous_is_used(saver, f"bit {bit} of byte {at} of {file.name}")
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            assert_previous_is_used(saver, f"{file.name} cut to {length}")
        file.unlink()
        assert_previous_is_used(saver, f"{file.name} is gone")
        file.write_bytes(whole)
    assert saver.snapshots.newest_whole() == (NEW, [])


def assert_previous_is_used(saver: Saver, damage: str) -> None:
    version, problems = saver.snapshots.newest_whole()
    assert version == OLD, damage
    (line,) = problems
    assert line.startswith(f"snapshot {NEW} cannot be used: ") and "\n" not in line, damage


def test_a_full_disk_at_any_moment_of_a_save_is_an_error_that_leaves_the_old_one(saver: Saver, tmp_path: Path) -> None:
    number = 0
    while True:
        with watching(Disk(fails_at=number, full=True, only=str(saver.folder))) as disk:
            try:
                saver.save(NEW)
            except (OSError, ModelError) as error:
                assert "No space left on device" in str(error)
        if not disk.failed:
            break
        saver.snapshots.rewind(OLD)  # the very last operation syncs the new name
        assert saver.snapshots.newest_whole() == (OLD, [])
        saver.snapshots.give_up()
        assert [path.name for path in saver.folder.iterdir()] == [str(OLD)], "nothing keeps the room"
        number += 1
    assert number > 10
    assert saver.snapshots.newest_whole() == (NEW, [])


def test_a_damaged_newer_snapshot_does_not_count_among_those_to_keep(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "snapshots", keep=1)
    for version in (3, 4):
        saver.save(version)
        copytree(saver.folder / str(version), saver.folder / "9", dirs_exist_ok=True)
    assert saver.snapshots.newest_whole()[0] == 4


def test_a_rewind_takes_back_what_was_saved_of_the_future(saver: Saver) -> None:
    saver.save(NEW)
    saver.snapshots.rewind(OLD)
    assert saver.snapshots.versions() == [OLD]
    assert [path.name for path in saver.folder.iterdir()] == [str(OLD)]


def test_a_folder_with_a_number_for_a_name_is_no_snapshot(saver: Saver) -> None:
    (saver.folder / "99").mkdir()
    assert saver.snapshots.newest_whole() == (OLD, ["snapshot 99 cannot be used: no manifest.json"])
    (saver.folder / "99").rmdir()
    copytree(saver.folder / str(OLD), saver.folder / "98")
    assert why_damaged(saver.folder / "98") == f"manifest.json is of version {OLD}"


# The same from the outside: a job on a disk that is full for a while


SETTINGS = [*TINY, "engine=inline", "schedule.updates=4", "trainer.warmup_updates=0", "evaluate.prompts=0"]


def job(*settings: str) -> Job:
    return Job(load_config(None, [*SETTINGS, *settings]))


def run_with_full_disk(folder: Path, only: str, settings: Sequence[str]) -> Notes:
    notes = Notes()
    with watching(Disk(fails_at=0, full=True, only=only)):
        job(*settings).run(folder, display=notes)
    return notes


@pytest.mark.parametrize("part", [".2.partial", ".2.partial/.policy", ".2.partial/trainer", ".2.partial/manifest"])
def test_a_full_disk_stops_nothing_but_the_snapshot_loudly(tmp_path: Path, part: str) -> None:
    notes = run_with_full_disk(tmp_path / "run", part, ["snapshots.every=2"])
    (loud,) = [note for note in notes.seen if "SNAPSHOT" in note]
    assert "SNAPSHOT 2 COULD NOT BE WRITTEN" in loud and "No space left on device" in loud
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == ["4"]
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean


@pytest.mark.parametrize("part", [".4.partial", ".4.partial/trainer", ".4.partial/manifest"])
def test_the_last_snapshot_must_be_written_or_the_job_has_failed(tmp_path: Path, part: str) -> None:
    with pytest.raises(JobFailed, match=r"the last snapshot could not be written: .*No space left on device") as failed:
        run_with_full_disk(tmp_path / "run", part, ["snapshots.every=2"])
    assert failed.value.exit_code == 3
    assert Job.resume(tmp_path / "run").outcome == "finished", "with room again, it goes on from the one before"
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean


@pytest.mark.parametrize(
    "fails_at", [13, 15, *range(18, 32, 2)]
)  # from before the first row of the ledger to behind it
def test_a_disk_too_full_for_the_ledger_ends_the_job_in_one_line_and_with_room_it_goes_on(
    tmp_path: Path, fails_at: int
) -> None:
    disk = Disk(fails_at=fails_at, full=True, only=f"{tmp_path}/run/")
    with watching(disk), pytest.raises((InputError, JobFailed), match="No space left on device") as failed:
        job("snapshots.every=1").run(tmp_path / "run", display=Notes())
    assert failed.value.exit_code == (2 if isinstance(failed.value, InputError) else 3) and disk.failed
    assert Job.resume(tmp_path / "run").outcome == "finished"
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean


# Groups and ledger: a torn tail resumes, damage in the middle is named; groups can be made again, the ledger cannot


@pytest.fixture(scope="module")
def half_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ended on a full disk with one snapshot, so that groups and ledger are still needed."""
    folder = tmp_path_factory.mktemp("half") / "run"
    with watching(Disk(fails_at=0, full=True, only="/.4.partial")), pytest.raises(JobFailed):
        job("snapshots.every=2").run(folder)
    return folder


@pytest.mark.parametrize("name", ["ledger", "groups"])
@pytest.mark.parametrize("cut", [1, 9, 40, 300])
def test_a_torn_tail_of_ledger_or_groups_resumes(half_a_run: Path, tmp_path: Path, name: str, cut: int) -> None:
    folder = copytree(half_a_run, tmp_path / "run")
    last = segment_files(folder / name)[-1]
    os.truncate(last, last.stat().st_size - cut)
    assert Job.resume(folder).outcome == "finished"
    assert audit(read_ledger(folder / "ledger")).clean


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


DAMAGED = [0, 13, 2000]


@pytest.mark.parametrize("at", DAMAGED)
def test_damage_in_the_middle_of_the_ledger_is_one_line(half_a_run: Path, tmp_path: Path, at: int) -> None:
    folder = copytree(half_a_run, tmp_path / "run")
    first = segment_files(folder / "ledger")[0]
    damage(first, at)
    with pytest.raises(InputError, match=rf"ledger/{first.name}: damaged at byte \d+ \(.*\)$") as error:
        Job.resume(folder)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("at", DAMAGED)
def test_groups_that_are_damaged_are_made_again(half_a_run: Path, tmp_path: Path, at: int) -> None:
    folder, notes = copytree(half_a_run, tmp_path / "run"), Notes()
    first = segment_files(folder / "groups")[0]
    damage(first, at)
    assert Job.resume(folder, display=notes).outcome == "finished"
    assert any(f"groups/{first.name}: damaged at byte" in note for note in notes.seen)
    assert audit(read_ledger(folder / "ledger")).clean


def test_a_deterministic_job_cannot_make_damaged_groups_again_and_says_so(tmp_path: Path) -> None:
    """The version that sampled them is gone."""
    folder = tmp_path / "run"
    with watching(Disk(fails_at=0, full=True, only="/.4.partial")), pytest.raises(JobFailed):
        job("snapshots.every=2", "schedule.deterministic=true").run(folder)
    first = segment_files(folder / "groups")[0]
    damage(first, 13)
    with pytest.raises(InputError, match=rf"groups/{first.name}: damaged at byte 0"):
        Job.resume(folder)


def test_the_policy_alone_is_as_narrow_as_the_model_folder_and_nothing_else_is_written(tmp_path: Path) -> None:
    model = lively_model()
    save_model(model, tmp_path / "began", dtype=torch.bfloat16, carry_from=load_config(None, []).model_folder)
    optimizer = AdamW(dict(model.named_parameters()), TrainerConfig())
    state = TrainingState(model, optimizer, carry_from=tmp_path / "began")
    state.take()
    state.write(tmp_path / "whole")
    state.take(policy_only=True)
    files = state.write(tmp_path / "policy")
    assert keeps_policy_only(tmp_path / "policy") and not keeps_policy_only(tmp_path / "whole")
    assert all(name.startswith(f"{POLICY}/") for name in files)
    assert widest_dtype(tmp_path / "policy" / POLICY) == torch.bfloat16
    assert widest_dtype(tmp_path / "whole" / POLICY) == torch.float32
    kept = load_model(tmp_path / "policy" / POLICY)
    for mine, theirs in zip(model.parameters(), kept.parameters(), strict=True):
        assert torch.equal(mine.detach().bfloat16().float(), theirs)


def test_after_the_policy_alone_a_whole_snapshot_is_whole_again(saver: Saver) -> None:
    saver.state.take(policy_only=True)
    saver.save(NEW)
    assert len(loaded(saver.snapshots.path(NEW))) == len(loaded(saver.snapshots.path(OLD)))
