"""Every fault by which adapters silently miss the rollouts ends the job, in one line; a sound job runs on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.experts import small_mixture
from helpers.killing import TINY
from helpers.lora_faults import FAULTS, OF_EXPERTS, SEEN_BY_HASH, Planted
from helpers.small_model import small_model

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.errors import JobFailed

SETTINGS = [
    *TINY,
    *small_model(),
    "engine=inline",
    "model.lora.rank=4",
    "trainer.lr=3e-3",
    "trainer.warmup_updates=0",
    "schedule.updates=6",
    "schedule.probe_every=1",
    "evaluate.prompts=0",
    "snapshots.at_end=none",
]
OF_MLPS = ["model.lora.targets=mlp", "trainer.lr=1e-2"]  # one of three layers has no experts
PROBED = r"generator's differ from that by .*; the generator does not compute with the adapters that are trained"
HASHED = r"model\.lora: generator/0 applies other adapters than the trainer published as version \d"


def run(folder: Path, fault: str, *settings: str, hashed: bool) -> None:
    builder = Planted({**OF_EXPERTS, **FAULTS}.get(fault), hashed=hashed)
    Job(load_config(None, [*SETTINGS, *settings]), builders={"generator": builder}).run(folder)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_noticed_by_the_effect_alone(fault: str, staleness: int, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=PROBED):
        run(tmp_path / "run", fault, f"schedule.max_staleness={staleness}", hashed=False)


@pytest.mark.parametrize("fault", OF_EXPERTS)
def test_every_fault_of_adapters_beside_experts_is_noticed(fault: str, tmp_path: Path) -> None:
    """By the effect alone; and what is read wrongly by the hash, too."""
    with pytest.raises(JobFailed, match=PROBED):
        run(tmp_path / "effect", fault, *small_mixture(), *OF_MLPS, hashed=False)
    with pytest.raises(JobFailed, match=PROBED if fault == "not_applied" else HASHED):
        run(tmp_path / "hash", fault, *small_mixture(), *OF_MLPS, hashed=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_read_wrongly_is_noticed_as_soon_as_it_is_loaded(fault: str, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=HASHED if fault in SEEN_BY_HASH else PROBED):
        run(tmp_path / "run", fault, hashed=True)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["schedule.max_staleness=0"],
        ["generator.lora=merged"],
        ["generator.quantize=int8"],
        ["generator.quantize=fp8", "generator.kv_cache=fp8"],
        ["generator.dtype=bfloat16", "trainer.dtype=bfloat16"],
        ["generator.dtype=bfloat16", "trainer.dtype=bfloat16", "generator.lora=merged"],
        ["generator.top_k=5", "generator.temperature=0.7"],
        [*small_mixture(), *OF_MLPS],
        [*small_mixture(), "generator.lora=merged"],
        [*small_mixture(), "generator.quantize=int8"],
    ],
    ids=lambda settings: " ".join(one for one in settings if not one.startswith("model.path")),
)
def test_a_sound_job_runs_on_in_every_precision(settings: list[str], tmp_path: Path) -> None:
    run(tmp_path / "run", "", *settings, hashed=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    effects = [row["adapter_effect"] for row in rows if "adapter_effect" in row]
    assert len(effects) >= 5 and max(effects) > 1e-3, "what was compared was not nothing"
