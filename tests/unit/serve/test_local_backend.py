"""A model folder behind the backend's interface: the same answers as the library gives, streamed, stopped and cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import TypeVar

import pytest

from llamarl.errors import InputError
from llamarl.generate.llm import LLM
from llamarl.serve.backend import Ask, Piece
from llamarl.serve.local_backend import LocalBackend
from llamarl.serve.refusals import RequestRefused
from llamarl.types import Sampling

PROMPT = "12+34="
WILD = 9.0  # a temperature at which answers differ and are long


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu")


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    found = LocalBackend("tiny", name="tiny", device="cpu", slots=4, max_length=96)
    found.start()
    yield found
    found.close()


Found = TypeVar("Found")


def run(work: Callable[[], Awaitable[Found]]) -> Found:
    async def within() -> Found:
        async with asyncio.timeout(60):
            return await work()

    return asyncio.run(within())


async def answers(backend: LocalBackend, ask: Ask) -> dict[int, Piece]:
    """The pieces of each answer, put together."""
    found: dict[int, Piece] = {}
    nothing = Piece(index=0, tokens=[], logprobs=[], versions=())
    async for piece in backend.ask(ask):
        before = found.get(piece.index, nothing)
        assert before.finish is None, "a piece behind the last one"
        found[piece.index] = Piece(
            index=piece.index,
            tokens=[*before.tokens, *piece.tokens],
            logprobs=[*before.logprobs, *piece.logprobs],
            versions=before.versions + piece.versions,
            finish=piece.finish,
        )
    return found


def ask_of(llm: LLM, **changes: object) -> Ask:
    sampling = Sampling(samples=3, max_new_tokens=40, temperature=WILD)
    return Ask(**{"tokens": llm.tokenizer.encode(PROMPT), "sampling": sampling, "seed": 5, **changes})  # type: ignore[arg-type]


def plain(found: dict[int, Piece]) -> list[tuple[list[int], list[float], str | None]]:
    return [(list(found[n].tokens), list(found[n].logprobs), found[n].finish) for n in sorted(found)]


def test_greedy_answers_are_those_of_the_library(llm: LLM, backend: LocalBackend) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    (said,) = llm.generate([PROMPT], sampling)[0]
    found = run(lambda: answers(backend, ask_of(llm, sampling=sampling)))[0]
    assert (list(found.tokens), found.finish) == (said.tokens, said.finish_reason)
    assert list(found.logprobs) == pytest.approx(said.logprobs, abs=1e-4)
    assert sum(one.count for one in found.versions) == len(said.tokens)


def test_a_stream_has_the_same_tokens_as_the_whole(llm: LLM, backend: LocalBackend) -> None:
    whole = run(lambda: answers(backend, ask_of(llm)))
    streamed = run(lambda: answers(backend, ask_of(llm, stream=True)))
    assert plain(whole) == plain(streamed) and len(whole) == 3
    assert len({tuple(piece.tokens) for piece in whole.values()}) == 3


def test_a_stream_comes_while_it_is_sampled(llm: LLM, backend: LocalBackend) -> None:
    async def first_pieces() -> list[Piece]:
        sampling = Sampling(max_new_tokens=80, temperature=WILD)
        async with aclosing(backend.ask(ask_of(llm, sampling=sampling, stream=True, seed=1))) as pieces:  # type: ignore[type-var]
            return [await anext(pieces) for _ in range(3)]

    assert all(piece.finish is None and len(piece.tokens) < 20 for piece in run(first_pieces)[:2])


def test_a_seed_repeats_the_answer_and_no_seed_does_not(llm: LLM, backend: LocalBackend) -> None:
    async def several() -> list[dict[int, Piece]]:
        seeds = [5, 5, 6, None, None]
        return list(await asyncio.gather(*(answers(backend, ask_of(llm, seed=seed)) for seed in seeds)))

    first, again, other, free, freer = map(plain, run(several))
    assert first == again
    assert first not in (other, free) and free != freer


@pytest.mark.parametrize("stream", [False, True])
def test_each_request_has_its_own_stop_strings_and_tokens(llm: LLM, backend: LocalBackend, stream: bool) -> None:
    many = Sampling(samples=8, max_new_tokens=40, temperature=WILD)
    free = run(lambda: answers(backend, ask_of(llm, sampling=many)))
    longest = max(free.values(), key=lambda piece: len(piece.tokens))
    token = longest.tokens[len(longest.tokens) // 2]
    text = llm.tokenizer.decode([token])

    async def both() -> list[dict[int, Piece]]:
        asks: list[dict[str, object]] = [{"stop": (text, "no such text")}, {"stop_token_ids": (token,)}, {}]
        changed = (ask_of(llm, sampling=many, stream=stream, **one) for one in asks)
        return list(await asyncio.gather(*(answers(backend, ask) for ask in changed)))

    by_text, by_token, again = run(both)
    for index, whole in free.items():
        ends = [place + 1 for place, one in enumerate(whole.tokens) if one == token]
        for found in (by_text, by_token):
            assert list(found[index].tokens) == list(whole.tokens)[: ends[0] if ends else None]
            assert found[index].finish == ("stop" if ends else whole.finish)
    assert plain(again) == plain(free) != plain(by_text)


def test_a_client_that_goes_away_frees_its_slots(llm: LLM, backend: LocalBackend) -> None:
    """With every slot taken by answers that nobody reads any more, the next one is answered at once."""
    long = Sampling(samples=4, max_new_tokens=88, temperature=WILD)

    async def leave_and_ask() -> dict[int, Piece]:
        for _ in range(5):
            async with aclosing(backend.ask(ask_of(llm, sampling=long, stream=True))) as pieces:  # type: ignore[type-var]
                await anext(pieces)
        found = await answers(backend, ask_of(llm, sampling=Sampling(max_new_tokens=1)))
        while backend.stats.running:
            await answers(backend, ask_of(llm, sampling=Sampling(max_new_tokens=1)))
        return found

    assert len(run(leave_and_ask)) == 1
    assert backend.stats.cache_share == 0.0 and not backend._inboxes


def test_many_more_requests_than_slots_are_all_answered(llm: LLM, backend: LocalBackend) -> None:
    async def crowd() -> list[dict[int, Piece]]:
        asks = (ask_of(llm, seed=seed, stream=bool(seed % 2)) for seed in range(24))
        return list(await asyncio.gather(*(answers(backend, ask) for ask in asks)))

    found = run(crowd)
    assert all(len(one) == 3 and all(piece.finish for piece in one.values()) for one in found)
    assert plain(found[7]) == plain(run(lambda: answers(backend, ask_of(llm, seed=7))))


def test_scores_are_the_log_probs_of_sampling(llm: LLM, backend: LocalBackend) -> None:
    said = run(lambda: answers(backend, ask_of(llm, sampling=Sampling(max_new_tokens=20, temperature=1.0))))[0]
    prompt = llm.tokenizer.encode(PROMPT)
    scores = run(lambda: backend.score([*prompt, *said.tokens], 3))
    behind = len(prompt) - 1
    assert list(scores.logprobs[behind:]) == pytest.approx(list(said.logprobs), abs=1e-4)
    for logprob, rank, top in zip(scores.logprobs, scores.ranks, scores.top, strict=True):
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert (rank == 1) == (logprob == top[0][1])


def test_what_can_never_be_decoded_is_refused(llm: LLM, backend: LocalBackend) -> None:
    with pytest.raises(RequestRefused, match="at most 96"):
        run(lambda: answers(backend, ask_of(llm, sampling=Sampling(max_new_tokens=94))))


def test_a_request_larger_than_the_socket_takes_at_once_arrives_whole(llm: LLM, backend: LocalBackend) -> None:
    refused = ask_of(llm, tokens=[1] * 400_000)

    async def large_and_small() -> dict[int, Piece]:
        large = asyncio.ensure_future(answers(backend, refused))
        found = await answers(backend, ask_of(llm))
        with pytest.raises(RequestRefused, match=r"400,?000"):
            await large
        return found

    assert len(run(large_and_small)) == 3


def test_a_decoder_that_dies_refuses_all_and_is_told(llm: LLM) -> None:
    told: list[bool] = []
    found = LocalBackend("tiny", name="tiny", device="cpu", slots=4, max_length=96)
    found.on_failure = lambda: told.append(True)
    found.start()

    async def kill_while_it_answers() -> None:
        long = Sampling(samples=4, max_new_tokens=88, temperature=WILD)
        async for _ in found.ask(ask_of(llm, sampling=long, stream=True)):
            assert found._process is not None
            found._process.kill()

    for _ in range(2):
        with pytest.raises(RequestRefused, match="does not answer any more"):
            run(kill_while_it_answers)
    assert told == [True] and found.failure == "its process was killed by SIGKILL"
    found.close()


def test_what_it_cannot_load_is_told_by_the_start() -> None:
    found = LocalBackend("tiny", name="tiny", device="cuda:99")
    with pytest.raises(InputError, match="cuda:99: cannot be used here"):
        found.start()


def test_an_error_of_the_decoder_is_told_before_its_process_ends(llm: LLM) -> None:
    """A token that is not in the vocabulary is refused before it gets here; on a GPU it would break the device's context."""
    found = LocalBackend("tiny", name="tiny", device="cpu", slots=4, max_length=96)
    found.start()
    with pytest.raises(RequestRefused, match="does not answer any more"):
        run(lambda: found.score([1, 10**6], 1))
    assert "IndexError" in found.failure
    found.close()
