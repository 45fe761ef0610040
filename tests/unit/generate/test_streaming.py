"""Groups that are streamed, stopped by their own texts, or drawn from their own numbers, beside others that are not."""

from __future__ import annotations

import pytest
from helpers.groups import prompt_group

from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits
from llamarl.generate.llm import LLM
from llamarl.generate.sequences import AS_ALL_OTHERS, GroupOptions, Key
from llamarl.generate.stop_strings import StopStrings
from llamarl.types import CompletionGroup, bytes_to_floats, bytes_to_tokens

LONG, GROUPS, SAMPLES = 36, 4, 2


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu")


def decoder_of(llm: LLM, *, pages: int = 0, burst: int = 0) -> ContinuousDecoder:
    limits = Limits(slots=4, max_prompt_tokens=8, max_new_tokens=LONG, page_tokens=4, num_pages=pages, burst=burst)
    decoder = ContinuousDecoder(llm.model, limits, eos_ids=(), seed=5)
    decoder.version = 0
    return decoder


Streams = dict[Key, list[tuple[int, float, int]]]


def run(
    llm: LLM, decoder: ContinuousDecoder, options: list[GroupOptions]
) -> tuple[dict[int, CompletionGroup], Streams]:
    """What `step` returned, and what was streamed of each completion."""
    prompt = llm.tokenizer.encode("1+2=")
    for ordinal, one in enumerate(options):
        group = prompt_group(prompt, ordinal=ordinal, samples=SAMPLES, max_new_tokens=LONG, temperature=9.0)
        decoder.add(group, one)
    found: dict[int, CompletionGroup] = {}
    streams: Streams = {}
    ended: set[Key] = set()
    while not decoder.idle:
        found |= {group.ordinal: group for group in decoder.step()}
        for news in decoder.take_streamed():
            assert news.key not in ended
            streams.setdefault(news.key, []).extend(zip(*news.sampled, strict=True))
            if news.completion is not None:
                ended.add(news.key)
    assert ended == streams.keys()
    return found, streams


def tokens_of(group: CompletionGroup) -> list[list[int]]:
    return [bytes_to_tokens(one.tokens).tolist() for one in group.completions]


@pytest.mark.parametrize("pages", [0, 24])
@pytest.mark.parametrize("burst", [1, 4])
def test_what_is_streamed_is_what_is_returned(llm: LLM, pages: int, burst: int) -> None:
    """Also where pages run out, and sequences are paused and go on."""
    plain, nothing = run(llm, decoder_of(llm, pages=pages, burst=burst), [AS_ALL_OTHERS] * GROUPS)
    options = [GroupOptions(stream=bool(number % 2)) for number in range(GROUPS)]
    found, streams = run(llm, decoder_of(llm, pages=pages, burst=burst), options)
    assert not nothing and {ordinal for ordinal, _ in streams} == {1, 3}
    for ordinal in range(GROUPS):
        assert tokens_of(found[ordinal]) == tokens_of(plain[ordinal])
        for sample, completion in enumerate(found[ordinal].completions if ordinal % 2 else ()):
            tokens, logprobs, versions = zip(*streams[ordinal, sample], strict=True)
            assert list(tokens) == bytes_to_tokens(completion.tokens).tolist()
            assert list(logprobs) == bytes_to_floats(completion.behavior_logprobs).tolist()
            assert set(versions) == {0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("burst", [1, 4])
def test_a_group_ends_at_its_own_stops_alone(llm: LLM, stream: bool, burst: int) -> None:
    plain, _ = run(llm, decoder_of(llm), [AS_ALL_OTHERS] * GROUPS)
    token = next(one for one in tokens_of(plain[1])[0][LONG // 3 :] if llm.tokenizer.decode([one]))
    text = llm.tokenizer.decode([token])
    stops = [None, StopStrings(llm.tokenizer, [text]), StopStrings(llm.tokenizer, (), [token]), None]
    options = [GroupOptions(stop=stop, stream=stream) for stop in stops]
    found, streams = run(llm, decoder_of(llm, burst=burst), options)
    for ordinal in range(GROUPS):
        for sample, whole in enumerate(tokens_of(plain[ordinal])):
            end = whole.index(token) + 1 if token in whole and stops[ordinal] else len(whole)
            assert tokens_of(found[ordinal])[sample] == whole[:end]
            assert found[ordinal].completions[sample].truncated == (end == len(whole) and whole[-1] != token)
            if stream:
                assert [one for one, _, _ in streams[ordinal, sample]] == whole[:end]
    assert len(tokens_of(found[1])[0]) < LONG


def test_draws_replace_the_ordinal(llm: LLM) -> None:
    plain, _ = run(llm, decoder_of(llm), [AS_ALL_OTHERS] * GROUPS)
    drawn, _ = run(llm, decoder_of(llm), [GroupOptions(draws=number) for number in (2, 2, 10**18, 0)])
    assert tokens_of(drawn[0]) == tokens_of(drawn[1]) == tokens_of(plain[2])
    assert tokens_of(drawn[3]) == tokens_of(plain[0]) != tokens_of(drawn[2])


def test_a_dropped_stream_frees_its_pages(llm: LLM) -> None:
    decoder, prompt = decoder_of(llm), llm.tokenizer.encode("1+2=")
    for ordinal in range(2):
        group = prompt_group(prompt, ordinal=ordinal, samples=SAMPLES, max_new_tokens=LONG, temperature=9.0)
        decoder.add(group, GroupOptions(stream=True))
    decoder.step()
    assert decoder.num_running == 2 * SAMPLES and decoder.cache_share > 0
    for ordinal in range(2):
        decoder.drop(ordinal)
    assert decoder.idle and decoder.num_running == 0 and decoder.cache_share == 0
