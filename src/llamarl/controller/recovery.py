"""From the files that a killed job left to the event with which it goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from llamarl.controller.events import Resumed
from llamarl.controller.ledger import Folded
from llamarl.controller.ledger_state import LedgerState


def resumption(
    ledger_state: LedgerState,
    stored: Collection[int],
    version: int,
    evaluated: Iterable[int],
    settled_state: str = "scored",
    same_rewards: Collection[int] = (),
) -> Resumed:
    """Go on from the snapshot of `version`. `stored` are the ordinals whose rollouts the GroupStore still holds, and
    `same_rewards` those of them whose rewards are all equal; `settled_state` is the state, in the ledger, of a group that
    waits for its batch. Groups that were replaced stay so."""
    batches, dropped, last_version = ledger_state.batches, ledger_state.dropped, ledger_state.settled(settled_state)
    folded = ledger_state.folded if version >= ledger_state.folded.updates else None
    before = {ordinal for update, batch in batches.items() if update < version for ordinal in batch}
    before.update(folded.taken if folded else ())
    again: list[tuple[int, ...]] = []
    while (update := version + len(again)) in batches:
        if not all(ordinal in stored or ordinal in dropped for ordinal in batches[update]):
            break  # the crash came between the store and the ledger: these groups are generated again
        again.append(batches[update])
    in_batches = before.union(*again, ledger_state.replaced)
    oldest = _smallest_missing(in_batches, start=folded.oldest if folded else 0)
    # Two sorts of groups are generated again: those in the store that the ledger does not know, since the crash came between
    # the two; and those sampled by a later version than the next update will train, which come from a lost future.
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
        replaced=_replaced(ledger_state, folded),
        same_rewards=tuple(ordinal for ordinal in settled if ordinal in same_rewards),
    )


def _replaced(ledger_state: LedgerState, folded: Folded | None) -> tuple[tuple[int, int], ...]:
    """Groups replaced, by update; those of folded updates are told together."""
    found = Counter(ledger_state.replaced.values())
    if folded and folded.replaced:
        found[folded.updates - 1] += folded.replaced
    return tuple(sorted(found.items()))


def _smallest_missing(ordinals: set[int], start: int) -> int:
    while start in ordinals:
        start += 1
    return start
