"""Fingerprint of everything that a seed determines in a run: weights, optimizer state, metrics, evaluations, the ledger."""

from __future__ import annotations

import hashlib
from pathlib import Path

from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import LedgerState


def fingerprint(run: Path, version: int) -> dict[str, object]:
    """Fingerprint of a run up to the snapshot of `version`; its audit must be clean."""
    ledger_state = LedgerState.of(read_ledger(run / "ledger"))
    audit = ledger_state.audit()
    assert audit.clean
    snapshot = run / "snapshots" / str(version)
    files = [*sorted((snapshot / "policy").glob("*.safetensors")), *sorted((snapshot / "trainer").iterdir())]
    return {
        "state": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "evaluations": (run / "evaluations.jsonl").read_bytes(),
        "ledger": (audit.digest, trained_groups(ledger_state)),
    }


def trained_groups(ledger_state: LedgerState) -> list[tuple[int, int, int, float, int]]:
    """What became of every trained group that is not folded: (ordinal, first and last version, reward, update)."""
    totals = ledger_state.checkpoint()
    passed = {fields[0]: fields for fields in totals.passed}
    return [(ordinal, *passed[ordinal][3:], made_in[-1]) for ordinal, made_in in totals.trained if made_in]
