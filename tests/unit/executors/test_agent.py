"""The executor that runs agents: sessions become groups, failures are tried again, and calls go out and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from helpers.chat_tokenizer import chat_tokenizer

from llamarl import messages as msg
from llamarl.config import AgentConfig
from llamarl.executors.agent import Agents
from llamarl.serve.backend import Ask
from llamarl.serve.call_backend import CallBackend, CallLimits
from llamarl.serve.errors_json import openai_error
from llamarl.serve.refusals import RequestRefused
from llamarl.serve.session import Answered
from llamarl.serve.session_access import SessionAccess
from llamarl.tasks.agents.client import TOO_LONG, AgentClient
from llamarl.tasks.workers.protocol import Verdict
from llamarl.types import (
    Completion,
    Given,
    Problem,
    PromptGroup,
    RolloutGroup,
    Sampling,
    VersionRun,
    bytes_to_tokens,
    floats_to_bytes,
    tokens_to_bytes,
)

TOKENIZER = chat_tokenizer()
OK = Verdict("ok", (1.0,))


class Endpoint:
    """An endpoint without a network."""

    url = "http://nowhere"

    def __init__(self, max_calls: int = 9) -> None:
        self.backend = CallBackend(TOKENIZER, "m", CallLimits(max_prompt_tokens=8, max_new_tokens=4))
        self.access = SessionAccess(TOKENIZER, max_calls=max_calls)


class Runner:
    """Agents that end when the test says so."""

    def __init__(self) -> None:
        self.started: list[tuple[Hashable, AgentClient]] = []
        self.ended: list[tuple[Hashable, Verdict]] = []

    def start(self, keys: Sequence[Hashable], problem: Problem, clients: Sequence[AgentClient]) -> None:
        self.started += zip(keys, clients, strict=True)

    def collect(self, wait_s: float) -> list[tuple[Hashable, Verdict]]:
        ended, self.ended = self.ended, []
        return ended

    def end(self, number: int, verdict: Verdict = OK) -> None:
        self.ended.append((self.started[number][0], verdict))


class Server:
    """An environment server that is up when the test says so."""

    def __init__(self) -> None:
        self.is_up, self.failure, self.notes = True, "", list[str]()

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes


def make(server: Server | None = None, **settings: Any) -> tuple[Agents, Endpoint, Runner]:
    endpoint, runner = Endpoint(), Runner()
    config = AgentConfig(run="a.py:b", **settings)
    agents = Agents(endpoint, runner, config, log=lambda text: None, server=server)  # type: ignore[arg-type]
    agents.handle(msg.WorkOnGroup(PromptGroup(5, Problem("q", "a"), b"", Sampling(samples=2, max_new_tokens=4))))
    return agents, endpoint, runner


def answer(endpoint: Endpoint, runner: Runner, number: int, prompt: list[int], tokens: list[int]) -> None:
    session = endpoint.access.session(runner.started[number][1].api_key, {})
    session.record(
        Answered(
            prompt_tokens=prompt,
            index=0,
            tokens=tokens,
            logprobs=[-1.0] * len(tokens),
            versions=(VersionRun(3, len(tokens)),),
            finish="stop",
        )
    )


def test_sessions_become_a_group_of_branches() -> None:
    agents, endpoint, runner = make()
    answer(endpoint, runner, 0, [1, 2], [3])
    answer(endpoint, runner, 0, [1, 2, 3, 4], [5])
    answer(endpoint, runner, 1, [1, 2], [6])
    answer(endpoint, runner, 1, [1, 7], [8])
    runner.end(1, Verdict("ok", (0.5,), parts={"steps": 2.0}))
    assert list(agents.work()) == []
    runner.end(0)
    result, counted = agents.work()
    assert isinstance(result, msg.GroupResult) and isinstance(result.group, RolloutGroup)
    group = result.group
    assert bytes_to_tokens(group.prompt.prompt_tokens).tolist() == [1]
    told = [
        (bytes_to_tokens(one.completion.tokens).tolist(), one.completion.given, one.completion.sample, one.reward)
        for one in group.rollouts
    ]
    assert told == [
        ([2, 3, 4, 5], (Given(0, 1), Given(2, 1)), 0, 1.0),
        ([2, 6], (Given(0, 1),), 1, 0.5),
        ([7, 8], (Given(0, 1),), 1, 0.5),
    ]
    assert group.rewards == (1.0, 0.5)
    assert counted == msg.AgentsCounted(sessions=2, branches=3)
    assert agents.idle


def test_a_failed_agent_is_tried_again_in_a_new_session_then_its_group_is_dropped() -> None:
    agents, endpoint, runner = make(retries=1)
    answer(endpoint, runner, 0, [1], [2])
    runner.end(0, Verdict("error", reason="agent failed: lost"))
    reports = list(agents.work())
    assert msg.AgentsCounted(failures=1) in reports and msg.Noted("agent failed: lost") in reports
    assert [key[:2] for key, _ in runner.started] == [(5, 0), (5, 1), (5, 0)]  # type: ignore[index]
    with pytest.raises(RequestRefused, match="of a session that has ended"):
        endpoint.access.session(runner.started[0][1].api_key, {})
    runner.end(2, Verdict("timeout", reason="took too long"))
    reports = list(agents.work())
    assert msg.GroupRefused(5, "agent took too long") in reports and msg.AgentsCounted(timeouts=1) in reports
    with pytest.raises(RequestRefused):
        endpoint.access.session(runner.started[1][1].api_key, {})
    runner.end(1)  # of the group that was given up
    assert list(agents.work()) == [] and agents.idle


def test_agents_without_calls_or_rewards_have_failed() -> None:
    agents, endpoint, runner = make(retries=0)
    runner.end(0)
    assert msg.GroupRefused(5, "agent made no call that was answered") in list(agents.work())
    agents, endpoint, runner = make(retries=0)
    answer(endpoint, runner, 0, [1], [2])
    runner.end(0, Verdict("ok"))
    (told,) = [report.reason for report in agents.work() if isinstance(report, msg.GroupRefused)]
    assert told.startswith("agent gave no reward")


async def pieces(endpoint: Endpoint, ask: Ask) -> list[Any]:
    return [piece async for piece in endpoint.backend.ask(ask)]


def test_requests_become_calls_with_the_sampling_of_the_job() -> None:
    agents, endpoint, runner = make()

    async def talk() -> list[Any]:
        endpoint.access.session(runner.started[0][1].api_key, {})
        asked = asyncio.create_task(
            pieces(
                endpoint,
                Ask(tokens=[1, 2], sampling=Sampling(samples=2, max_new_tokens=99, temperature=0.0), stop=("x",)),
            )
        )
        await asyncio.sleep(0)
        (call,) = endpoint.backend.take()
        assert isinstance(call, msg.CallRequested)
        assert (call.ordinal, call.sampling, call.stop) == (5, Sampling(samples=2, max_new_tokens=4), ("x",))
        done = Completion(tokens_to_bytes([7]), floats_to_bytes([-0.5]), (VersionRun(4, 1),), truncated=True)
        list(agents.handle(msg.CallAnswered(call.number, (done, done))))
        return await asked

    told = asyncio.run(talk())
    assert [(piece.index, list(piece.tokens), piece.finish) for piece in told] == [
        (0, [7], "length"),
        (1, [7], "length"),
    ]
    assert endpoint.backend.version == 4


def test_requests_of_several_sessions_at_once_stay_apart() -> None:
    _, endpoint, runner = make()
    other = endpoint.access.open(6, Sampling(max_new_tokens=2, temperature=0.5))

    async def ask(key: str, token: int) -> None:
        endpoint.access.session(key, {})
        await asyncio.sleep(0)
        await pieces(endpoint, Ask(tokens=[token], sampling=Sampling()))

    async def talk() -> dict[int, tuple[int, float]]:
        keys = [runner.started[0][1].api_key, other] * 4
        asked = [asyncio.create_task(ask(key, number)) for number, key in enumerate(keys)]
        while endpoint.backend.num_waiting < len(keys):
            await asyncio.sleep(0)
        calls = endpoint.backend.take()
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)
        assert all(isinstance(call, msg.CallRequested) for call in calls)
        return {
            int(bytes_to_tokens(call.prompt_tokens)[0]): (call.ordinal, call.sampling.temperature)
            for call in calls
            if isinstance(call, msg.CallRequested)
        }

    found = asyncio.run(talk())
    assert found == {number: (6, 0.5) if number % 2 else (5, 1.0) for number in range(8)}


def test_a_request_that_is_cancelled_ends_its_call() -> None:
    _, endpoint, runner = make()

    async def talk() -> None:
        endpoint.access.session(runner.started[0][1].api_key, {})
        asked = asyncio.create_task(pieces(endpoint, Ask(tokens=[1], sampling=Sampling())))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])

    asyncio.run(talk())
    assert [type(one) for one in endpoint.backend.take()] == [msg.CallRequested, msg.CallDropped]


def test_long_prompts_and_refused_calls_are_told_to_the_client() -> None:
    agents, endpoint, runner = make()

    async def talk(tokens: list[int]) -> None:
        endpoint.access.session(runner.started[0][1].api_key, {})
        asked = asyncio.create_task(pieces(endpoint, Ask(tokens=tokens, sampling=Sampling())))
        await asyncio.sleep(0)
        for call in endpoint.backend.take():
            list(agents.handle(msg.CallRefused(call.number, "3 replicas died")))
        await asked

    with pytest.raises(RequestRefused, match="max_prompt_tokens=8"):
        asyncio.run(talk([1] * 9))
    with pytest.raises(RequestRefused, match="3 replicas died"):
        asyncio.run(talk([1]))


def test_a_prompt_that_is_too_long_has_the_code_that_clients_know() -> None:
    _, endpoint, runner = make()
    endpoint.access.session(runner.started[0][1].api_key, {})
    with pytest.raises(RequestRefused) as refused:
        asyncio.run(pieces(endpoint, Ask(tokens=[1] * 9, sampling=Sampling())))
    assert openai_error(refused.value)["error"]["code"] == TOO_LONG


def play(endpoint: Endpoint, runner: Runner, number: int, player: int, tokens: list[int], reward: float | None) -> None:
    client = runner.started[number][1].player(player)
    session = endpoint.access.session(client.api_key, {})
    versions = (VersionRun(3, len(tokens)),)
    logprobs = [-1.0] * len(tokens)
    session.record(
        Answered(prompt_tokens=[1], index=0, tokens=tokens, logprobs=logprobs, versions=versions, finish="stop")
    )
    if reward is not None:
        session.add_reward(reward)


def test_players_of_a_sample_have_sessions_and_rewards_of_their_own() -> None:
    agents, endpoint, runner = make()
    for number in range(2):
        play(endpoint, runner, number, 1, [2, 3], 0.25 * number)  # the second player wrote first
        play(endpoint, runner, number, 0, [2], None)
        runner.end(number, Verdict("ok", (1.0 - number,)))
    result, counted = agents.work()
    assert isinstance(result, msg.GroupResult) and isinstance(result.group, RolloutGroup)
    told = [(one.completion.sample, one.completion.player, one.reward) for one in result.group.rollouts]
    assert told == [(0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.0), (1, 1, 0.25)]
    # The same tokens in two sessions are no branch of each other: both are trained.
    assert [one.completion.num_tokens for one in result.group.rollouts] == [1, 2, 1, 2]
    assert result.group.rewards == (1.0, 0.0)
    assert counted == msg.AgentsCounted(sessions=4, branches=4)


def test_keys_of_players_end_with_their_sample() -> None:
    agents, endpoint, runner = make(retries=0)
    client = runner.started[0][1]
    assert endpoint.access.session(client.player(1).api_key, {}) is endpoint.access.session(f"{client.api_key}.1", {})
    assert client.player(1).player(0) == client
    for wrong in (".", ".x", ".01", ".100", ".-1", ".1.1"):
        with pytest.raises(RequestRefused, match="key is missing"):
            endpoint.access.session(client.api_key + wrong, {})
    runner.end(0, Verdict("error", reason="lost"))
    list(agents.work())
    for player in (0, 1):
        with pytest.raises(RequestRefused, match="of a session that has ended"):
            endpoint.access.session(client.player(player).api_key, {})


def test_a_scorer_cannot_judge_several_players() -> None:
    agents, endpoint, runner = make(retries=0, reward="scorer")
    for player in (0, 1):
        play(endpoint, runner, 0, player, [2], None)
    runner.end(0)
    (told,) = [report.reason for report in agents.work() if isinstance(report, msg.GroupRefused)]
    assert told.startswith("agent played several sides")


def test_nothing_is_started_while_the_environment_server_is_down_and_nobody_waits_for_it() -> None:
    server = Server()
    agents, _, runner = make(server, retries=1)
    server.is_up, server.notes = False, ["the environment server has died; it is started again"]
    runner.end(0, Verdict("error", reason="agent lost the environment server"))
    reports = list(agents.work())
    assert msg.AgentsCounted(restarts=1) in reports and msg.AgentsCounted(failures=1) in reports
    assert msg.Noted("the environment server has died; it is started again") in reports
    agents.handle(msg.WorkOnGroup(PromptGroup(6, Problem("q", "a"), b"", Sampling(samples=1, max_new_tokens=4))))
    assert len(runner.started) == 2 and not list(agents.work())
    server.is_up = True
    assert not list(agents.work())
    assert [key[:2] for key, _ in runner.started[2:]] == [(5, 0), (6, 0)]  # type: ignore[index]
    assert not list(agents.work()) and len(runner.started) == 4


def test_what_was_held_back_is_not_started_for_a_group_that_was_given_up() -> None:
    server = Server()
    agents, _, runner = make(server, retries=1)
    runner.end(0, Verdict("error", reason="agent failed"))
    list(agents.work())
    server.is_up = False
    runner.end(1, Verdict("error", reason="agent lost the environment server"))
    list(agents.work())
    assert len(runner.started) == 3
    runner.end(2, Verdict("error", reason="agent lost the environment server"))
    assert msg.GroupRefused(5, "agent lost the environment server") in list(agents.work())
    server.is_up = True
    list(agents.work())
    assert len(runner.started) == 3
    assert agents.idle


def test_an_environment_server_that_cannot_be_started_again_stops_the_job() -> None:
    server = Server()
    agents, _, _ = make(server)
    server.is_up, server.failure = False, "task.env: the server of sums does not start: no memory"
    assert msg.MustStop(server.failure) in list(agents.work())
