"""Conversations: between the decoder, which knows tokens, and the tools, which know text.

What a model has said goes out as text; what a tool replies comes back as tokens that are put behind it, exactly those that
will be read, and stored, and never made from text again. With several ranks the first one asks the tools and tells the
others what they replied, so that all of them go on alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
from msgspec import Struct

from llamarl.config import Config, ConversationConfig
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.parallel import TensorRank
from llamarl.generate.prompting import asked_turns, reply_tokens
from llamarl.generate.scheduler import Key
from llamarl.generate.scheduler import Sequence as Sample
from llamarl.model.tokenizer import Tokenizer
from llamarl.process_groups import broadcast_bytes
from llamarl.tasks.failures import Counts
from llamarl.tasks.tools.client import Reply, ToolClient
from llamarl.types import CompletionGroup, Problem, Turn

_PATIENCE_S = 0.02  # so long may a new message wait while nothing but tools is at work


class Failure(Struct, frozen=True):
    """A tool that came to nothing: its group cannot go on."""

    ordinal: int
    status: str
    reason: str
    trace: str = ""  # of an exception in a user's own tool


class Conversations:
    """Steps the decoder and serves its conversations meanwhile. `open_desk` is called where the tools are asked."""

    def __init__(
        self,
        decoder: ContinuousDecoder,
        tokenizer: Tokenizer,
        settings: ConversationConfig,
        open_desk: Callable[[], ToolClient],
        part: TensorRank | None = None,
    ) -> None:
        self._decoder, self._tokenizer, self._settings = decoder, tokenizer, settings
        self._part = part or TensorRank()
        self._desk = open_desk() if self._part.rank == 0 else None
        self._problems: dict[Key, Problem] = {}  # of the conversations that wait for a reply
        self._told: dict[
            int, dict[int, list[str]]
        ] = {}  # all replies so far, by group and sample, as the tools gave them
        self._failures: list[Failure] = []
        self._outcomes: list[bool] = []

    def step(self) -> list[CompletionGroup]:
        """One step of the decoder, if it has anything to do; turns that ended go to the tools, replies come back."""
        finished = self._decoder.step() if self._decoder.decoding else []
        for group in finished:
            self._told.pop(group.ordinal, None)
        for sample in self._decoder.take_turns():
            self._hand_in(sample)
        for key, reply in self._collect():
            self._answer(key, reply)
        return finished

    def take_outcomes(self) -> list[bool]:
        """Of every call since the last time, whether it failed."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_failures(self) -> list[Failure]:
        """Groups that were given up since the last time."""
        failures, self._failures = self._failures, []
        return failures

    def take_counts(self) -> Counts:
        return Counts() if self._desk is None else self._desk.take_counts()

    def close(self) -> None:
        if self._desk is not None:
            self._desk.close()

    def _hand_in(self, sample: Sample) -> None:
        problem = sample.group.prompt.problem
        self._problems[sample.key] = problem
        if self._desk is not None:
            turns = self._turns(problem, sample)
            self._desk.ask(sample.key, turns[-1].content, turns)

    def _turns(self, problem: Problem, sample: Sample) -> list[Turn]:
        """The prompt, then by turns what the model said and what it was told."""
        turns, start = [*asked_turns(problem)], 0
        for reply, told in zip(sample.given, self._told_to(sample.key), strict=True):
            turns.append(Turn("assistant", self._text(sample, start, reply.start)))
            turns.append(Turn(self._settings.role, told))
            start = reply.start + reply.count
        return [*turns, Turn("assistant", self._text(sample, start, len(sample.sampled.tokens)))]

    def _told_to(self, key: Key) -> list[str]:
        return self._told.setdefault(key[0], {}).setdefault(key[1], [])

    def _text(self, sample: Sample, start: int, end: int) -> str:
        return self._tokenizer.decode(sample.sampled.tokens[start:end])

    def _collect(self) -> Sequence[tuple[Key, Reply]]:
        if not self._problems:
            return ()
        arrived: list[tuple[Key, Reply]] = []
        if self._desk is not None:
            patience_s = 0.0 if self._decoder.decoding else _PATIENCE_S
            arrived = [(cast(Key, key), reply) for key, reply in self._desk.collect(patience_s)]
        return decode_replies(broadcast_bytes(encode_replies(arrived))) if self._part.count > 1 else arrived

    def _answer(self, key: Key, reply: Reply) -> None:
        problem = self._problems.pop(key)
        self._outcomes.append(reply.status != "ok")
        if reply.status != "ok":
            self._drop(Failure(key[0], reply.status, reply.reason, reply.trace))
        elif reply.text is None:
            self._decoder.end(key)
        elif self._decoder.holds(key[0]):
            self._told_to(key).append(reply.text)
            self._decoder.reply(key, reply_tokens(self._tokenizer, problem, self._settings, reply.text))

    def _drop(self, failure: Failure) -> None:
        """The group has failed as a whole, once; replies to its other samples find nobody any more."""
        if self._decoder.holds(failure.ordinal):
            self._failures.append(failure)
            self._told.pop(failure.ordinal, None)
            self._decoder.drop(failure.ordinal)


def make_conversations(
    config: Config, decoder: ContinuousDecoder, tokenizer: Tokenizer, part: TensorRank | None = None
) -> Conversations:
    """As the job says; its tool is up when this returns."""

    def open_desk() -> ToolClient:
        desk = ToolClient(config.conversation, config.sandbox)
        desk.prepare()
        return desk

    return Conversations(decoder, tokenizer, config.conversation, open_desk, part)


encode_replies = msgspec.json.Encoder().encode
decode_replies = msgspec.json.Decoder(list[tuple[Key, Reply]]).decode
