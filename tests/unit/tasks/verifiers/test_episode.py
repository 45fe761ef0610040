"""What an environment server tells is checked: every frame, every length, every number, and against what was sampled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from helpers.chat_tokenizer import chat_tokenizer

from llamarl.serve.claims import disagreement
from llamarl.serve.session import Answered
from llamarl.serve.sessions import TrainingSession
from llamarl.tasks.agents.calling import AgentFailed
from llamarl.tasks.verifiers.episode import EpisodeReader, EpisodeResult
from llamarl.types import ClaimedAnswer, VersionRun, floats_to_bytes, tokens_to_bytes

pack = msgspec.msgpack.encode
ASKED = {
    "parent": None,
    "sampled": False,
    "token_ids": [1, 2],
    "mask": [False, False],
    "logprobs": [],
    "is_content": [],
}
SAID = {"parent": 0, "sampled": True, "token_ids": [3, 4, 5], "mask": [False, True, True], "logprobs": [-1.0, -2.0]}
MORE = {"parent": 1, "sampled": True, "token_ids": [6, 7], "mask": [False, True], "logprobs": [-0.5]}
REWARDS = {"right": {"score": 1.0, "weight": 0.5}, "brief": {"score": 2.0, "weight": 1.0}}
REPLY = {"success": True, "error": None, "head": {"ok": True, "errors": []}}


def claim(prompt: list[int], tokens: list[int], logprobs: list[float]) -> ClaimedAnswer:
    return ClaimedAnswer(tokens_to_bytes(prompt), tokens_to_bytes(tokens), floats_to_bytes(logprobs))


CLAIMS = (claim([1, 2, 3], [4, 5], [-1.0, -2.0]), claim([1, 2, 3, 4, 5, 6], [7], [-0.5]))


def read(
    nodes: list[dict[str, Any]], rewards: Any = REWARDS, *, trained: dict[str, Any] | None = None, **reply: Any
) -> EpisodeResult:
    reader = EpisodeReader()
    reader.delta(pack({"trace": "old", "open": {}, "nodes": [ASKED]}))
    reader.delta(pack({"trace": "old", "discard": True}))
    reader.delta(pack({"trace": "t", "open": {"version": 1}, "nodes": nodes[:1], "pending": []}))
    reader.delta(pack({"trace": "t", "nodes": nodes[1:], "calls": [{}, {}], "links": {1: []}}))
    reader.delta(pack({"trace": "t", "set": {"rewards": rewards, "ok": True, "timing": {}, **(trained or {})}}))
    counted = [{"id": "t", "nodes": len(nodes), "calls": 2}]
    return reader.finish(pack({**REPLY, "traces": counted, **reply}))


def test_an_episode_becomes_a_reward_and_claims() -> None:
    assert read([ASKED, SAID, MORE]) == EpisodeResult(2.5, {"right": 1.0, "brief": 2.0}, CLAIMS)


NAN, INF = float("nan"), float("inf")
LIES: list[tuple[str, dict[str, Any]]] = [
    ("do not fit", {"nodes": [ASKED, {**SAID, "mask": [False, True]}]}),
    ("do not fit", {"nodes": [ASKED, {**SAID, "logprobs": [-1.0]}]}),
    ("do not fit", {"nodes": [ASKED, {**SAID, "mask": [True, True, False]}]}),
    ("no numbers", {"nodes": [ASKED, {**SAID, "logprobs": [-1.0, NAN]}]}),
    ("cannot be read", {"nodes": [ASKED, {**SAID, "logprobs": [-1.0, None]}]}),
    ("a token that is none", {"nodes": [ASKED, {**SAID, "token_ids": [3, -4, 5]}]}),
    ("parent comes later", {"nodes": [ASKED, {**SAID, "parent": 1}]}),
    ("no finite number", {"nodes": [ASKED, SAID], "rewards": {"a": {"score": INF}}}),
    ("no finite number", {"nodes": [ASKED, SAID], "rewards": {"a": {"score": 1e308}, "b": {"score": 1e308}}}),
    ("was not scored", {"nodes": [ASKED, SAID], "rewards": {"a": None}}),
    ("was not scored", {"nodes": [ASKED, SAID], "rewards": {}}),
    ("another number of messages", {"nodes": [ASKED, SAID], "traces": [{"id": "t", "nodes": 3, "calls": 2}]}),
    ("another number of messages", {"nodes": [ASKED, SAID], "traces": [{"id": "u", "nodes": 2, "calls": 2}]}),
    ("refused by the environment server: no room", {"nodes": [ASKED, SAID], "success": False, "error": "no room"}),
    ("E: it broke", {"nodes": [ASKED], "head": {"ok": False, "errors": [{"type": "E", "message": "it\nbroke"}]}}),
    ("0 agents to train", {"nodes": [ASKED, SAID], "trained": {"agent": {"trainable": False}}}),
    ("cannot be read", {"nodes": [ASKED, SAID], "traces": 7}),
]


@pytest.mark.parametrize(("told", "lie"), LIES)
def test_what_cannot_be_true_is_refused_with_the_reason(told: str, lie: dict[str, Any]) -> None:
    with pytest.raises(AgentFailed, match=told):
        read(**lie)


@pytest.mark.parametrize("data", [b"", b"\xc1", pack("text"), pack({"trace": 1}), b"\x91" * 100_000])
def test_frames_that_are_garbage_are_refused(data: bytes) -> None:
    with pytest.raises(AgentFailed, match="cannot be read"):
        EpisodeReader().delta(data)
    with pytest.raises(AgentFailed, match="cannot be read"):
        EpisodeReader().finish(data)


def test_claims_must_be_what_was_sampled() -> None:
    session = TrainingSession(chat_tokenizer(), max_calls=9)
    for prompt, tokens, logprobs in (([1, 2, 3], [4, 5], [-1.0, -2.0]), ([1, 2, 3, 4, 5, 6], [7], [-0.5])):
        versions = (VersionRun(0, len(tokens)),)
        session.record(
            Answered(prompt_tokens=prompt, index=0, tokens=tokens, logprobs=logprobs, versions=versions, finish="stop")
        )
    first = CLAIMS[0]
    assert disagreement(session, CLAIMS) == ""
    assert disagreement(session, [first]) == "says nothing of 1 of 2 answers that were sampled"
    assert "not sampled here" in disagreement(session, [first, claim([1, 2, 3, 4, 5, 6], [8], [-0.5])])
    assert "not sampled here" in disagreement(session, [first, claim([1, 2, 3, 4, 5], [7], [-0.5])])
    for wrong in ([-0.4], [-0.5, -0.5], []):
        assert "other log-probs" in disagreement(session, [first, claim([1, 2, 3, 4, 5, 6], [7], wrong)])
