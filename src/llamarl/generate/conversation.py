"""Conversations: the link between the decoder, which handles tokens, and the tools, which handle text.

A model's turn goes to the tool as text. The reply is turned into tokens once; exactly these are appended, read and stored.
With several ranks, the first one calls the tools and sends their replies to the others, so that all decode the same.
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
from llamarl.generate.sequences import Key
from llamarl.generate.sequences import Sequence as Sample
from llamarl.model.tokenizer import Tokenizer
from llamarl.process_groups import broadcast_bytes
from llamarl.tasks.failures import Counts
from llamarl.tasks.tools.client import Reply, ToolClient
from llamarl.types import CompletionGroup, Problem, Turn

_PATIENCE_S = 0.02  # longest that a new message waits while only tools are at work


class Failure(Struct, frozen=True):
    """A tool call that failed, so that its group cannot go on."""

    ordinal: int
    status: str
    reason: str
    trace: str = ""  # traceback of an exception in a user's own tool


class Conversations:
    """Steps the decoder and serves its conversations. `open_client` is called on the rank that calls the tools."""

    def __init__(
        self,
        decoder: ContinuousDecoder,
        tokenizer: Tokenizer,
        settings: ConversationConfig,
        open_client: Callable[[], ToolClient],
        part: TensorRank | None = None,
    ) -> None:
        self._decoder, self._tokenizer, self._settings = decoder, tokenizer, settings
        self._part = part or TensorRank()
        self._client = open_client() if self._part.rank == 0 else None
        self._problems: dict[Key, Problem] = {}  # problems of the conversations that wait for a reply
        self._told: dict[int, dict[int, list[str]]] = {}  # texts of all replies so far, by group and sample
        self._failures: list[Failure] = []
        self._outcomes: list[bool] = []

    def step(self) -> list[CompletionGroup]:
        """Step the decoder if it has work, send turns that ended to the tools, take in replies. Returns complete groups."""
        finished = self._decoder.step() if self._decoder.decoding else []
        for group in finished:
            self._told.pop(group.ordinal, None)
        for sample in self._decoder.take_turns():
            self._hand_in(sample)
        for key, reply in self._collect():
            self._answer(key, reply)
        return finished

    def take_outcomes(self) -> list[bool]:
        """Whether each tool call failed, for those answered since this was last asked."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_failures(self) -> list[Failure]:
        """Groups given up since this was last asked."""
        failures, self._failures = self._failures, []
        return failures

    def take_counts(self) -> Counts:
        return Counts() if self._client is None else self._client.take_counts()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _hand_in(self, sample: Sample) -> None:
        problem = sample.group.prompt.problem
        self._problems[sample.key] = problem
        if self._client is not None:
            turns = self._turns(problem, sample)
            self._client.ask(sample.key, turns[-1].content, turns)

    def _turns(self, problem: Problem, sample: Sample) -> list[Turn]:
        """The chat so far: the prompt, then the model's turns and the replies to them."""
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
        if self._client is not None:
            patience_s = 0.0 if self._decoder.decoding else _PATIENCE_S
            arrived = [(cast(Key, key), reply) for key, reply in self._client.collect(patience_s)]
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
        """Give up the whole group, once; later replies to its other samples are ignored."""
        if self._decoder.holds(failure.ordinal):
            self._failures.append(failure)
            self._told.pop(failure.ordinal, None)
            self._decoder.drop(failure.ordinal)


def make_conversations(
    config: Config, decoder: ContinuousDecoder, tokenizer: Tokenizer, part: TensorRank | None = None
) -> Conversations:
    """Conversations as the config says; the tool is running when this returns."""

    def open_client() -> ToolClient:
        client = ToolClient(config.conversation, config.sandbox)
        client.prepare()
        return client

    return Conversations(decoder, tokenizer, config.conversation, open_client, part)


encode_replies = msgspec.json.Encoder().encode
decode_replies = msgspec.json.Decoder(list[tuple[Key, Reply]]).decode
