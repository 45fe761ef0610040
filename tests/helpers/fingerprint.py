"""Hashes everything that a seed determines in a run: weights, optimizer state, metrics, evaluations, canonical ledger."""

from __future__ import annotations

import hashlib
from pathlib import Path

from llamarl.controller.books import Books
from llamarl.controller.ledger import read_ledger


def fingerprint(run: Path, version: int) -> dict[str, object]:
    """Fingerprint of a run up to the snapshot of `version`; its audit must be clean."""
    books = Books.of(read_ledger(run / "ledger"))
    assert books.audit().clean
    snapshot = run / "snapshots" / str(version)
    files = [snapshot / "policy" / "model.safetensors", *sorted((snapshot / "trainer").iterdir())]
    return {
        "state": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "evaluations": (run / "evaluations.jsonl").read_bytes(),
        "ledger": (books.digest, list(books.canonical())),
    }
