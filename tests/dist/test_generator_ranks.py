"""A generator held by two processes samples what one process samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.killing import TINY
from helpers.models import SHAPE, lively_model
from helpers.ranks import run_ranks
from helpers.tensor_rank import check_same_tokens

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import ConfigError
from llamarl.generate.parallel import TensorRank
from llamarl.model.checkpoint import save_model


def test_two_ranks_sample_what_one_samples(tmp_path: Path) -> None:
    """A vocabulary of 23 over two ranks, pages so few that sequences are paused."""
    save_model(lively_model(), tmp_path / "model")
    run_ranks("helpers.tensor_rank", 2, str(tmp_path), "quantized")
    alone = check_same_tokens(tmp_path, 2)
    # Each rank quantizes its own part, with scales of its own, but all must draw the same.
    first, second = (json.loads((tmp_path / f"quantized-{rank}.json").read_text()) for rank in range(2))
    assert first == second != json.loads(json.dumps(alone))


def test_a_job_whose_generator_has_two_ranks_and_whose_probes_agree(tmp_path: Path) -> None:
    """Weights reach both ranks, one part each; the log-probs of probes are the trainer's."""
    settings = [
        *TINY,
        "generator.tensor=2",
        "schedule.updates=6",
        "schedule.probe_every=2",
        "evaluate.prompts=16",
        "trainer.lr=1e-3",
        "trainer.warmup_updates=0",
    ]
    Job(load_config(None, settings)).run(tmp_path / "run")
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = {row["update"]: row["logprob_gap"] for row in rows if "logprob_gap" in row}
    assert {0, 2, 4} <= gaps.keys()
    assert all(gap < 1e-5 for gap in gaps.values()), gaps


def test_heads_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"generator.tensor: 3 ranks cannot share the model's num_kv_heads=2 evenly"):
        TensorRank(0, 3).check(SHAPE)
