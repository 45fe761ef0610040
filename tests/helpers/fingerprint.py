"""Fingerprint of everything that a seed determines in a run: weights, optimizer state, metrics, evaluations, the
ledger, kept rollouts."""

from __future__ import annotations

import hashlib
from pathlib import Path

from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import LedgerState
from llamarl.observe.rollout_log import ROLLOUTS, RolloutIndex, SavedGroup, SavedUpdate


def fingerprint(run: Path, version: int) -> dict[str, object]:
    """Fingerprint of a run up to the snapshot of `version`; its audit must be clean."""
    ledger_state = LedgerState.of(read_ledger(run / "ledger"))
    audit = ledger_state.audit()
    assert audit.clean
    snapshot = run / "snapshots" / str(version)
    files = [*sorted((snapshot / "policy").glob("*.safetensors")), *sorted((snapshot / "trainer").iterdir())]
    files += sorted(snapshot.glob("critic*/*"))
    return {
        "state": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "evaluations": (run / "evaluations.jsonl").read_bytes(),
        "ledger": (audit.digest, trained_groups(ledger_state)),
        "rollouts": kept_rollouts(run),
    }


def kept_rollouts(run: Path) -> dict[int, list[SavedGroup]]:
    """The kept groups of each update, after a check that they are those that the ledger counts."""
    index = RolloutIndex(run / ROLLOUTS)
    found = {update: [index.read(place) for place in _row(index, update).groups] for update in index.updates}
    batches = LedgerState.of(read_ledger(run / "ledger")).batches
    for update, batch in batches.items():
        kept = tuple(saved.group.ordinal for saved in found[update])
        assert kept == batch, f"update {update} trained {batch}, and kept are {kept}"
    assert not index.damage
    return found


def _row(index: RolloutIndex, update: int) -> SavedUpdate:
    row = index.get(update)
    assert row is not None and row.num_groups == len(row.groups)
    return row


def trained_groups(ledger_state: LedgerState) -> list[tuple[int, int, int, float, int]]:
    """What became of every trained group that is not folded: (ordinal, first and last version, reward, update)."""
    totals = ledger_state.checkpoint()
    passed = {fields[0]: fields for fields in totals.passed}
    return [(ordinal, *passed[ordinal][3:], made_in[-1]) for ordinal, made_in in totals.trained if made_in]
