"""`llamarl plan` for a thousand GPUs, and for ranks that are really built: half a minute each."""

from __future__ import annotations

from unittest.mock import patch

from helpers.cli import llamarl

from llamarl.controller.controller import Controller
from llamarl.plan.trainer import TrainerRanks


def test_a_large_cluster_is_planned_with_little_work() -> None:
    """Which takes seconds: the layouts that are priced, and the events of the simulations, are counted."""
    with (
        patch.object(TrainerRanks, "update_s", autospec=True, side_effect=TrainerRanks.update_s) as priced,
        patch.object(Controller, "handle", autospec=True, side_effect=Controller.handle) as events,
    ):
        done = llamarl("plan", "--model", "llama-3.1-405b", "--gpus", "1024", "--gpu", "h200", "--json")
    assert done.code == 0, done.err
    assert 1_000 < priced.call_count < 30_000
    assert 1_000 < events.call_count < 60_000


def test_the_paper_s_own_case_works_as_typed() -> None:
    done = llamarl("plan", "--model", "llama-3.1-405b", "--gpus", "1024", "--gpu", "h100")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    for plan in ("asynchronous", "synchronous, co-located"):
        assert any(line.startswith(f"{plan}: generators in fp8: bf16 inside a host would need") for line in lines)
    (gain,) = [line for line in lines if line.startswith("gain")]
    assert float(gain.split()[1].rstrip("x")) > 1.2
    assert "quantize: fp8" in done.out


def test_ranks_of_a_plan_are_built_and_set_beside_the_formula() -> None:
    done = llamarl("plan", "--model", "qwen2.5-0.5b", "--gpus", "2", "--groups", "8", "--answer", "fixed:64", "--build")
    assert done.code == 0, done.err
    for kind in ("weights", "optimizer state", "gradients", "activations", "KV cache"):
        assert f"    {kind} " in done.out
    off = [line.split()[-1] for line in done.out.splitlines() if line.startswith("    together")]
    assert len(off) == 2
    assert all(abs(float(share.rstrip("%"))) < 10 for share in off), done.out
