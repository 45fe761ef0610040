"""`llamarl bench --calibrate` measures what there is and writes what plan and simulate read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.models import SHAPE
from msgspec.structs import replace

from llamarl.bench import calibrate
from llamarl.bench.calibrate import DecodePoint, TrainPoint
from llamarl.model_spec import shape_named
from llamarl.plan.fit import Measured
from llamarl.plan.gpus import GPUS, gpu_named
from llamarl.plan.terms import decode_terms, total_s

RUN = ["generator.threads=1", "trainer.threads=1", "schedule.updates=4", "evaluate.prompts=0"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and smaller measurements, made in the same way."""
    monkeypatch.setattr(
        calibrate, "_decode_points", lambda on_gpu: [DecodePoint(SHAPE, 16, 16, 4), DecodePoint(SHAPE, 64, 16, 4)]
    )
    monkeypatch.setattr(
        calibrate, "_train_points", lambda on_gpu: [TrainPoint(SHAPE, 8, 16), TrainPoint(SHAPE, 32, 16)]
    )


@pytest.mark.usefixtures("quick")
def test_the_description_is_read_by_simulate(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    done = llamarl("bench", "--calibrate", "--device", "cpu", "--threads", "1", "--json", path)
    assert done.code == 0, done.err
    assert done.out.count("described as") == 4
    gpu = gpu_named(str(path))
    assert gpu.is_cpu
    assert gpu.threads == 1
    assert gpu.source == "measured"
    rehearsed = llamarl("simulate", *RUN, "--gpu", path, "--prompt", "6", "--answer", "fixed:4", "--json")
    assert rehearsed.code == 0, rehearsed.err
    assert json.loads(rehearsed.out)["update_s"] > 0
    other = llamarl("simulate", *RUN, "trainer.threads=2", "--gpu", path)
    assert other.code == 2
    assert "calibrate with --threads 2" in other.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--calibrate", "--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["bench", "--calibrate", "--device", "cuda:99"], "--device cuda:99: cannot be used here"),
        (["bench", "--calibrate", "decode"], "--calibrate: stands alone"),
    ],
)
def test_what_cannot_be_calibrated_is_told_in_one_line(arguments: list[str], message: str) -> None:
    done = llamarl(*arguments)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_without_a_command_bench_shows_what_there_is() -> None:
    done = llamarl("bench")
    assert "--calibrate" in done.out
    assert "decode" in done.out


def test_what_fp8_adds_to_a_layer_is_what_its_products_do_not_explain() -> None:
    """A small model that fp8 makes no faster: the planner then predicts that, and a large one is still faster."""
    gpu, small, large = GPUS["h200"], shape_named("qwen2.5-1.5b"), shape_named("llama-3.1-8b")
    terms = {name: decode_terms(small, gpu, name, 256, 1e5) for name in ("bf16", "fp8")}
    wide_s = total_s(gpu.decode, terms["bf16"])
    added_s = calibrate.narrow_s(gpu, small, Measured("fp8", wide_s, terms["fp8"]))
    assert added_s > 0
    knows = replace(gpu.decode, narrow_s=added_s)
    assert total_s(knows, terms["fp8"]) == pytest.approx(wide_s)
    assert total_s(knows, terms["bf16"]) == wide_s
    assert total_s(knows, decode_terms(large, gpu, "fp8", 256, 1e5)) < 0.9 * total_s(
        knows, decode_terms(large, gpu, "bf16", 256, 1e5)
    )
    quick = Measured("fp8", wide_s / 100, terms["fp8"])
    assert calibrate.narrow_s(gpu, small, quick) == 0.0, "never a gain: the products say that already"
