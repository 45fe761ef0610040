"""From what a killed job left on disk to the event with which it goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from llamarl.controller import ledger
from llamarl.controller.events import Resumed


def resumption(
    records: Iterable[ledger.Record],
    stored: Collection[int],
    version: int,
    evaluated: Iterable[int],
    settled_state: str = "scored",
) -> Resumed:
    """Go on from the snapshot of `version`; `stored` are the ordinals whose rollouts the GroupStore still holds, and
    `settled_state` is what the ledger says of a group that waits for its batch."""
    batches, dropped, last_version = _history(records, settled_state)
    before = {ordinal for update, batch in batches.items() if update < version for ordinal in batch}
    again: list[tuple[int, ...]] = []
    while (update := version + len(again)) in batches:
        if not all(ordinal in stored or ordinal in dropped for ordinal in batches[update]):
            break  # the crash came between the store and the ledger: these groups are generated again
        again.append(batches[update])
    in_batches = before.union(*again)
    oldest = _smallest_missing(in_batches)
    # Generated again: what the store has and the ledger does not know of, since the crash came between the two; and groups
    # sampled by a later version than the next update will train, which are from a future that was lost.
    usable = {
        ordinal for ordinal in stored if ordinal in last_version and last_version[ordinal] <= version + len(again)
    }
    settled = sorted((usable | dropped) - in_batches)
    return Resumed(
        version=version,
        batches=tuple(again),
        oldest=oldest,
        taken=tuple(sorted(ordinal for ordinal in in_batches if ordinal > oldest)),
        settled=tuple(settled),
        dropped=tuple(sorted(dropped.intersection(settled).union(*(dropped.intersection(batch) for batch in again)))),
        evaluated=tuple(evaluated),
    )


def _history(
    records: Iterable[ledger.Record], settled_state: str
) -> tuple[dict[int, tuple[int, ...]], set[int], dict[int, int]]:
    """The batches, by update; every ordinal that was ever dropped; and of each settled group the newest version that
    sampled it."""
    batches: dict[int, tuple[int, ...]] = {}
    dropped: set[int] = set()
    last_version: dict[int, int] = {}
    for record in records:
        match record:
            case ledger.Trained():
                batches[record.update] = tuple(sorted(record.ordinals + record.dropped))
            case ledger.Dropped():
                dropped.add(record.ordinal)
            case ledger.Passed(state=state) if state == settled_state:
                last_version[record.ordinal] = record.last_version
            case _:
                pass  # a rewind cancels updates, but the same batches are made again in their place
    return batches, dropped, last_version


def _smallest_missing(ordinals: set[int]) -> int:
    missing = 0
    while missing in ordinals:
        missing += 1
    return missing
