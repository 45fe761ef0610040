"""On a GPU, in graphs: the same completions as a plain loop, whatever happens around them."""

from __future__ import annotations

import math
from random import Random
from typing import Literal

import pytest
import torch
from helpers.groups import prompt_group
from helpers.models import copy_weights, lively_model
from msgspec.structs import asdict, replace
from torch import Tensor

from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.drafts import DraftChoice
from llamarl.generate.limits import Limits, Precision
from llamarl.generate.sampling import filter_threshold, sample_tokens, uniform_draws
from llamarl.generate.sequences import Running, Sequence
from llamarl.model import ops
from llamarl.model.checkpoint import random_model
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.model_spec import ModelSpec
from llamarl.types import Completion, CompletionGroup, PromptGroup, bytes_to_floats, bytes_to_tokens

pytestmark = pytest.mark.gpu
SEED = 7
SHAPE = ModelSpec(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=192,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
)


def model_on(device: torch.device, seed: int = 0) -> Transformer:
    model = lively_model(seed, SHAPE).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)  # as sharp as fp32 on a GPU still tells apart
    return model


def decoder_of(model: Transformer, **settings: object) -> ContinuousDecoder:
    chosen = {"slots": 32, "max_prompt_tokens": 40, "max_new_tokens": 48, **settings}
    graphs, recompute = bool(chosen.pop("graphs", True)), bool(chosen.pop("recompute", False))
    limits = Limits(**chosen)  # type: ignore[arg-type]
    decoder = ContinuousDecoder(model, limits, eos_ids=(0, 9), seed=SEED, graphs=graphs, recompute=recompute)
    decoder.version = 0
    return decoder


def some_groups(temperature: float = 1.0, **filters: float) -> list[PromptGroup]:
    random = Random(1)
    return [
        prompt_group(
            [random.randrange(1, SHAPE.vocab_size) for _ in range(random.choice([1, 5, 16, 17, 40]))],
            ordinal=ordinal,
            samples=random.randint(1, 6),
            max_new_tokens=random.randint(1, 48),
            temperature=temperature,
            **filters,
        )
        for ordinal in range(24)
    ]


def finish(decoder: ContinuousDecoder, groups: list[PromptGroup]) -> dict[int, CompletionGroup]:
    for group in groups:
        decoder.add(group)
    found: dict[int, CompletionGroup] = {}
    for _ in range(3000):
        if decoder.idle:
            return found
        found.update({done.ordinal: done for done in decoder.step()})
    raise AssertionError("the decoder does not come to an end")


def tokens_of(completion: Completion) -> list[int]:
    return [int(token) for token in bytes_to_tokens(completion.tokens)]


@torch.no_grad()
def plain_loop(model: Transformer, group: PromptGroup, sample: int) -> list[int]:
    device, answer = model.lm_head.weight.device, list[int]()
    read = bytes_to_tokens(group.prompt_tokens).tolist()
    while len(answer) < group.sampling.max_new_tokens and not {0, 9} & set(answer):
        tokens = torch.tensor([read + answer], device=device)
        hidden = model(tokens, torch.arange(tokens.shape[1], device=device)[None], causal_attention)
        counters = (torch.tensor([value], device=device) for value in (group.ordinal, sample, len(answer)))
        knobs = {"temperature": torch.tensor([group.sampling.temperature], device=device)}
        token, _ = sample_tokens(model.logits(hidden[:, -1]), uniform_draws(SEED, *counters), knobs)
        answer.append(int(token))
    return answer


def agreement(found: dict[int, CompletionGroup], expected: dict[int, CompletionGroup]) -> float:
    pairs = [
        (mine.tokens, theirs.tokens)
        for ordinal, group in expected.items()
        for mine, theirs in zip(found[ordinal].completions, group.completions, strict=True)
    ]
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fp32_equals_a_plain_loop_over_one_sequence(temperature: float, device: torch.device) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, groups = model_on(device), some_groups(temperature)
    found = finish(decoder_of(model), groups)
    pairs = [
        (tokens_of(completion), plain_loop(model, group, sample))
        for group in groups
        for sample, completion in enumerate(found[group.ordinal].completions)
    ]
    same = sum(mine == theirs for mine, theirs in pairs) / len(pairs)
    assert same >= 0.98, "more than a draw that fell on a border of rounding"


