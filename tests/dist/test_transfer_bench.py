"""`llamarl bench sync` measures real transfers between processes, and checks what arrived."""

from __future__ import annotations

import msgspec
import pytest
from helpers.cli import llamarl

from llamarl.bench.sync import SyncCase, bench_sync
from llamarl.errors import InputError
from llamarl.families.parameters import num_parameters
from llamarl.layout.mesh import parse_side
from llamarl.model_spec import SHAPES, ModelSpec
from llamarl.weights.select_transport import Transport

SMALL = ModelSpec(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=64, tied_head=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "generator", "transport"),
    [
        ("", "", "memfd"),
        ("fsdp=2,tp=2,precision=fp32", "tp=2,replicas=2,precision=bf16", "memfd"),
        ("fsdp=3", "tp=2,precision=bf16", "group"),
        ("fsdp=2,precision=fp32", "tp=2,precision=fp8", "group"),
    ],
)
def test_every_transport_is_measured(trainer: str, generator: str, transport: Transport) -> None:
    sides = parse_side("--trainer", trainer, "bf16"), parse_side("--generator", generator, "bf16")
    found = bench_sync(SMALL, *sides, SyncCase("small", trainer, generator, 3, transport))
    assert found.transport == transport
    bytes_each = {"fp8": 1.0, "bf16": 2.0}[sides[1].precision]
    assert found.bytes >= bytes_each * num_parameters(SMALL) * sides[1].mesh.size("replicas")
    assert 0 < max(found.publish_ms, found.load_ms) <= found.end_to_end_ms <= found.slowest_ms
    assert found.copy_ms > 0


def test_the_figures_come_as_json_and_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    done = llamarl("bench", "sync", "--model", "small", "--rounds", "1", "--json")
    assert msgspec.json.decode(done.out)["bytes"] == 2 * num_parameters(SMALL)
    for wrong in (["--model", "llama-9"], ["--trainer", "pp=2"], ["--transport", "cuda"]):
        done = llamarl("bench", "sync", *wrong)
        assert done.code == 2
        assert len(done.err.splitlines()) == 1


def test_nccl_is_refused_where_ranks_would_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    sides = parse_side("--trainer", "fsdp=2", "bf16"), parse_side("--generator", "", "bf16")
    with pytest.raises(InputError, match="NCCL needs a GPU for each of 3 ranks; there are 1"):
        bench_sync(SMALL, *sides, SyncCase("small", "", "", 1, "group"))


def test_a_trainer_does_not_hold_fp8() -> None:
    sides = parse_side("--trainer", "precision=fp8", "bf16"), parse_side("--generator", "", "bf16")
    with pytest.raises(InputError, match="fp8 is what a generator may hold"):
        bench_sync(SMALL, *sides, SyncCase("small", "", "", 1))
