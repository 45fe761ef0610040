"""Shared prompts, scarce pages, pausing and reading again change when things happen, never what is sampled."""

from __future__ import annotations

import pytest
import torch
from helpers.decoding import decode_all, random_groups
from helpers.groups import prompt_group
from helpers.models import copy_weights, lively_model
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.errors import ConfigError
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits
from llamarl.generate.pages import PagePool
from llamarl.model.transformer import causal_attention
from llamarl.types import CompletionGroup, PromptGroup, bytes_to_floats

MAX_PROMPT, MAX_NEW = 20, 40
FULL = 16  # pages of 4 tokens for 20 + 40 - 1 tokens, and one more for the prompt that is shared


def decoder_with(slots: int, num_pages: int = 0, *, recompute: bool = False, burst: int = 0) -> ContinuousDecoder:
    limits = Limits(
        slots=slots,
        max_prompt_tokens=MAX_PROMPT,
        max_new_tokens=MAX_NEW,
        page_tokens=4,
        num_pages=num_pages,
        burst=burst,
    )
    decoder = ContinuousDecoder(lively_model(), limits, eos_ids=(), seed=5, recompute=recompute)
    decoder.version = 0
    return decoder


def groups_of(seed: int, count: int = 10) -> list[PromptGroup]:
    return random_groups(seed, count, max_prompt=MAX_PROMPT, max_new=MAX_NEW, max_samples=5)


def same_tokens(found: dict[int, CompletionGroup], expected: dict[int, CompletionGroup]) -> None:
    assert found.keys() == expected.keys()
    for ordinal, group in expected.items():
        for mine, theirs in zip(found[ordinal].completions, group.completions, strict=True):
            assert mine.tokens == theirs.tokens
            assert bytes_to_floats(mine.behavior_logprobs) == pytest.approx(
                bytes_to_floats(theirs.behavior_logprobs), abs=1e-5
            )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_pages", [FULL, FULL + 7, 40, 400])
def test_scarce_pages_pause_sequences_but_lose_and_change_nothing(num_pages: int, seed: int) -> None:
    groups, paused = groups_of(seed), 0
    decoder = decoder_with(16, num_pages)
    pause = decoder._schedule.pause

    def counting(*args: object) -> None:
        nonlocal paused
        paused += 1
        pause(*args)  # type: ignore[arg-type]

    decoder._schedule.pause = counting  # type: ignore[method-assign,assignment]
    same_tokens(decode_all(decoder, groups), decode_all(decoder_with(16), groups))
    assert decoder._schedule.pool.num_free == num_pages, "every page came back"
    assert bool(paused) == (num_pages < 100), "pages were not as scarce as the test means them to be"


def test_a_prompt_is_computed_once_for_all_its_samples() -> None:
    group = prompt_group(list(range(1, 18)), samples=8)
    decoder = decoder_with(8)
    decoder.add(group)
    admission = decoder._schedule.admit(0, 1)
    assert [fill.tokens for fill in admission.fills] == [list(range(1, 17))]
    assert len(admission.started) == 8
    shared = {tuple(running.pages[:4]) for running in admission.started}
    assert len(shared) == 1, "16 tokens are 4 full pages, the same for all"
    own = [running.pages[4] for running in admission.started]
    assert len(set(own)) == 8


def test_samples_of_a_group_start_one_by_one_as_slots_become_free() -> None:
    groups = [prompt_group([3, 1, 4, 1, 5, 9], ordinal=0, samples=7, max_new_tokens=6)]
    same_tokens(decode_all(decoder_with(3), groups), decode_all(decoder_with(16), groups))


@pytest.mark.parametrize("burst", [2, 3, 8])
def test_several_steps_per_visit_give_the_same(burst: int) -> None:
    groups = groups_of(9)
    assert decode_all(decoder_with(16, burst=burst), groups) == decode_all(decoder_with(16), groups)


def test_recomputed_keys_are_those_of_the_new_weights() -> None:
    """After a change, a sequence goes on as if it had been read by the new weights from its first token."""
    old, new = lively_model(0), lively_model(1)
    group = prompt_group([3, 1, 4, 1, 5], samples=3, max_new_tokens=MAX_NEW)
    decoder = decoder_with(8, recompute=True)
    decoder.add(group)
    for _ in range(4):
        assert decoder.step() == []
    copy_weights(new, decoder.model)
    decoder.version = 1
    found = decode_all(decoder, [])[0]
    assert any(len(completion.versions) > 1 for completion in found.completions), "none was under way at the change"
    for completion in found.completions:
        assert [run.version for run in completion.versions][:1] == [0]
        tokens = list(memoryview(completion.tokens).cast("i"))
        for first, last, model in ((0, min(4, len(tokens)), old), (4, len(tokens), new)):
            read = [3, 1, 4, 1, 5, *tokens]
            with torch.no_grad():
                hidden = model(torch.tensor([read]), torch.arange(len(read))[None], causal_attention)[0]
                scores = torch.log_softmax(model.logits(hidden[4:-1]), -1)
            expected = [float(scores[at, tokens[at]]) for at in range(first, last)]
            assert bytes_to_floats(completion.behavior_logprobs)[first:last] == pytest.approx(expected, abs=1e-5)


def test_a_cache_that_cannot_hold_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"generator.kv_pages: 15 pages of 4 tokens cannot hold one sequence of 60"):
        decoder_with(4, FULL - 1)


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    limits = Limits(slots=2, max_prompt_tokens=4, max_new_tokens=4)
    with pytest.raises(ConfigError, match="stop token 23 can never occur"):
        ContinuousDecoder(lively_model(), limits, eos_ids=(23,), seed=0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 7)), max_size=60))
def test_no_page_is_handed_out_twice_or_lost(actions: list[tuple[str, int]]) -> None:
    pool, held = PagePool(12), list[int]()
    for action, number in actions:
        if action == "take" and number <= pool.num_free:
            taken = pool.take(number)
            assert not set(taken) & set(held)
            assert 0 not in taken
            held += taken
        elif held and action == "share":
            pool.share([held[number % len(held)]])
            held.append(held[number % len(held)])
        elif held and action == "release":
            pool.release([held.pop(number % len(held))])
        assert pool.num_free == 12 - len(set(held))
