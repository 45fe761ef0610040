"""Long prompts are read in chunks between bursts: running answers never wait for more, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.decoding import assert_same, decode_all, short_and_long_groups
from helpers.groups import prompt_group
from helpers.lora import put_adapters, random_adapters
from helpers.models import EOS, SHAPE, copy_weights, lively_model
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import GeneratorConfig, LoraConfig
from llamarl.generate import scheduler
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.device_runner import DeviceRunner
from llamarl.generate.limits import Limits
from llamarl.generate.sequences import Extension, Fill
from llamarl.layout.boxes import whole
from llamarl.model.lora_serving import serve_adapters
from llamarl.model.transformer import Transformer
from llamarl.types import CompletionGroup, PromptGroup

MAX_PROMPT, MAX_NEW = 36, 16
FULL = 14  # pages of 4 tokens for 36 + 16 - 1 tokens, and one more for the prompt that is shared
LORA = LoraConfig(rank=3, alpha=6.0)


@pytest.fixture(autouse=True)
def no_prompt_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_SHORT_PROMPT", 0)


def decoder_with(
    prefill_tokens: int,
    *,
    num_pages: int = 0,
    recompute: bool = False,
    lora: bool = False,
    eos_ids: tuple[int, ...] = (),
    max_turns: int = 1,
    burst: int = 0,
) -> ContinuousDecoder:
    limits = Limits(
        slots=6,
        max_prompt_tokens=MAX_PROMPT,
        max_new_tokens=MAX_NEW,
        page_tokens=4,
        num_pages=num_pages,
        prefill_tokens=prefill_tokens,
        burst=burst,
        parked=8 if max_turns > 1 else 0,
    )
    decoder = ContinuousDecoder(
        lively_model(),
        limits,
        eos_ids=eos_ids,
        seed=5,
        recompute=recompute,
        max_turns=max_turns,
        add_adapters=with_adapters if lora else None,
    )
    if lora:
        put_adapters(decoder.model, random_adapters(LORA, SHAPE), lambda parameter: whole(parameter.shape))
    decoder.version = 0
    return decoder


def with_adapters(model: Transformer):  # type: ignore[no-untyped-def]
    return serve_adapters(model, LORA, lambda parameter: parameter.shape)


def groups_of(seed: int, count: int = 7) -> list[PromptGroup]:
    return short_and_long_groups(seed, count, max_prompt=MAX_PROMPT, max_new=MAX_NEW)


@pytest.mark.parametrize("chunk", [1, 5, 8, 35, 100])
@pytest.mark.parametrize("num_pages", [FULL, FULL + 6, 0])
def test_chunks_give_what_whole_prompts_give_also_when_pages_are_scarce(chunk: int, num_pages: int) -> None:
    groups = groups_of(chunk)
    decoder = decoder_with(chunk, num_pages=num_pages)
    assert_same(decode_all(decoder, groups), decode_all(decoder_with(0), groups))
    assert decoder.cache_share == 0.0, "every page came back"


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(FULL, 40), st.integers(1, 4), st.integers(0, 1000))
def test_any_chunks_pages_and_bursts_give_the_same(chunk: int, num_pages: int, burst: int, seed: int) -> None:
    groups = groups_of(seed, count=4)
    decoder = decoder_with(chunk, num_pages=num_pages, burst=burst)
    assert_same(decode_all(decoder, groups), decode_all(decoder_with(0), groups))
    assert decoder.cache_share == 0.0


def test_adapters_are_applied_in_chunks_too() -> None:
    groups = groups_of(3)
    expected = decode_all(decoder_with(0, lora=True), groups)
    assert_same(decode_all(decoder_with(5, lora=True), groups), expected)
    plain = decode_all(decoder_with(5), groups)
    assert any(plain[one].completions != expected[one].completions for one in plain), "the adapters do nothing here"


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_change_while_a_prompt_is_read(recompute: bool) -> None:
    """With `recompute`, all of it is read by the new weights; otherwise what was read stays, as for any other sequence."""
    prompt, new = list(range(1, 23)) + list(range(1, 15)), lively_model(1)

    def changed_after(steps: int, chunk: int) -> CompletionGroup:
        decoder = decoder_with(chunk, recompute=recompute)
        decoder.add(prompt_group(prompt, samples=2, max_new_tokens=MAX_NEW))
        for _ in range(steps):
            assert not decoder.step()
        assert bool(decoder.num_running) == (chunk == 0)
        copy_weights(new, decoder.model)
        decoder.version = 1
        return decode_all(decoder, [])[0]

    found = changed_after(3, chunk=5)
    fresh = decoder_with(0)
    copy_weights(new, fresh.model)
    fresh.version = 1
    by_new_weights = decode_all(fresh, [prompt_group(prompt, samples=2, max_new_tokens=MAX_NEW)])[0]
    assert all(run.version == 1 for one in found.completions for run in one.versions)
    assert (found.completions == by_new_weights.completions) or not recompute
    if not recompute:
        assert found.completions != by_new_weights.completions, "15 tokens were read by the old weights"


def test_running_sequences_are_read_again_in_chunks() -> None:
    groups = groups_of(2)

    def run(chunk: int) -> dict[int, CompletionGroup]:
        decoder = decoder_with(chunk, recompute=True)
        found: dict[int, CompletionGroup] = {}
        for group in groups:
            decoder.add(group)
        for step in range(400):
            found |= {done.ordinal: done for done in decoder.step()}
            if decoder.tokens_sampled > 30 and decoder.version == 0:
                copy_weights(lively_model(1), decoder.model)
                read = recorded(decoder._device, lambda: setattr(decoder, "version", 1))
                assert not chunk or max(map(len, read)) <= chunk
                assert not chunk or any(len(tokens) == chunk for tokens in read), f"nothing long at step {step}"
        assert decoder.idle
        return found

    whole_ones, chunked = run(0), run(5)
    for ordinal, group in whole_ones.items():  # a chunked prompt starts later, so the change meets it earlier
        assert len(chunked[ordinal].completions) == len(group.completions)


def recorded(device: DeviceRunner, action: Callable[[], object]) -> list[list[int]]:
    """Tokens of everything that the device reads meanwhile."""
    read: list[list[int]] = []
    fill, extend = device.fill, device.extend

    def filling(fills: list[Fill]) -> None:
        read.extend(one.tokens for one in fills)
        fill(fills)

    def extending(extensions: list[Extension]) -> None:
        read.extend(one.tokens for one in extensions)
        extend(extensions)

    device.fill, device.extend = filling, extending  # type: ignore[method-assign,assignment]
    action()
    device.fill, device.extend = fill, extend  # type: ignore[method-assign]
    return read


def converse(decoder: ContinuousDecoder, groups: list[PromptGroup]) -> dict[int, CompletionGroup]:
    """A tool with long replies."""
    found: dict[int, CompletionGroup] = {}
    for group in groups:
        decoder.add(group)
    for _ in range(1000):
        if decoder.idle:
            return found
        found |= {done.ordinal: done for done in decoder.step()}
        for turn in decoder.take_turns():
            reply = [(7 * len(turn.given) + at) % 20 + 1 for at in range(min(7, turn.room - 1))]
            decoder.reply(turn.key, reply)
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("num_pages", [FULL, 0])
def test_long_replies_of_tools_are_read_in_chunks_too(num_pages: int) -> None:
    groups, stops = groups_of(1, count=5), (EOS, 3, 4, 5, 6, 7)
    expected = converse(decoder_with(0, eos_ids=stops, max_turns=4), groups)
    assert any(one.given for group in expected.values() for one in group.completions)
    assert_same(converse(decoder_with(3, eos_ids=stops, max_turns=4, num_pages=num_pages), groups), expected)


def test_running_answers_wait_for_at_most_one_chunk() -> None:
    """Several long prompts come while an answer runs: in every burst it gets its token, after at most a chunk."""
    decoder = decoder_with(8)
    decoder.add(prompt_group([1, 2], ordinal=0, samples=1, max_new_tokens=MAX_NEW))
    decoder.step()
    for ordinal in (1, 2):
        decoder.add(prompt_group(list(range(1, 23)), ordinal=ordinal, samples=2, max_new_tokens=2))
    reads = []
    for count in range(2, 8):
        read = recorded(decoder._device, decoder.step)
        reads.append(sum(map(len, read)))
        assert decoder._schedule.running[0].max_count == count
    assert reads == [8, 8, 5, 8, 8, 5]


def test_a_long_prompt_is_read_while_all_slots_are_busy() -> None:
    decoder = decoder_with(8)
    decoder.add(prompt_group([1, 2], ordinal=0, samples=6, max_new_tokens=MAX_NEW))
    decoder.step()
    decoder.add(prompt_group(list(range(1, 23)), ordinal=1, samples=2, max_new_tokens=2))
    for _ in range(3):
        decoder.step()
    assert decoder.num_running == 6
    assert decoder._schedule.next_unread == 5, "the rest is read when it starts"


def test_short_prompts_are_read_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default only prompts of over 4,096 tokens are cut, and up to 512 tokens none ever waits for another."""
    monkeypatch.undo()
    assert GeneratorConfig().prefill_tokens == 4096
    decoder = decoder_with(GeneratorConfig().prefill_tokens)
    for ordinal in range(3):
        decoder.add(prompt_group(list(range(1, 23)), ordinal=ordinal, samples=2))
    admission = decoder._schedule.admit(0, 1)
    assert len(admission.started) == 6 and not admission.extensions
    assert torch.tensor([len(fill.tokens) for fill in admission.fills]).tolist() == [21, 21, 21]
