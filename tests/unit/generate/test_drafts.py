"""Drafts change how many steps an answer takes, never a bit of it: whatever is drafted, and whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from helpers.decoding import decode_all
from helpers.groups import prompt_group
from helpers.lora import put_adapters, random_adapters
from helpers.models import EOS, SHAPE, VOCABULARY, copy_weights, lively_model
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llamarl.config import LoraConfig
from llamarl.generate import drafting
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.drafting import Drafter, SiblingDrafts
from llamarl.generate.drafts import _TRIAL, _UNTIL_NEXT_TRIAL, DraftChoice, SuffixIndex
from llamarl.generate.limits import Limits
from llamarl.generate.sequences import GroupOptions, Sequence
from llamarl.layout.boxes import whole
from llamarl.model.lora import Adapters
from llamarl.model.lora_serving import serve_adapters
from llamarl.model.transformer import Transformer
from llamarl.types import CompletionGroup, PromptGroup, bytes_to_tokens

MAX_PROMPT, MAX_NEW, SLOTS = 12, 24, 24
LORA = LoraConfig(rank=3, alpha=6.0)


def with_adapters(model: Transformer) -> Adapters:
    return serve_adapters(model, LORA, lambda parameter: parameter.shape)


def decoder_with(
    draft: int = 0,
    drafter: Drafter | None = None,
    *,
    num_pages: int = 0,
    recompute: bool = False,
    lora: bool = False,
    burst: int = 0,
    max_turns: int = 1,
    eos_ids: tuple[int, ...] = (EOS,),
) -> ContinuousDecoder:
    limits = Limits(
        slots=SLOTS,
        max_prompt_tokens=MAX_PROMPT,
        max_new_tokens=MAX_NEW,
        page_tokens=4,
        num_pages=num_pages,
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
        drafts=DraftChoice(draft),
        drafter=drafter,
    )
    if lora:
        put_adapters(decoder.model, random_adapters(LORA, SHAPE), lambda parameter: whole(parameter.shape))
    decoder.version = 0
    return decoder


def groups_of(seed: int, count: int = 3, **sampling: float) -> list[PromptGroup]:
    random = Random(seed)
    return [
        prompt_group(
            [random.randrange(1, VOCABULARY) for _ in range(random.randint(1, MAX_PROMPT))],
            ordinal=ordinal,
            samples=random.randint(1, 3),
            max_new_tokens=random.randint(1, MAX_NEW),
            temperature=sampling.get("temperature", random.choice([0.0, 1.0])),
            **{name: value for name, value in sampling.items() if name != "temperature"},
        )
        for ordinal in range(count)
    ]


def oracle(expected: dict[int, CompletionGroup], right: float, seed: int = 0) -> Drafter:
    """Knows the answers, and lies about some tokens."""
    chance = Random(seed)

    def draft(sequence: Sequence, tokens: list[int], most: int) -> list[int]:
        group = expected[sequence.group.prompt.ordinal]
        answer = bytes_to_tokens(group.completions[sequence.sample].tokens).tolist()
        coming = answer[len(tokens) : len(tokens) + most]
        return [token if chance.random() < right else chance.randrange(VOCABULARY) for token in coming]

    return draft


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(1, 9),
    st.lists(st.lists(st.integers(-3, VOCABULARY + 2), max_size=12), min_size=1, max_size=8),
)
def test_hostile_drafts_change_nothing(seed: int, draft: int, drafts: list[list[int]]) -> None:
    """Also drafts that are too long, and tokens that no model has."""
    groups = groups_of(seed)
    turn = iter(range(10**6))
    decoder = decoder_with(draft, lambda *_: drafts[next(turn) % len(drafts)])
    assert decode_all(decoder, groups) == decode_all(decoder_with(), groups)
    assert decoder.cache_share == 0.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(1, 3))
def test_drafts_that_are_partly_right_change_nothing(seed: int, draft: int, right: float, burst: int) -> None:
    groups = groups_of(seed)
    expected = decode_all(decoder_with(), groups)
    decoder = decoder_with(draft, oracle(expected, right, seed), burst=burst)
    assert decode_all(decoder, groups) == expected


def test_right_drafts_save_steps() -> None:
    groups = [prompt_group([3, 1, 4], samples=2, max_new_tokens=MAX_NEW)]
    expected = decode_all(decoder_with(eos_ids=()), groups)
    decoder = decoder_with(7, oracle(expected, 1.0), eos_ids=())
    assert decode_all(decoder, groups) == expected
    assert decoder._device.num_bursts == 4, "the first token, then eight at once"
    assert decoder.drafting is not None
    counts = decoder.drafting.take_counts()
    assert counts.drafted == counts.accepted == 2 * (MAX_NEW - 4)
    assert decoder.drafting.take_counts() == (0, 0)


def test_siblings_with_the_same_answer_guess_each_other() -> None:
    """Greedy answers to one prompt are the same; one that starts later is drafted from one that has ended."""
    groups = [
        prompt_group([3, 1, 4, 1, 5], ordinal=0, samples=1, max_new_tokens=MAX_NEW, temperature=0.0),
        prompt_group([9, 2, 6], ordinal=1, samples=4, max_new_tokens=MAX_NEW, temperature=0.0),
    ]
    decoder = decoder_with(4, eos_ids=())
    assert decode_all(decoder, groups) == decode_all(decoder_with(eos_ids=()), groups)
    assert decoder.drafting is not None
    counts = decoder.drafting.counts
    assert counts.accepted > 0.3 * counts.drafted > 0
    assert not decoder.drafting._known


def test_an_evaluation_is_drafted_from_the_one_before() -> None:
    """Greedy answers to the same problems: with the same weights all drafts are right."""

    def rounds(decoder: ContinuousDecoder) -> dict[int, CompletionGroup]:
        found: dict[int, CompletionGroup] = {}
        for number in range(2):
            asked = [
                replace(prompt_group([3 + at, 1, 4 + at], ordinal=10 * number + at, temperature=0.0), kind="evaluation")
                for at in range(3)
            ]
            asked = [replace(one, sampling=replace(one.sampling, samples=1, max_new_tokens=MAX_NEW)) for one in asked]
            found |= decode_all(decoder, asked)
        return found

    decoder = decoder_with(6, eos_ids=())
    assert rounds(decoder) == rounds(decoder_with(eos_ids=()))
    assert decoder.drafting is not None
    drafts = decoder.drafting._drafter
    assert isinstance(drafts, SiblingDrafts) and not drafts._groups
    assert decoder.drafting.counts.accepted > 3 * MAX_NEW // 2
    assert drafts._num_earlier == sum(one.num_tokens for one in drafts._earlier.values()) > 0


def test_earlier_answers_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "_MOST_EARLIER", 100)
    decoder = decoder_with(3, eos_ids=())
    for ordinal in range(6):
        decode_all(decoder, [prompt_group([ordinal + 1, 2, 3], ordinal=ordinal, samples=2, max_new_tokens=16)])
    assert decoder.drafting is not None
    drafts = decoder.drafting._drafter
    assert isinstance(drafts, SiblingDrafts)
    assert 0 < sum(one.num_tokens for one in drafts._earlier.values()) == drafts._num_earlier <= 100


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_filters_hold_for_drafts_too(filters: dict[str, float]) -> None:
    groups = groups_of(4, 3, temperature=1.0, **filters)
    expected = decode_all(decoder_with(), groups)
    assert decode_all(decoder_with(5, oracle(expected, 0.8)), groups) == expected


@pytest.mark.parametrize("num_pages", [10, 14])
def test_scarce_pages_only_cost_drafts(num_pages: int) -> None:
    groups = groups_of(6, count=5)
    expected = decode_all(decoder_with(), groups)
    decoder = decoder_with(5, oracle(expected, 0.8), num_pages=num_pages)
    found = decode_all(decoder, groups)
    assert {one: group.completions for one, group in found.items()}.keys() == expected.keys()
    for ordinal, group in expected.items():  # a sequence that was paused is read again, which rounds differently
        for mine, theirs in zip(found[ordinal].completions, group.completions, strict=True):
            assert mine.tokens == theirs.tokens
    assert decoder.cache_share == 0.0


def test_adapters_are_applied_to_drafts_too() -> None:
    groups = groups_of(3)
    expected = decode_all(decoder_with(lora=True), groups)
    assert decode_all(decoder_with(5, oracle(expected, 0.8), lora=True), groups) == expected


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_between_drafted_steps(recompute: bool) -> None:
    """Version 1 comes when an answer has so many tokens, with drafts and without."""
    group = prompt_group([3, 1, 4, 1, 5], samples=1, max_new_tokens=MAX_NEW)

    def run(decoder: ContinuousDecoder, change_at: Callable[[], bool]) -> CompletionGroup:
        decoder.add(group)
        found: list[CompletionGroup] = []
        while not found:
            found += decoder.step()
            if decoder.version == 0 and change_at():
                copy_weights(lively_model(1), decoder.model)
                decoder.version = 1
        return found[0]

    plain = decoder_with(eos_ids=(), recompute=recompute)
    expected = run(plain, lambda: plain.tokens_sampled == 9)
    drafted = decoder_with(3, oracle({0: expected}, 1.0), eos_ids=(), recompute=recompute)
    found = run(drafted, lambda: drafted.tokens_sampled == 9)
    assert drafted.drafting is not None and drafted.drafting.counts.accepted
    assert found == expected
    assert [run.version for run in found.completions[0].versions] == [0, 1]


def converse(decoder: ContinuousDecoder, groups: list[PromptGroup]) -> dict[int, CompletionGroup]:
    found: dict[int, CompletionGroup] = {}
    for group in groups:
        decoder.add(group)
    for _ in range(1000):
        if decoder.idle:
            return found
        found |= {done.ordinal: done for done in decoder.step()}
        for turn in decoder.take_turns():
            decoder.reply(turn.key, [(7 * len(turn.given) + at) % 20 + 1 for at in range(min(4, turn.room - 1))])
    raise AssertionError("it does not come to an end")


def test_turns_of_a_conversation_end_in_the_middle_of_a_draft() -> None:
    groups, stops = groups_of(1), (EOS, 3, 4, 5, 6, 7)
    expected = converse(decoder_with(eos_ids=stops, max_turns=4), groups)
    assert any(one.given for group in expected.values() for one in group.completions)
    decoder = decoder_with(6, oracle(expected, 0.9), eos_ids=stops, max_turns=4)
    assert converse(decoder, groups) == expected
    assert decoder.drafting is not None and decoder.drafting.counts.accepted


def test_streamed_answers_come_in_order_and_whole() -> None:
    group = prompt_group([3, 1, 4], samples=2, max_new_tokens=MAX_NEW)
    expected = decode_all(decoder_with(), [group])
    decoder = decoder_with(4, oracle(expected, 0.8))
    decoder.add(group, GroupOptions(stream=True))
    told: dict[int, list[int]] = {0: [], 1: []}
    while not decoder.idle:
        decoder.step()
        for streamed in decoder.take_streamed():
            told[streamed.key[1]] += streamed.sampled.tokens
    for sample, completion in enumerate(expected[0].completions):
        assert told[sample] == bytes_to_tokens(completion.tokens).tolist()


def test_with_many_sequences_nothing_is_drafted() -> None:
    groups = [prompt_group([1 + at, 2], ordinal=at, samples=1, max_new_tokens=4) for at in range(SLOTS // 2 + 1)]

    def never(*_: object) -> list[int]:
        raise AssertionError("there are too few free slots for copies")

    decoder = decoder_with(4, never, eos_ids=())
    assert len(decode_all(decoder, groups)) == len(groups)


def test_a_dropped_group_is_forgotten() -> None:
    decoder = decoder_with(4, eos_ids=())
    decoder.add(prompt_group([1, 2, 3], samples=2, max_new_tokens=MAX_NEW))
    for _ in range(4):
        decoder.step()
    decoder.drop(0)
    assert decoder.idle and decoder.cache_share == 0.0
    assert decoder.drafting is not None and not decoder.drafting._known


def test_a_draft_is_what_followed_the_longest_common_run() -> None:
    index = SuffixIndex()
    first, second, third, last = ((0, sample) for sample in range(4))
    index.extend(first, [1, 2, 3, 4, 5, 6, 7])
    index.extend(second, [9, 2, 3, 4, 8])
    index.extend(third, [1, 2, 3, 4])
    assert index.draft(third, 2) == [5, 6], "four tokens are the same as in the first, three as in the second"
    assert index.draft(third, 9) == [5, 6, 7]
    index.extend(third, [8])
    assert index.draft(third, 3) == [], "nothing ever followed that"
    index.extend(last, [5])
    assert index.draft(last, 3) == []
    index.catch_up(last, [5, 2, 3, 4], 0)
    assert index.draft(last, 1) == [8], "of places with as much in common, the newest that goes on"


class Watch:
    """A clock that is moved by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("drafted_s", "expected"), [(1.5, True), (4.0, False)])
def test_auto_drafts_where_it_pays(drafted_s: float, expected: bool) -> None:
    """A plain step gives one token in a second, a drafted one three in `drafted_s`."""
    watch = Watch()
    choice = DraftChoice("auto", watch)
    made = []
    for _ in range(_UNTIL_NEXT_TRIAL + 4 * _TRIAL):
        drafted = choice.begin()
        made.append(drafted)
        watch.now_s += drafted_s if drafted else 1.0
        choice.end(drafted=drafted, tokens=3 if drafted else 1)
    assert made[:_TRIAL] == [True] * _TRIAL and made[_TRIAL : 2 * _TRIAL] == [False] * _TRIAL
    assert set(made[2 * _TRIAL : _UNTIL_NEXT_TRIAL]) == {expected}
    assert made[_UNTIL_NEXT_TRIAL : _UNTIL_NEXT_TRIAL + _TRIAL] == [not expected] * _TRIAL, "what was slower, again"
    assert set(made[_UNTIL_NEXT_TRIAL + _TRIAL :]) == {expected}
