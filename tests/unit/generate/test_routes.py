"""The generator records which experts computed each token, however it came to be computed."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from helpers.decoding import decode_all, random_groups
from helpers.experts import FORMAT, choices, expert_model, recorded, tokens_of
from helpers.groups import prompt_group
from helpers.models import EOS, copy_weights, lively_model
from msgspec.structs import replace

from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.drafting import Drafter
from llamarl.generate.drafts import DraftChoice
from llamarl.generate.limits import Limits
from llamarl.types import CompletionGroup, PromptGroup

MAX_PROMPT, MAX_NEW = 20, 24


def decoder_with(
    slots: int = 16,
    num_pages: int = 0,
    *,
    recompute: bool = False,
    burst: int = 0,
    prefill_tokens: int = 0,
    eos_ids: tuple[int, ...] = (),
    max_turns: int = 1,
    drafts: int = 0,
    drafter: Drafter | None = None,
) -> ContinuousDecoder:
    limits = Limits(
        slots=slots,
        max_prompt_tokens=MAX_PROMPT,
        max_new_tokens=MAX_NEW,
        page_tokens=4,
        num_pages=num_pages,
        burst=burst,
        prefill_tokens=prefill_tokens,
        parked=slots if max_turns > 1 else 0,
    )
    decoder = ContinuousDecoder(
        expert_model(),
        limits,
        eos_ids=eos_ids,
        seed=5,
        recompute=recompute,
        max_turns=max_turns,
        drafts=DraftChoice(drafts) if drafts else None,
        drafter=drafter,
        record_routes=True,
    )
    decoder.version = 0
    return decoder


def groups_of(seed: int, count: int = 6) -> list[PromptGroup]:
    return random_groups(seed, count, max_prompt=MAX_PROMPT, max_new=MAX_NEW, max_samples=4)


def assert_recorded(found: dict[int, CompletionGroup]) -> None:
    """Every token but the last has the experts that the model chooses when it reads the whole answer."""
    model = expert_model()
    for group in found.values():
        for sample in range(len(group.completions)):
            expected = choices(model, tokens_of(group, sample))[:-1]
            assert np.array_equal(recorded(group, sample), expected)


@pytest.mark.parametrize("num_pages", [0, 13, 20])
def test_prompts_answers_and_paused_sequences_have_the_experts_that_computed_them(num_pages: int) -> None:
    found = decode_all(decoder_with(num_pages=num_pages), groups_of(1))
    assert_recorded(found)
    for group in found.values():
        assert len(group.prompt.routes) == (len(group.prompt.prompt_tokens) // 4 - 1) * FORMAT.row_bytes, "once a group"
        assert not any(one.prompt_routes for one in group.completions)


def test_prompts_in_chunks_and_several_steps_at_once() -> None:
    assert_recorded(decode_all(decoder_with(slots=3, burst=4, prefill_tokens=5), groups_of(2)))


def test_drafts_leave_the_experts_of_accepted_tokens_only() -> None:
    plain = decode_all(decoder_with(slots=40), groups := groups_of(3, 2))
    random = Random(0)

    def drafter(sequence: object, tokens: list[int], most: int) -> list[int]:
        key = sequence.key  # type: ignore[attr-defined]
        answer = tokens_of(plain[key[0]], key[1])[len(groups[key[0]].prompt_tokens) // 4 :]
        right = answer[len(tokens) : len(tokens) + random.randint(0, most)]
        return [*right, 1, 2, 3][:most]

    decoder = decoder_with(slots=40, drafts=4, drafter=drafter)
    found = decode_all(decoder, groups)
    assert decoder.drafting is not None
    assert decoder.drafting.counts.drafted > decoder.drafting.counts.accepted > 0
    assert {key: [one.routes for one in group.completions] for key, group in found.items()} == {
        key: [one.routes for one in group.completions] for key, group in plain.items()
    }
    assert_recorded(found)


def test_replies_of_tools_have_their_experts_too() -> None:
    decoder = decoder_with(eos_ids=(EOS,), max_turns=3)
    for group in groups_of(4):
        decoder.add(replace(group, sampling=replace(group.sampling, max_new_tokens=MAX_NEW)))
    found: dict[int, CompletionGroup] = {}
    while not decoder.idle:
        found |= {done.ordinal: done for done in (decoder.step() if decoder.decoding else [])}
        for sequence in decoder.take_turns():
            decoder.reply(sequence.key, [7, 11, 13])
    assert any(one.given for group in found.values() for one in group.completions)
    assert_recorded(found)


@pytest.mark.parametrize("recompute", [False, True])
def test_each_token_keeps_the_experts_of_the_version_that_sampled_it(recompute: bool) -> None:
    """Also if keys and values are computed again, with other experts: log-probs of sampled tokens are of the first time."""
    old, new = expert_model(0), expert_model(1)
    decoder = decoder_with(recompute=recompute)
    decoder.add(group := prompt_group([3, 1, 4, 1, 5], samples=3, max_new_tokens=MAX_NEW))
    for _ in range(4):
        assert decoder.step() == []
    copy_weights(new, decoder.model)
    decoder.version = 1
    found = decode_all(decoder, [])[0]
    for sample in range(3):
        tokens, routes = tokens_of(found, sample), recorded(found, sample)
        before = len(group.prompt_tokens) // 4 + 3  # states that have predicted the first four tokens
        assert np.array_equal(routes[:before], choices(old, tokens)[:before])
        assert not np.array_equal(routes[before:], choices(old, tokens)[before:-1])
        if recompute:
            assert np.array_equal(routes[before:], choices(new, tokens)[before:-1])


def test_a_sample_whose_prompt_was_read_again_by_other_weights_has_its_own() -> None:
    decoder = decoder_with(slots=1, recompute=True)
    decoder.add(prompt_group([3, 1, 4, 1, 5], samples=2, max_new_tokens=6))
    for _ in range(4):
        decoder.step()
    copy_weights(new := expert_model(1), decoder.model)
    decoder.version = 1
    found = decode_all(decoder, [])[0]
    first, second = found.completions
    assert first.versions[0].version < second.versions[0].version, "the second one began with the new weights"
    assert not first.prompt_routes and second.prompt_routes
    assert np.array_equal(recorded(found, 1), choices(new, tokens_of(found, 1))[:-1])


def test_evaluations_and_dense_models_record_nothing_and_calls_record_all() -> None:
    groups = [replace(group, kind=kind) for group, kind in zip(groups_of(5, 2), ("evaluation", "call"), strict=True)]
    found = decode_all(decoder_with(), groups)
    assert not found[0].prompt.routes and not any(one.routes for one in found[0].completions)
    assert all(one.routes for one in found[1].completions) and not found[1].prompt.routes
    assert_recorded({1: found[1]})
    limits = Limits(slots=2, max_prompt_tokens=4, max_new_tokens=4)
    dense = ContinuousDecoder(lively_model(), limits, eos_ids=(), seed=0, record_routes=True)
    dense.version = 0
    done = decode_all(dense, [prompt_group([1, 2], max_new_tokens=4)])[0]
    assert not done.prompt.routes and not done.completions[0].routes
