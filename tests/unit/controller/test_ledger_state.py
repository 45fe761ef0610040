"""Folding a ledger changes no answer: audit, digest, and what a resumed job needs are the same with it as without."""

from __future__ import annotations

from pathlib import Path
from random import Random

from helpers.world import World, standard_line
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import ScheduleConfig
from llamarl.controller import ledger
from llamarl.controller.ledger import (
    Dropped,
    Issued,
    Opened,
    Passed,
    Record,
    Rewound,
    Trained,
    encode_record,
    read_ledger,
)
from llamarl.controller.ledger_file import LedgerFile
from llamarl.controller.ledger_state import OTHER_REASONS, LedgerState
from llamarl.controller.recovery import resumption
from llamarl.io.record_log import segment_files


def history(seed: int, staleness: int, groups: int, window: int, steps: int) -> World:
    """A job with deaths, rewinds and dropped groups, up to some step."""
    random = Random(seed)
    schedule = ScheduleConfig(
        updates=12,
        groups_per_update=groups,
        samples_per_group=2,
        max_staleness=staleness,
        window=min(window, (staleness + 1) * groups),
    )
    world = World(standard_line(replicas=2), schedule, save_every=2)
    for _ in range(steps):
        if world.end is not None:
            break
        if random.random() < 0.02:
            world.kill(random.choice(["generator/0", "reward/0", "trainer/0"]))
        else:
            fail = "unscorable" if random.random() < 0.05 else ""
            world.complete(random.randrange(len(world.outstanding)), fail)
    return world


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 3),
    groups=st.integers(1, 3),
    window=st.integers(1, 6),
    steps=st.integers(0, 400),
    folds=st.lists(st.floats(0, 1), max_size=4),
)
def test_folding_changes_no_answer(
    seed: int, staleness: int, groups: int, window: int, steps: int, folds: list[float]
) -> None:
    world = history(seed, staleness, groups, window, steps)
    saved = world.controller.snapshots.saved
    plain, folded = LedgerState.of(world.records), LedgerState()
    cuts = sorted(int(share * len(world.records)) for share in folds)
    for at, record in enumerate(world.records):
        folded.add(record)
        if at in cuts:
            # A version that no rewind in the rest of this history goes back behind.
            later = [r.to_update for r in world.records[at:] if isinstance(r, Rewound)]
            folded.fold(min([saved, folded.known_updates, *later]))
            checkpoint = ledger._decoder.decode(encode_record(folded.checkpoint()))
            folded = LedgerState.of([checkpoint])
    assert folded.audit() == plain.audit()
    assert folded.runs == plain.runs
    assert (folded.num_dropped, folded.num_tokens) == (plain.num_dropped, plain.num_tokens)
    assert folded.known_updates == plain.known_updates
    stored = set(plain.settled("scored")) - world.forgotten
    assert resumption(folded, stored, saved, ()) == resumption(plain, stored, saved, ())


def trained(update: int, *ordinals: int) -> list[Record]:
    return [
        *(Issued(o, "generator/0", update) for o in ordinals),
        *(Passed(o, "scored", 10, update, update, 1.0) for o in ordinals),
        Trained(update, ordinals),
    ]


def test_what_was_folded_and_comes_again_is_counted_twice() -> None:
    ledger_state = LedgerState.of([Opened(4, 2), *trained(0, 0, 1), *trained(1, 2, 3)])
    ledger_state.fold(2)
    assert ledger_state.audit().consistent
    for record in trained(2, 1):
        ledger_state.add(record)
    assert ledger_state.audit().counted_twice == (1,)
    ledger_state.fold(3)
    assert ledger_state.audit().counted_twice == (1,), "for ever"


def test_a_run_that_begins_anew_takes_folded_updates_back() -> None:
    ledger_state = LedgerState.of([Opened(2, 1), *trained(0, 0), Dropped(1, "late"), Trained(1, (), (1,))])
    ledger_state.fold(2)
    ledger_state.add(Rewound(0, ledger.RESUME, 1))
    found = ledger_state.audit()
    assert (found.trained, found.dropped, found.unfinished, found.updates) == (0, {}, (0, 1), 0)
    for record in (*trained(0, 0), *trained(1, 1)):
        ledger_state.add(record)
    assert ledger_state.audit().trained == 2 and not ledger_state.audit().num_unfinished


def test_reasons_that_never_end_are_counted_together() -> None:
    ledger_state = LedgerState.of([Opened(300, 1)])
    for ordinal in range(300):
        for record in (
            Issued(ordinal, "g/0", 0),
            Dropped(ordinal, f"died at {ordinal}"),
            Trained(ordinal, (), (ordinal,)),
        ):
            ledger_state.add(record)
    ledger_state.fold(300)
    found = ledger_state.audit().dropped
    assert len(found) == 101 and found[OTHER_REASONS] == 200 and sum(found.values()) == 300


def test_a_ledger_on_disk_stays_small_and_says_the_same(tmp_path: Path) -> None:
    plain, file = LedgerState(), LedgerFile(tmp_path, fold_bytes=20_000)
    records = [Opened(8000, 4), *(r for u in range(2000) for r in trained(u, *range(4 * u, 4 * u + 4)))]
    largest = 0
    for record in records:
        plain.add(record)
        file.append(record)
        if isinstance(record, Trained) and record.update % 5 == 0:
            file.fold(max(0, record.update - 10))
            file.sync()
            largest = max(largest, sum(path.stat().st_size for path in segment_files(tmp_path)))
    file.close()
    found = LedgerState.of(read_ledger(tmp_path))
    assert largest < 100_000 and len(segment_files(tmp_path)) <= 2
    assert (found.audit(), found.runs) == (plain.audit(), plain.runs)


def test_staleness_beyond_the_bound_shows_in_the_audit() -> None:
    late: list[Record] = [Issued(0, "g/0", 0), Passed(0, "scored", 1, 2, 2, 0.0), Trained(9, (0,))]
    assert LedgerState.of([Opened(1, 1), *late]).audit().max_staleness == 7
