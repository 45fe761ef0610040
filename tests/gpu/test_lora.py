"""Adapters on a GPU: kernels against plain PyTorch, graphs against a plain loop, training, one base in device memory, and
whole jobs in every precision, sound ones and faulty ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.decoding import decode_all
from helpers.groups import prompt_group
from helpers.killing import TINY
from helpers.lora import LORA, merged_gradients, put_adapters, random_adapters, save_both
from helpers.lora_faults import FAULTS, Planted
from helpers.training import assert_same_gradients, make_test_documents
from torch import Tensor

from llamarl import Job
from llamarl.algo.losses import aipo_loss
from llamarl.bench.actors import Actor
from llamarl.config import AlgoConfig, LoraConfig, TrainerConfig
from llamarl.config.file import load_config
from llamarl.errors import JobFailed
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits
from llamarl.layout.boxes import whole
from llamarl.model.adapter_digest import AdapterHash, HashedPart
from llamarl.model.adapter_folder import load_merged
from llamarl.model.checkpoint import load_model
from llamarl.model.lora_serving import serve_adapters
from llamarl.model.quantize import FP8, quantize_rows
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, load_policy
from llamarl.types import bytes_to_floats, bytes_to_tokens
from llamarl.weights.shared_memory import shared_memory
from llamarl.weights.slot_file import SlotFile

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
GIB = 1 << 30


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, device=CUDA).to(dtype)


# Kernels


@pytest.mark.parametrize("rows", [1, 7, 64, 256, 1500])
@pytest.mark.parametrize("rank", [3, 16, 32, 64])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_two_launches_add_what_plain_products_do(kind: str, rank: int, rows: int) -> None:
    from llamarl.model.lora_kernels import expand_add, shrink, tiles_of

    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    columns = [slice(0, 200), slice(200, 264), slice(300, 428)]  # a layer in between has no adapters
    x, a = random(rows, 320, dtype=dtype), random(3 * rank, 320, dtype=dtype) * 0.1
    b = random(sum(one.stop - one.start for one in columns), rank, dtype=dtype) * 0.1
    given: Any = x
    if kind == "fp8":
        values, scales = given = quantize_rows(x, FP8)
        x = (values.float() * scales[:, None]).to(dtype)
    for out in (random(rows, 428, dtype=dtype), random(rows, 428)):
        expected, at = out.double(), 0
        for number, one in enumerate(columns):
            end = at + one.stop - one.start
            inner = 0.5 * x.double() @ a[number * rank : (number + 1) * rank].double().t()
            expected[:, one] += inner @ b[at:end].double().t()
            at = end
        expand_add(out, shrink(given, a, early=False), b, tiles_of(columns), 0.5, early=True)
        error = (out.double() - expected).norm() / expected.norm()
        assert error < (1e-5 if kind == "float32" else 5e-3), float(error)


@pytest.mark.parametrize("rows", [1, 7, 256, 1500])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_and_up_are_multiplied_on_the_way(dtype: torch.dtype, gate_first: bool, rows: int) -> None:
    from llamarl.model.lora_kernels import expand_gated, shrink

    x, a, b = random(rows, 320, dtype=dtype), random(16, 320, dtype=dtype) * 0.1, random(400, 8, dtype=dtype) * 0.1
    gate_up = random(rows, 400, dtype=dtype)
    inner = 0.5 * x.double() @ a.double().t()
    deltas = [inner[:, :8] @ b[:200].double().t(), inner[:, 8:] @ b[200:].double().t()]
    gate, up = (gate_up.double() + torch.cat(deltas if gate_first else deltas[::-1], 1)).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    inner = shrink(x, a, early=False)
    error = (expand_gated(gate_up, inner, b, gate_first, 0.5, early=True).double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2), float(error)


def test_the_hash_of_a_gpu_is_that_of_a_cpu() -> None:
    def parts(device: str) -> list[HashedPart]:
        generator = torch.Generator().manual_seed(0)
        sizes = [(3, 70), (300, 4), (170, 200)]
        made = [torch.randn(size, generator=generator).to(device) for size in sizes]
        experts = torch.randn((2, 2, 5, 4), generator=generator).to(device)
        return [
            HashedPart("experts", experts, ((1, 3), (0, 2), (3, 8), (0, 4)), (6, 2, 16, 4), 0.5),
            *(
                HashedPart(
                    f"{columns}",
                    one,
                    ((index, index + one.shape[0]), (first, first + one.shape[1])),
                    (99, columns),
                    0.5,
                )
                for index, one in enumerate(made)
                for first, columns in ((2, 999), (0, one.shape[1]))
            ),  # part of a matrix, and whole rows
        ]

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for types in [(bf16, bf16), (bf16, fp16), (fp32, fp32)]:
        on_gpu, on_cpu = AdapterHash(CUDA, types), AdapterHash(torch.device("cpu"), types)
        assert on_gpu.total(parts("cuda")).item() == on_cpu.total(parts("cpu")).item()


# The generator


def decoder_of(folder: Path, lora: LoraConfig, dtype: torch.dtype, *, graphs: bool = True) -> ContinuousDecoder:
    return ContinuousDecoder(
        load_model(folder / "model", dtype=dtype, device=CUDA),
        Limits(slots=16, max_prompt_tokens=12, max_new_tokens=24, page_tokens=16),
        eos_ids=(),
        seed=3,
        graphs=graphs,
        add_adapters=lambda model: serve_adapters(model, lora, lambda parameter: parameter.shape),
    )


def load(decoder: ContinuousDecoder, adapters: dict[str, Tensor], version: int) -> None:
    put_adapters(decoder.model, adapters, lambda parameter: whole(parameter.shape))
    decoder.version = version


def completions(decoder: ContinuousDecoder, ordinal: int) -> list[tuple[list[int], list[float]]]:
    done = decode_all(decoder, [prompt_group([5, 6, 7, 2], ordinal=ordinal, samples=8, max_new_tokens=20)])[ordinal]
    return [
        (bytes_to_tokens(one.tokens).tolist(), bytes_to_floats(one.behavior_logprobs).tolist())
        for one in done.completions
    ]


def test_graphs_say_what_a_plain_loop_says_and_follow_every_version(tmp_path: Path) -> None:
    save_both(tmp_path)
    graphs, plain = (decoder_of(tmp_path, LORA, torch.float32, graphs=graphs) for graphs in (True, False))
    seen = []
    for version in range(3):
        adapters = random_adapters(seed=version)
        for decoder in (graphs, plain):
            load(decoder, adapters, version)
        found, expected = (completions(decoder, version) for decoder in (graphs, plain))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        torch.testing.assert_close([row for _, row in found], [row for _, row in expected], atol=1e-4, rtol=0)
        seen.append([tokens for tokens, _ in found])
    assert seen[0] != seen[1] != seen[2]


@torch.no_grad()
def test_logprobs_are_those_of_the_merged_model(tmp_path: Path) -> None:
    from llamarl.model.transformer import causal_attention

    adapter = save_both(tmp_path)
    decoder, merged = decoder_of(tmp_path, LORA, torch.float32), load_merged(adapter, dtype=torch.float32).to(CUDA)
    load(decoder, random_adapters(), 0)
    for tokens, logprobs in completions(decoder, 0):
        row = torch.tensor([[5, 6, 7, 2, *tokens]], device=CUDA)
        hidden = merged(row, torch.arange(row.shape[1], device=CUDA)[None], causal_attention)
        scores = torch.log_softmax(merged.logits(hidden)[0, 3:-1].float(), -1)
        expected = scores.gather(1, row[0, 4:, None])[:, 0].cpu()
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=2e-4, rtol=0)


# The trainer


@pytest.mark.parametrize("how", [{}, {"compiled": True}, {"compiled": True, "recompute": "selective"}], ids=str)
def test_gradients_are_those_of_the_merged_model(how: dict[str, Any], tmp_path: Path) -> None:
    adapter, documents = save_both(tmp_path), make_test_documents(13)
    computing = ComputeSettings(CUDA, torch.float32, lora=LORA, **how)
    policy = load_policy(tmp_path / "model", computing, adapter=adapter)
    settings = TrainerConfig(lr=1e-2, warmup_updates=0)
    learner = Learner(policy, aipo_loss, settings=settings, algo=AlgoConfig(), updates=10)
    loss, expected = merged_gradients(adapter, documents, random_adapters())
    seen = learner.accumulate(documents)
    assert seen.loss() == pytest.approx(loss, abs=1e-4)
    assert_same_gradients({name: grad.cpu() for name, grad in learner.optimizer.gradients().items()}, expected)


# One base in device memory. CUDA cannot be used in a fork of a process that has used it: this runs in a fresh interpreter.


class User:
    """A process that maps 2 GiB."""

    def __init__(self, file: SlotFile) -> None:
        self._memory = shared_memory(file, "base", CUDA, 2 * GIB, lambda memory: memory.fill_(7))

    def value(self) -> int:
        return int(torch.unique(self._memory[:: 1 << 20]).item())

    def write(self) -> str:
        try:
            self._memory.fill_(1)
            torch.cuda.synchronize()
        except Exception as error:
            return str(error)
        return "written"

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def used_bytes() -> int:
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"],
        capture_output=True,
        check=True,
        text=True,
    )
    return int(found.stdout) << 20


def one_base_outlives_its_users() -> None:
    file, before = SlotFile(), used_bytes()
    first = Actor(lambda: User(file), 1, 60.0)
    assert first.call("value") == 7
    alone = used_bytes() - before
    second = Actor(lambda: User(file), 1, 60.0)
    assert second.call("value") == 7
    both = used_bytes() - before
    assert 2 * GIB < alone < 3.5 * GIB and both < alone + 1.5 * GIB, (alone, both)
    try:
        first.call("die")
    except Exception as error:
        print("died:", error)
    third = Actor(lambda: User(file), 1, 60.0)
    assert third.call("value") == second.call("value") == 7
    assert used_bytes() - before < both + 0.5 * GIB, "more than one base"
    said = third.call("write")
    assert said != "written", "the base can be written"
    print("a write says:", said.splitlines()[0])
    assert second.call("value") == 7
    print("PASSED")


def test_one_base_is_in_device_memory_and_nobody_can_write_it() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    print(done.stdout)
    assert "PASSED" in done.stdout, done.stdout + done.stderr


# Whole jobs

SETTINGS = [
    *TINY,
    "generator.device=cuda",
    "trainer.device=cuda",
    "trainer.compile='off'",
    "model.lora.rank=8",
    "trainer.lr=1e-3",
    "trainer.warmup_updates=0",
    "schedule.updates=24",
    "schedule.probe_every=1",
    "evaluate.prompts=0",
    "snapshots.at_end=none",
]
MODES = {
    "bf16": [],
    "fp32": ["generator.dtype=float32", "trainer.dtype=float32"],
    "bf16 and fp32": ["generator.dtype=bfloat16", "trainer.dtype=float32"],
    "fp16": ["generator.dtype=float16", "trainer.dtype=float16"],
    "merged": ["generator.lora=merged"],
    "quantized": ["generator.quantize=fp8"],
    "int8": ["generator.quantize=int8"],
    "fp8 cache": ["generator.kv_cache=fp8"],
    "fp8 base": ["model.base=fp8"],
    "synchronous": ["schedule.max_staleness=0"],
}


def effects(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "adapter_effect" in row]


@pytest.mark.parametrize("mode", MODES)
def test_a_sound_job_runs_on_in_every_precision(mode: str, tmp_path: Path) -> None:
    assert Job(load_config(None, [*SETTINGS, *MODES[mode]])).run(tmp_path / "run").outcome == "finished"
    found = effects(tmp_path / "run")
    ratios = sorted(row["adapter_effect_gap"] / max(row["adapter_base_gap"], 1e-9) for row in found)
    gaps = [row["logprob_gap"] for row in found if "logprob_gap" in row]
    print(
        f"{mode}: effect {max(row['adapter_effect'] for row in found):.3f}, gap over the base's: median "
        f"{ratios[len(ratios) // 2]:.2f}, largest {ratios[-1]:.2f}; log-prob gap {sum(gaps) / max(1, len(gaps)):.5f}"
    )
    assert len(found) > 15 and max(row["adapter_effect"] for row in found) > 1e-2


@pytest.mark.parametrize("mode", ["bf16", "quantized", "fp8 base"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed_in_narrow_precision_too(fault: str, mode: str, tmp_path: Path) -> None:
    """By hash and effect together."""
    builders: dict[str, Callable[..., Any]] = {"generator": Planted(FAULTS[fault], hashed=True)}
    config = load_config(None, [*SETTINGS, "engine=inline", *MODES[mode]])
    with pytest.raises(JobFailed, match=re.compile("adapters")):
        Job(config, builders=builders).run(tmp_path / "run")


if __name__ == "__main__":
    one_base_outlives_its_users()