@pytest.mark.parametrize(
    "settings",
    [{"graphs": False}, {"num_pages": 12, "slots": 16}, {"slots": 3}, {"burst": 1}, {"burst": 5}, {"page_tokens": 4}],
    ids=str,
)
def test_graphs_paging_refill_and_bursts_change_nothing(settings: dict[str, object], device: torch.device) -> None:
    model, groups = model_on(device), some_groups()
    found, expected = finish(decoder_of(model, **settings), groups), finish(decoder_of(model), groups)
    assert agreement(found, expected) >= 0.98


def test_graphs_captured_ahead_change_nothing(device: torch.device) -> None:
    model, groups = model_on(device), some_groups()
    expected, prepared = finish(decoder_of(model), groups), decoder_of(model)
    captures = 1
    while prepared.prepare(filtered=False):
        captures += 1
    assert captures > 3
    assert agreement(finish(prepared, groups), expected) == 1.0
    assert prepared.cache_share == 0.0


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(right: float, temperature: float, device: torch.device) -> None:
    """Few sequences run at once here, so that every one has copies; some drafts are right and some are not."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, groups = model_on(device), some_groups(temperature)[:6]
    expected, chance = finish(decoder_of(model), groups), Random(2)

    def draft(sequence: Sequence, tokens: list[int], most: int) -> list[int]:
        answer = tokens_of(expected[sequence.group.prompt.ordinal].completions[sequence.sample])
        coming = answer[len(tokens) : len(tokens) + most]
        return [token if chance.random() < right else another(token) for token in coming]

    def another(token: int) -> int:
        return (token + chance.randrange(1, SHAPE.vocab_size)) % SHAPE.vocab_size

    limits = Limits(slots=64, max_prompt_tokens=40, max_new_tokens=48)
    decoder = ContinuousDecoder(
        model, limits, eos_ids=(0, 9), seed=SEED, drafts=DraftChoice(5), drafter=draft, graphs=True
    )
    decoder.version = 0
    found = finish(decoder, groups)
    assert agreement(found, expected) >= 0.95
    assert decoder.drafting is not None and decoder.drafting.counts.drafted > 0
    assert (decoder.drafting.counts.accepted > 0) == (right > 0)


@pytest.mark.parametrize("chunk", [7, 16, 33])
def test_prompts_in_chunks_change_nothing(chunk: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.generate.scheduler._SHORT_PROMPT", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    model, groups = model_on(device), some_groups()
    found, expected = finish(decoder_of(model, prefill_tokens=chunk), groups), finish(decoder_of(model), groups)
    assert agreement(found, expected) >= 0.98


@pytest.mark.parametrize("rows", [5, 16, 24])
def test_prompts_that_are_read_beside_answers_change_nothing(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamarl.generate.scheduler._SHORT_PROMPT", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    model, groups = model_on(device), some_groups()
    beside, plain = decoder_of(model, prefill_beside=rows, slots=12), decoder_of(model, prefill_beside=0, slots=12)
    assert agreement(finish(beside, groups), finish(plain, groups)) >= 0.98
    assert any(key[0] == "decode" and key[-1] for key in beside._device._graphs._captured)  # type: ignore[index]


@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_prompts_beside_answers_write_the_keys_and_values_of_whole_prompts(
    kv_cache: Literal["auto", "fp8"], device: torch.device
) -> None:
    """In bf16: 1,500 tokens, 128 in every step of three running answers, and whole."""
    shape = replace(SHAPE, max_positions=2048, head_dim=64)
    model = random_model(shape, dtype=torch.bfloat16, device=device)
    chance, caches = Random(3), list[Tensor]()
    prompt = [chance.randrange(shape.vocab_size) for _ in range(1501)]
    for rows in (0, 128):
        limits = Limits(slots=4, max_prompt_tokens=1520, max_new_tokens=64, prefill_beside=rows)
        decoder = ContinuousDecoder(model, limits, eos_ids=(), seed=SEED, precision=Precision(kv_cache=kv_cache))
        decoder.version = 0
        decoder.add(prompt_group([1, 2], ordinal=0, samples=3, max_new_tokens=64))
        decoder.step()
        decoder.add(prompt_group(prompt, ordinal=1, samples=1, max_new_tokens=8))
        while decoder.num_running < 4:
            decoder.step()
        captured = decoder._device._graphs._captured
        assert any(key[0] == "decode" and key[-1] for key in captured) == bool(rows)  # type: ignore[index]
        running = next(one for one in decoder._schedule.running.values() if one.sequence.group.prompt.ordinal == 1)
        caches.append(cached(decoder, running, 1500))
    assert_cached_alike(*caches)


@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_long_chunks_write_the_keys_and_values_of_whole_prompts(
    kv_cache: Literal["auto", "fp8"], device: torch.device
) -> None:
    """In bf16, where a chunk takes FlashAttention over copied pages: 700 tokens in chunks of 300 and whole."""
    shape = replace(SHAPE, max_positions=1024, head_dim=64)
    model = random_model(shape, dtype=torch.bfloat16, device=device)
    chance, caches = Random(3), list[Tensor]()
    prompt = [chance.randrange(shape.vocab_size) for _ in range(701)]
    for chunk in (0, 300):
        limits = Limits(slots=2, max_prompt_tokens=720, max_new_tokens=8, prefill_tokens=chunk)
        decoder = ContinuousDecoder(model, limits, eos_ids=(), seed=SEED, precision=Precision(kv_cache=kv_cache))
        decoder.version = 0
        decoder.add(prompt_group(prompt, samples=1, max_new_tokens=8))
        for _ in range(4):
            decoder._admit()
        (running,) = decoder._schedule.running.values()
        caches.append(cached(decoder, running, 700))
    assert_cached_alike(*caches)


def cached(decoder: ContinuousDecoder, running: Running, count: int) -> Tensor:
    """Keys and values of the first tokens of a sequence, of all layers."""
    cache = decoder._device.cache
    table = torch.tensor([running.pages], device=decoder.model.lm_head.weight.device)
    read = [
        side(layer).read(table, torch.bfloat16)[0, :, :count].float()
        for layer in range(decoder.model.shape.num_layers)
        for side in (cache.keys, cache.values)
    ]
    return torch.stack(read)


def assert_cached_alike(whole: Tensor, other: Tensor) -> None:
    assert (whole - other).abs().mean() < 0.01 * whole.abs().mean()
    assert whole.abs().min(dim=2).values.sum() > 0


def test_graphs_of_fewer_rows_and_of_prompts_change_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, groups = model_on(device), some_groups()
    expected = finish(decoder_of(model), groups)
    monkeypatch.setattr("llamarl.generate.graphs._WORTH", 0)
    at_once = decoder_of(model)
    assert agreement(finish(at_once, groups), expected) >= 0.98
    captured = list(at_once._device._graphs._captured)
    assert any(key[0] == "prefill" for key in captured)  # type: ignore[index]
    assert any(key[0] == "decode" and key[1] < at_once.limits.slots for key in captured)  # type: ignore[index]


def test_the_host_launches_without_waiting_for_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end and others start; only a capture, and looking at what came out, may wait."""
    monkeypatch.setattr("llamarl.generate.graphs._WORTH", 10**9)
    monkeypatch.setattr("llamarl.generate.kv_splits._UNEVEN", 10**9)
    decoder = decoder_of(model_on(device), slots=8)
    for group in some_groups():
        decoder.add(group)
    decoder.step()  # captures
    while decoder._schedule.num_waiting:
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoder._admit()
            decoder._make_room()
            decoder._launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while len(decoder._in_flight) > 1:
            decoder._collect()


