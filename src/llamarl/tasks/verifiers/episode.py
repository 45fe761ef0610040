"""An episode as an environment server tells it: frames in, checked claims and a reward out. Nothing is believed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Struct

from llamarl.tasks.agents.calling import AgentFailed
from llamarl.types import ClaimedAnswer, floats_to_bytes, tokens_to_bytes

_MAX_SAID = 300
_MAX_ID = 2**31 - 1


class WireNode(Struct, frozen=True):
    """A message, with the tokens that it adds to those of its parent."""

    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []  # which of them the model has sampled
    logprobs: list[float] = []  # of these


class WireReward(Struct, frozen=True):
    score: float
    weight: float = 1.0


class WireError(Struct, frozen=True):
    type: str = ""
    message: str = ""


class WireAgent(Struct, frozen=True):
    name: str = "agent"
    trainable: bool = True


class WireChanges(Struct, frozen=True):
    """Values of a trace that have changed."""

    agent: WireAgent | None = None
    rewards: dict[str, WireReward | None] | None = None
    ok: bool | None = None


class WireDelta(Struct, frozen=True):
    """What is new of one trace."""

    trace: str
    discard: bool = False
    nodes: list[WireNode] = []
    calls: list[Any] = []
    errors: list[WireError] = []
    set: WireChanges = WireChanges()


class WireSummary(Struct, frozen=True):
    id: str
    nodes: int
    calls: int


class WireHead(Struct, frozen=True):
    ok: bool = False
    errors: list[WireError] = []


class WireReply(Struct, frozen=True):
    """The last frame of a run."""

    success: bool
    error: str | None = None
    head: WireHead | None = None
    traces: list[WireSummary] = []


_decode_delta = msgspec.msgpack.Decoder(WireDelta).decode
_decode_reply = msgspec.msgpack.Decoder(WireReply).decode


class _TraceSoFar:
    def __init__(self) -> None:
        self.nodes: list[WireNode] = []
        self.num_calls = 0
        self.errors: list[WireError] = []
        self.agent = WireAgent()
        self.rewards: dict[str, WireReward | None] = {}
        self.ok = False

    def apply(self, delta: WireDelta) -> None:
        self.nodes += delta.nodes
        self.num_calls += len(delta.calls)
        self.errors += delta.errors
        self.agent = delta.set.agent or self.agent
        self.rewards = self.rewards if delta.set.rewards is None else delta.set.rewards
        self.ok = self.ok if delta.set.ok is None else delta.set.ok


class EpisodeResult(Struct, frozen=True):
    """What an episode was worth, and which answers it claims to consist of."""

    reward: float
    parts: dict[str, float]
    claims: tuple[ClaimedAnswer, ...]


class EpisodeReader:
    """Takes the frames of one run. Raises AgentFailed for frames that cannot be read, and for episodes that failed."""

    def __init__(self) -> None:
        self._traces: dict[str, _TraceSoFar] = {}

    def delta(self, data: bytes) -> None:
        delta = _decoded(_decode_delta, data)
        if delta.discard:
            self._traces.pop(delta.trace, None)
        else:
            self._traces.setdefault(delta.trace, _TraceSoFar()).apply(delta)

    def finish(self, data: bytes) -> EpisodeResult:
        reply = _decoded(_decode_reply, data)
        if not reply.success:
            raise AgentFailed(f"was refused by the environment server: {_one_line(reply.error or 'no reason')}")
        traces = [self._whole(summary) for summary in reply.traces]
        self._refuse_failures(reply.head or WireHead(), traces)
        trained = [trace for trace in traces if trace.agent.trainable]
        if len(trained) != 1:
            raise AgentFailed(f"has {len(trained)} agents to train in one episode; exactly one is supported")
        return EpisodeResult(*_reward_of(trained[0]), _claims_of(trained[0]))

    def _whole(self, summary: WireSummary) -> _TraceSoFar:
        trace = self._traces.get(summary.id)
        if trace is None or (len(trace.nodes), trace.num_calls) != (summary.nodes, summary.calls):
            raise AgentFailed("was told another number of messages than the environment server counted")
        return trace

    def _refuse_failures(self, head: WireHead, traces: list[_TraceSoFar]) -> None:
        if head.ok and all(trace.ok for trace in traces):
            return
        errors = [*head.errors, *(error for trace in traces for error in trace.errors)]
        told = f"{errors[-1].type}: {errors[-1].message}" if errors else "it does not say why"
        raise AgentFailed(f"failed in the environment: {_one_line(told)}")


def _one_line(said: str) -> str:
    return " ".join(said.split())[:_MAX_SAID]


def _decoded(decode: Any, data: bytes) -> Any:
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AgentFailed(f"got a frame that cannot be read: {error}") from None


def _reward_of(trace: _TraceSoFar) -> tuple[float, dict[str, float]]:
    given = {name: reward for name, reward in trace.rewards.items() if reward is not None}
    if not given or len(given) != len(trace.rewards):
        raise AgentFailed("was not scored by the environment")
    reward = sum(one.score * one.weight for one in given.values())
    if not all(math.isfinite(one.score) for one in given.values()) or not math.isfinite(reward):
        raise AgentFailed("was given a reward that is no finite number")
    return reward, {name: one.score for name, one in given.items()}


def _claims_of(trace: _TraceSoFar) -> tuple[ClaimedAnswer, ...]:
    """The sampled tokens of each message, behind all tokens on the way to it."""
    whole: list[list[int]] = []
    claims: list[ClaimedAnswer] = []
    for number, node in enumerate(trace.nodes):
        if node.parent is not None and not 0 <= node.parent < number:
            raise AgentFailed("was told a message whose parent comes later")
        if any(not 0 <= token <= _MAX_ID for token in node.token_ids):
            raise AgentFailed("was told a token that is none")
        before = whole[node.parent] if node.parent is not None else []
        whole.append([*before, *node.token_ids])
        if node.sampled:
            claims.append(_claim(before, node))
    return tuple(claims)


def _claim(before: list[int], node: WireNode) -> ClaimedAnswer:
    num_sampled = sum(node.mask)
    first = len(node.token_ids) - num_sampled
    if len(node.mask) != len(node.token_ids) or len(node.logprobs) != num_sampled or any(node.mask[:first]):
        raise AgentFailed("was told tokens, mask and log-probs that do not fit each other")
    if not all(map(math.isfinite, node.logprobs)):
        raise AgentFailed("was told log-probs that are no numbers")
    return ClaimedAnswer(
        tokens_to_bytes([*before, *node.token_ids[:first]]),
        tokens_to_bytes(node.token_ids[first:]),
        floats_to_bytes(node.logprobs),
    )
