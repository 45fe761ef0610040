"""LoRA on the Monarch engine: adapters alone are published, reach generators as they were trained, and survive a death."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import hostile
from helpers.killing import TINY
from helpers.small_model import small_model
from safetensors.torch import load_file

from llamarl import LLM, Job
from llamarl.builders.context import Builder
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.observe.event_log import event_file, read_events

pytestmark = pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: make test-monarch")

UPDATES = 4
SETTINGS = [
    *TINY,
    *small_model(),
    "engine=monarch",
    "model.lora.rank=4",
    "trainer.lr=3e-3",
    "trainer.warmup_updates=0",
    f"schedule.updates={UPDATES}",
    "schedule.probe_every=1",
    "evaluate.prompts=0",
]


@pytest.mark.parametrize("place", ["beside", "merged"])
def test_adapters_are_trained_served_and_saved_through_a_death(place: str, tmp_path: Path) -> None:
    """The generator dies with groups in hand; the next one must serve the newest adapters, which the probes measure."""
    run = tmp_path / "run"
    builders: dict[str, Builder] = {"generator": hostile.misbehaving_generator}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hostile.PLAN_FOLDER, str(tmp_path / "plan"))
        hostile.write_plan(tmp_path / "plan", {"generator/0": ["killed"]})
        summary = Job(load_config(None, [*SETTINGS, f"generator.lora={place}"]), builders=builders).run(run)
    assert summary.outcome == "finished" and audit(read_ledger(run / "ledger")).clean
    events = [json.loads(line) for line in read_events(event_file(run, 0))]
    assert [event["executor"] for event in events if event["event"] == "Died"] == ["generator/0"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    probed = [row for row in rows if row.get("adapter_effect", 0.0) > 1e-4]
    assert probed, "no probe saw adapters that change anything"
    assert all(row["adapter_effect_gap"] < 1e-3 * max(1.0, row["adapter_effect"]) for row in probed)
    policy = run / "snapshots" / str(UPDATES) / "policy"
    adapters = load_file(policy / "adapter_model.safetensors")
    assert not (policy / "model.safetensors").exists() and any(
        one.abs().max() > 0 for name, one in adapters.items() if "lora_B" in name
    )
    assert LLM(policy).generate(["1+2="])
