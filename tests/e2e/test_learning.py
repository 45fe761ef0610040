"""The default job learns from its rewards, and from nothing else."""

from __future__ import annotations

from pathlib import Path

from helpers.builders import permuted_reward
from helpers.engines import ENGINE

from llamarl import Job
from llamarl.config import Config
from llamarl.config.file import load_config

A_THIRD = Config().schedule.updates // 3
SHORT = [f"engine={ENGINE}", f"schedule.updates={A_THIRD}", "trainer.final_lr_share=1.0"]


def test_reward_and_held_out_accuracy_rise(tmp_path: Path) -> None:
    summary = Job(load_config(None, SHORT)).run(tmp_path / "run")
    assert summary.eval_before is not None and summary.eval_after is not None
    assert 0.2 <= summary.eval_before <= 0.5
    assert summary.eval_after > summary.eval_before + 0.15
    assert summary.reward_last > summary.reward_first + 0.1
    assert summary.staleness_max <= 1


def test_with_rewards_permuted_within_each_group_nothing_is_learned(tmp_path: Path) -> None:
    summary = Job(load_config(None, SHORT), builders={"reward": permuted_reward}).run(tmp_path / "run")
    assert summary.eval_before is not None and summary.eval_after is not None
    assert summary.eval_after <= summary.eval_before + 0.05
