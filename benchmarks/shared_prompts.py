"""What does it save to compute a prompt once for its answers, and which attention is fastest? On one GPU, under 4 minutes.

    python benchmarks/shared_prompts.py [--part updates|trees|documents|long] [--budget 230] [--json result.json]

- updates: whole updates of plain packs and of trees, compiled, side by side; and how far losses and gradients are apart.
- trees: attention alone, forward and backward, over the same documents: plain, as trees in parts, as trees by flex attention.
- documents: attention alone over documents of 1k, 8k and 32k tokens: the trainer's variable-length FlashAttention against
  cuDNN, with variable lengths and with equal ones.
- long: whole updates of equal documents of 32k, 8k and 1k tokens, compiled, with the attention of either; only if asked for.

Each variant that fails is a row with its error. What would begin after the budget is left out and named. `--tiny` runs the
updates on a CPU, to see that the script works.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from llamarl.algo.batch import Document
from llamarl.algo.losses import aipo_loss
from llamarl.bench.train import time_update
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.model_spec import ModelSpec, shape_named
from llamarl.train.attention import FlashDocuments
from llamarl.train.learner import Learner
from llamarl.train.packing import NO_PARENT, Pack, Sharing, make_packs
from llamarl.train.policy import ComputeSettings, random_policy
from llamarl.train.speed import measured_tflops, training_flops
from llamarl.train.tree_attention import FlashTrees

SAMPLES = 8
CASES = ((120, 200), (384, 256), (1024, 512))  # tokens of a prompt, mean tokens of an answer
MODELS = ("qwen2.5-1.5b", "llama-3.2-1b")
HEADS = {64: (32, 8), 128: (32, 8)}  # by size of a head: heads, key-value heads
TOKENS = 32_768
PACK = 16_384


@dataclass(frozen=True)
class Row:
    part: str
    case: str
    variant: str
    milliseconds: float = 0.0
    tokens: int = 0  # that are computed
    note: str = ""

    def __str__(self) -> str:
        time_ms = f"{self.milliseconds:9.2f}" if self.milliseconds else "        -"
        return f"| {self.part:9} | {self.case:30} | {self.variant:26} | {time_ms} | {self.tokens:7,} | {self.note}"


def make_groups(shape: ModelSpec, prompt: int, answer: int, tokens: int) -> list[Document]:
    """As many groups as have about `tokens` tokens in plain packs, with answers of half to one and a half times the mean."""
    rng, found = np.random.default_rng(0), list[Document]()
    for _ in range(max(1, tokens // (SAMPLES * (prompt + answer)))):
        question = rng.integers(0, shape.vocab_size, prompt)
        for _ in range(SAMPLES):
            size = int(rng.integers(answer // 2, answer * 3 // 2))
            found.append(
                Document(
                    tokens=np.concatenate([question, rng.integers(0, shape.vocab_size, size)]).astype(np.int32),
                    num_prompt_tokens=prompt,
                    behavior_logprobs=rng.normal(-np.log(shape.vocab_size), 0.3, size).astype(np.float32),
                    staleness=np.ones(size, dtype=np.int64),
                    advantages=np.full(size, rng.normal(), dtype=np.float32),
                )
            )
    return found


def short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:100] if text else ''}"


# Whole updates


def make_learner(shape: ModelSpec, mode: str, device: torch.device, **how: Any) -> Learner:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    how = {"compiled": on_gpu, "tokens_per_pack": PACK, **how}
    computing = ComputeSettings(device, dtype, share_prompts=mode, **how)
    settings = TrainerConfig(lr=1e-7)
    return Learner(random_policy(shape, computing), aipo_loss, settings=settings, algo=AlgoConfig(), updates=1000)


def gradients(learner: Learner, documents: Sequence[Document]) -> tuple[float, dict[str, Tensor]]:
    seen = learner.accumulate(documents)
    found = {name: grad.detach().clone() for name, grad in learner.optimizer.gradients().items()}
    learner.optimizer.zero_grad()
    return seen.loss(), found


def compare(learners: dict[str, Learner], documents: Sequence[Document]) -> str:
    """How far losses and gradients are apart: of all gradients, and of the worst parameter."""
    (plain_loss, plain), (tree_loss, trees) = (gradients(learner, documents) for learner in learners.values())
    gaps = {name: float((trees[name].float() - grad.float()).norm()) for name, grad in plain.items()}
    norms = {name: max(float(grad.float().norm()), 1e-12) for name, grad in plain.items()}
    apart = {name: gap / norms[name] for name, gap in gaps.items()}
    whole = (sum(gap**2 for gap in gaps.values()) / sum(norm**2 for norm in norms.values())) ** 0.5
    worst = max(apart, key=lambda name: apart[name])
    return f"loss {plain_loss:.6f} / {tree_loss:.6f}, gradients {whole:.1%} apart (worst {apart[worst]:.1%}, {worst})"


def updates(device: torch.device, tiny: bool, rounds: int = 5) -> Iterator[Row]:
    for model in MODELS[:1] if tiny else MODELS:
        shape = shape_named(model)
        if tiny:
            shape = replace(shape, num_layers=2, vocab_size=512, hidden_size=64, intermediate_size=128, num_heads=4)
            shape = replace(shape, num_kv_heads=2, head_dim=16)
        learners = {mode: make_learner(shape, mode, device) for mode in ("off", "auto")}
        for prompt, answer in ((40, 12),) if tiny else CASES:
            case, documents = (
                f"{model}, {prompt}/{answer}",
                make_groups(shape, prompt, answer, 2000 if tiny else TOKENS),
            )
            try:
                yield Row("updates", case, "equal?", note=compare(learners, documents))
                times: dict[str, list[float]] = {mode: [] for mode in learners}
                for number in range(2 + rounds):
                    for mode, learner in learners.items():
                        times[mode].append(time_update(learner, documents, number))
                for mode, learner in learners.items():
                    tokens = sum(sum(pack.lengths) for pack in learner.policy.packs(documents))
                    spent_s = statistics.median(times[mode][2:])
                    note = f"{statistics.median(times['off'][2:]) / spent_s:.2f} times as fast as plain"
                    yield Row("updates", case, f"share_prompts={mode}", spent_s * 1e3, tokens, note)
            except Exception as error:  # whatever a kernel or a compiler may say
                yield Row("updates", case, "failed", note=short(error))
        del learners
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def long(device: torch.device, rounds: int = 4) -> Iterator[Row]:
    shape, rng = shape_named("llama-3.2-1b"), np.random.default_rng(0)
    how = {"tokens_per_pack": TOKENS, "recompute": "full"}
    learners = {
        name: make_learner(shape, "off", device, cudnn_from=cudnn_from, **how)
        for name, cudnn_from in (("flash", 0), ("cuDNN", 1))
    }
    for length in (32_768, 8192, 1024):
        case, zeros = f"1B, {TOKENS // length} x {length}", np.zeros(length - 1, np.float32)
        documents = [
            Document(
                rng.integers(0, shape.vocab_size, length).astype(np.int32),
                1,
                zeros - 9,
                zeros.astype(np.int64),
                zeros + 1,
            )
            for _ in range(TOKENS // length)
        ]
        try:
            yield Row("long", case, "equal?", note=compare(learners, documents))
            for name, learner in learners.items():
                times = [time_update(learner, documents, number) for number in range(2 + rounds)][2:]
                spent_s = statistics.median(times)
                tflops = training_flops(shape, [length] * len(documents)) / spent_s / 1e12
                share = tflops / measured_tflops(device, torch.bfloat16)
                yield Row("long", case, name, spent_s * 1e3, TOKENS, f"{tflops:.0f} TFLOP/s, {share:.1%} of the peak")
        except Exception as error:  # whatever a kernel or a compiler may say
            yield Row("long", case, "failed", note=short(error))


# Attention alone


def timed_ms(run: Callable[[], Any], rounds: int = 7) -> float:
    for _ in range(3):
        run()
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)))
    return statistics.median(found)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def there_and_back(attention: Attention, given: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The output, and gradients of q, k and v."""
    out = attention(*given)
    return [out, *torch.autograd.grad(out, list(given), weights.reshape(out.shape))]