@pytest.mark.parametrize("slots", [256, 300])
def test_reading_shared_prompts_once_changes_nothing(
    slots: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [
        prompt_group([1 + (7 * i + j) % 290 for j in range(40)], ordinal=i, samples=3 + i % 12, max_new_tokens=20)
        for i in range(40)
    ]
    model = model_on(device)
    monkeypatch.setattr("llamarl.generate.device_runner._SHARING_BYTES", 1)
    together = decoder_of(model, slots=slots)
    found = finish(together, groups)
    assert any(key[5] for key in together._device._graphs._captured if key[0] == "decode"), "nothing was shared"  # type: ignore[index]
    monkeypatch.setattr("llamarl.generate.device_runner._SHARING_BYTES", 10**12)
    alone = decoder_of(model, slots=slots)
    assert agreement(found, finish(alone, groups)) >= 0.98
    assert not any(key[5] for key in alone._device._graphs._captured if key[0] == "decode")  # type: ignore[index]


def test_weights_change_in_flight_without_new_graphs(device: torch.device) -> None:
    """Versions are recorded where they changed, and what is sampled afterwards comes from the new weights."""
    old, new = model_on(device, 0), model_on(device, 1)
    serving = model_on(device, 0)
    decoder = decoder_of(serving, recompute=True)
    group = prompt_group([5, 6, 7], samples=8, max_new_tokens=48)
    decoder.add(group)
    decoder.step()
    graphs = len(decoder._device._graphs._captured)
    copy_weights(new, serving)
    decoder.version = 1
    done = finish(decoder, [])[0]
    assert len(decoder._device._graphs._captured) <= graphs + 1  # the one that reads sequences again
    mixed = 0
    for completion in done.completions:
        runs = {run.version: run.count for run in completion.versions}
        mixed += len(runs) == 2
        tokens, said = tokens_of(completion), bytes_to_floats(completion.behavior_logprobs)
        split = runs.get(0, 0)
        for first, last, model in ((0, split, old), (split, len(tokens), new)):
            expected = logprobs_under(model, [5, 6, 7], tokens, 1.0)[first:last].tolist()
            assert said[first:last] == pytest.approx(expected, abs=2e-3)
    assert mixed


def test_narrow_weights_arrive_in_flight_without_new_graphs_and_without_wide_copies(device: torch.device) -> None:
    """As a job's fp8 weights do: values and scales are written where the graphs read them."""
    precision = Precision(weights="fp8", keep_wide=False)
    shape = replace(SHAPE, intermediate_size=256)  # sizes of fp8 products are multiples of 16
    serving, new = (lively_model(seed, shape).to(device, torch.bfloat16) for seed in (0, 1))
    limits = Limits(slots=16, max_prompt_tokens=40, max_new_tokens=16)
    decoder, fresh = (
        ContinuousDecoder(one, limits, eos_ids=(), seed=SEED, precision=precision) for one in (serving, new)
    )
    group = prompt_group([5, 6, 7], samples=8, max_new_tokens=16)
    before = finish(decoder, [group])
    graphs = len(decoder._device._graphs._captured)
    for mine, theirs in zip(
        [*serving.parameters(), *serving.buffers()], [*new.parameters(), *new.buffers()], strict=True
    ):
        mine.data.copy_(theirs.data)
    assert agreement(finish(decoder, [group]), finish(fresh, [group])) == 1.0
    assert agreement(finish(decoder, [group]), before) < 1.0
    assert len(decoder._device._graphs._captured) == graphs
    held = [one for name, one in serving.named_parameters() if name.endswith("_proj.weight")]
    assert all(one.dtype == torch.float8_e4m3fn for one in held)


@torch.no_grad()
def logprobs_under(model: Transformer, prompt: list[int], answer: list[int], temperature: float) -> Tensor:
    """As the trainer computes them: plain operations, whole sequence, autograd's precision rules."""
    device = model.lm_head.weight.device
    tokens = torch.tensor([prompt + answer], device=device)
    hidden = model(tokens, torch.arange(tokens.shape[1], device=device)[None], causal_attention)
    scores = torch.log_softmax(model.logits(hidden[0, len(prompt) - 1 : -1]) / temperature, -1)
    return scores.gather(1, torch.tensor(answer, device=device)[:, None])[:, 0]


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_narrow_logprobs_agree_with_a_recomputation(dtype: torch.dtype, most: float, device: torch.device) -> None:
    shape = ModelSpec(
        vocab_size=4000,
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=8,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        max_positions=512,
    )
    model = random_model(shape, dtype=dtype, device=device)
    decoder = ContinuousDecoder(
        model, Limits(slots=32, max_prompt_tokens=64, max_new_tokens=128), eos_ids=(), seed=SEED
    )
    decoder.version = 0
    prompt = [int(token) for token in torch.randint(0, 4000, (50,), generator=torch.Generator().manual_seed(0))]
    done = finish(decoder, [prompt_group(prompt, samples=32, max_new_tokens=128)])[0]
    gaps = [
        (
            torch.tensor(bytes_to_floats(one.behavior_logprobs))
            - logprobs_under(model, prompt, tokens_of(one), 1.0).cpu()
        )
        for one in done.completions
    ]
    gap = torch.cat(gaps).abs().mean().item()
    print(f"mean |difference| of log-probs in {dtype}: {gap:.5f}")
    assert gap < most


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 50, "top_p": 0.9}], ids=str
)
def test_frequencies_match_probabilities(filters: dict[str, float], device: torch.device) -> None:
    """Chi-square over the first tokens of many samples of one prompt."""
    model, samples = model_on(device), 20_000
    decoder = decoder_of(model, slots=512, max_new_tokens=2)
    group = prompt_group([5, 3], samples=samples, max_new_tokens=1, **filters)  # type: ignore[arg-type]
    found = torch.tensor([tokens_of(one)[0] for one in finish(decoder, [group])[0].completions])
    with torch.no_grad():
        hidden = model(torch.tensor([[5, 3]], device=device), torch.arange(2, device=device)[None], causal_attention)
        scores_1V = model.logits(hidden[:, -1])
    knobs = {name: torch.tensor([value], device=device) for name, value in asdict(group.sampling).items()}
    least = filter_threshold(scores_1V, knobs)
    expected = torch.softmax(scores_1V.masked_fill(scores_1V < least[:, None], -torch.inf), -1)[0].cpu() * samples
    counted = torch.bincount(found, minlength=SHAPE.vocab_size).float()
    assert counted[expected == 0].sum() == 0
    common = expected >= 5
    statistic = float(((counted - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * max(1, freedom)) + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_operations(dtype: torch.dtype, device: torch.device) -> None:
    from llamarl.model import kernels

    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def same(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2)

    qkv, weight = normal(3, 7, 12 * 24), normal(24)
    heads = qkv[..., : 8 * 24].view(3, 7, 8, 24)
    same(kernels.rms_norm(heads, weight, 1e-5), ops.rms_norm(heads, weight, 1e-5))
    wide, weight = normal(5, 3, 2048), normal(2048)
    same(kernels.rms_norm(wide, weight, 1e-5), ops.rms_norm(wide, weight, 1e-5))
    angles = torch.randn(3, 7, 1, 12, generator=generator, device=device).repeat(1, 1, 1, 2)
    rope = (angles.cos().to(dtype), angles.sin().to(dtype))
    same(kernels.rotate(heads, rope), ops.rotate(heads, rope))
    same(kernels.silu_times(wide), ops.silu_times(wide))


@pytest.mark.parametrize(
    ("rows", "outer", "inner", "parts"), [(64, 256, 8192, 4), (300, 4096, 4096, 1), (256, 4096, 4096, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_to_the_residual_also_in_parts(
    rows: int, outer: int, inner: int, parts: int, dtype: torch.dtype, device: torch.device
) -> None:
    from llamarl.model import kernels

    torch.backends.cuda.matmul.allow_tf32 = False
    assert kernels.parts_of_product(rows, outer, inner) == parts
    generator = torch.Generator(device=device).manual_seed(0)
    x, weight = (torch.randn(size, inner, generator=generator, device=device).to(dtype) for size in (rows, outer))
    residual = torch.randn(rows, outer, generator=generator, device=device)
    expected = residual.double() + x.double() @ weight.double().t()
    terms = kernels.add_product(residual, x, weight)
    assert (terms is not None) == (parts > 1 and dtype != torch.float32)
    if terms is not None:
        norm_weight, summed = torch.randn(outer, generator=generator, device=device).to(dtype), residual.clone()
        kernels.add_terms(summed, terms)
        normed = kernels.add_and_norm(residual, terms, norm_weight, 1e-5)
        assert torch.equal(residual, summed), "the norm adds what is still to be added"
        torch.testing.assert_close(normed, ops.rms_norm(summed, norm_weight, 1e-5), atol=3e-2, rtol=2e-2)
    assert (residual - expected).norm() / expected.norm() < 1e-5