def random_inputs(shape: tuple[int, ...], size: int, device: torch.device) -> list[Tensor]:
    """q, k and v of these rows."""
    torch.manual_seed(0)
    heads, kv_heads = HEADS[size]
    return [
        torch.randn(*shape, count, size, device=device, dtype=torch.bfloat16).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def flex_trees(pack: Pack) -> Attention:
    """Flex attention with a mask of nodes and those before them."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen = torch.eye(len(pack.nodes) + 1, dtype=torch.bool)
    for number, node in enumerate(pack.nodes):
        if node.parent != NO_PARENT:
            seen[number] |= seen[node.parent]
    table, nodes = seen.to(pack.tokens_RT.device), pack.nodes_RT[0].remainder(len(pack.nodes) + 1)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return table[nodes[query], nodes[key]] & (key <= query)

    size = pack.tokens_RT.numel()
    blocks = torch.compile(create_block_mask)(mask, None, None, size, size, device=pack.tokens_RT.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=blocks, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


def trees(device: torch.device) -> Iterator[Row]:
    shape = shape_named("llama-3.2-1b")
    for prompt, answer in CASES:
        documents = make_groups(shape, prompt, answer, TOKENS // 2)
        (plain,), (shared,) = (
            make_packs(documents, 10**9, long_rows=True, sharing=Sharing(mode, least=32)) for mode in ("off", "on")
        )
        plain, shared = plain.to(device), shared.to(device)
        flash, tree = FlashDocuments(plain), FlashTrees(shared)
        variants: dict[str, tuple[Pack, Callable[[], Attention]]] = {
            "flash, plain": (plain, lambda flash=flash: lambda q, k, v: flash(0, q, k, v)),  # type: ignore[misc]
            "flash, trees": (shared, lambda tree=tree: lambda q, k, v: tree(0, q, k, v)),  # type: ignore[misc]
            "flash, trees, compiled": (
                shared,
                lambda tree=tree: torch.compile(lambda q, k, v: tree(0, q, k, v)),  # type: ignore[misc]
            ),
            "flex, trees, compiled": (shared, lambda pack=shared: flex_trees(pack)),  # type: ignore[misc]
        }
        for size in HEADS:
            expected: list[Tensor] = []
            for name, (pack, make) in variants.items():
                if name.startswith("flex") and (prompt, size) not in ((384, 64), (384, 128)):
                    continue  # it takes long to compile
                case = f"{prompt}/{answer}, D {size}"
                try:
                    torch._dynamo.reset()
                    given = random_inputs((1, pack.tokens_RT.numel()), size, device)
                    weights = torch.randn(given[0].shape, device=device).to(torch.bfloat16)
                    weights *= (pack.nodes_RT >= 0)[..., None, None]
                    attention, note = make(), ""
                    found = there_and_back(attention, given, weights)
                    if pack is shared and expected:
                        real = (pack.nodes_RT >= 0)[..., None, None]
                        found[0] = found[0] * real
                        gaps = [
                            float((a - b).float().norm() / b.float().norm())
                            for a, b in zip(found, expected, strict=True)
                        ]
                        note = f"{max(gaps):.2%} from flash, trees"
                    elif pack is shared:
                        expected = [found[0] * (pack.nodes_RT >= 0)[..., None, None], *found[1:]]
                    spent = timed_ms(lambda: there_and_back(attention, given, weights))  # noqa: B023
                    yield Row("trees", case, name, spent, sum(pack.lengths), note)
                except Exception as error:  # whatever a kernel or a compiler may say
                    yield Row("trees", case, name, note=short(error))


def flash_varlen(starts: Tensor, longest: int) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        found = torch.ops.aten._flash_attention_forward(*flat, starts, starts, longest, longest, 0.0, True, False)
        out: Tensor = found[0]
        return out

    return attend


def cudnn_varlen(starts: Tensor, longest: int) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        found = torch.ops.aten._cudnn_attention_forward(
            *flat, None, starts, starts, longest, longest, True, 0.0, True, False
        )
        out: Tensor = found[0]
        return out

    return attend


def cudnn_repeated(starts: Tensor, longest: int) -> Attention:
    """With a copy of keys and values for every query head, in case that groups of heads are what fails."""
    varlen = cudnn_varlen(starts, longest)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        times = q.shape[2] // k.shape[2]
        return varlen(q, k.repeat_interleave(times, 2), v.repeat_interleave(times, 2))

    return attend


def cudnn_equal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
    return out.transpose(1, 2).flatten(0, 1)


def documents(device: torch.device) -> Iterator[Row]:
    for length in (1024, 8192, 32_768):
        for size, (heads, _) in HEADS.items():
            count = TOKENS // length
            starts = torch.arange(count + 1, device=device, dtype=torch.int32) * length
            variants: dict[str, Attention] = {
                "flash, variable lengths": flash_varlen(starts, length),
                "cuDNN, variable lengths": cudnn_varlen(starts, length),
                "cuDNN, variable, repeated": cudnn_repeated(starts, length),
                "cuDNN, equal lengths": cudnn_equal,
            }
            expected: list[Tensor] = []
            for name, attention in variants.items():
                case, note = f"{count} x {length}, D {size}", ""
                try:
                    given = random_inputs((count, length), size, device)
                    weights = torch.randn(given[0].shape, device=device).to(torch.bfloat16)
                    found = there_and_back(attention, given, weights)
                    if expected:
                        gaps = [
                            float((a - b).float().norm() / b.float().norm())
                            for a, b in zip(found, expected, strict=True)
                        ]
                        note = f", {max(gaps):.2%} from flash"
                    expected = expected or found
                    spent = timed_ms(lambda: there_and_back(attention, given, weights))  # noqa: B023
                    rate = 3.5 * 4 * heads * size * count * length**2 / 2 / spent / 1e9
                    yield Row("documents", case, name, spent, TOKENS, f"{rate:.0f} TFLOP/s{note}")
                except Exception as error:  # whatever a kernel or a compiler may say
                    yield Row("documents", case, name, note=short(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", default=[], choices=["updates", "trees", "documents", "long"])
    parser.add_argument("--budget", type=float, default=230.0, help="seconds; what comes later is left out")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start_s, device = time.perf_counter(), torch.device("cpu" if arguments.tiny else "cuda")
    parts: dict[str, Iterator[Row]] = {
        "documents": documents(device),
        "updates": updates(device, arguments.tiny),
        "trees": trees(device),
        "long": long(device),
    }
    rows = list[Row]()
    for name in arguments.part or (["updates"] if arguments.tiny else ["documents", "updates", "trees"]):
        for row in parts[name]:
            rows.append(row)
            print(row, flush=True)
            if time.perf_counter() - start_s > arguments.budget:
                rows.append(Row(name, "", "left out", note=f"the rest: the budget of {arguments.budget:g} s is spent"))
                break
    print(f"\n{torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}")
    print("| part | case | variant | ms | tokens | note")
    for row in rows:
        print(row)
    print(f"{time.perf_counter() - start_s:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
