"""Sessions that are trained on: the exact tokens of an agent's dialogue, as a tree of what the model wrote.

Every answer is a turn: the prompt it was given, the ids it sampled, their log-probs and versions. When the next chat repeats
the messages up to a turn, with what the client was told as the model's message, that turn's very ids are kept and only the
messages behind it are tokenized. A history that was rewritten, forked or summarized matches only up to where it is the same;
from there it is another branch. Nothing is guessed: a message that this session did not write is text like any other.

One leaf of the tree is one training sequence. A turn that several sequences share is trained in the first of them and given
in the others. No HTTP and no torch here.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from llamarl.errors import ModelError
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.backend import Finish
from llamarl.serve.refusals import RequestRefused
from llamarl.serve.session import Answered, Chat, Message, template_tokens
from llamarl.types import Completion, Given, VersionRun, floats_to_bytes, tokens_to_bytes


@dataclass(eq=False)
class SampledTurn:
    """One answer of the model, exactly as it was sampled."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRun, ...]
    finish: Finish
    routes: bytes = b""  # experts of all its tokens but the last, prompt and answer; empty: not recorded
    parent: SampledTurn | None = None  # the last turn that the prompt begins with
    num_children: int = 0
    data: bytes = field(init=False)  # all ids, prompt and answer

    def __post_init__(self) -> None:
        self.data = tokens_to_bytes((*self.prompt, *self.tokens))

    @property
    def way(self) -> list[SampledTurn]:
        """The turns that lead to this one, and this one."""
        way: list[SampledTurn] = []
        turn: SampledTurn | None = self
        while turn is not None:
            way.append(turn)
            turn = turn.parent
        return way[::-1]


class Branch(Struct, frozen=True):
    """One training sequence: the ids of a leaf, and the turns in it that are trained here."""

    tokens: tuple[int, ...]
    trained: tuple[SampledTurn, ...]
    truncated: bool
    routes: bytes = b""  # experts of all tokens but the last; empty: not recorded

    @property
    def head(self) -> tuple[int, ...]:
        """The tokens before the first one that is trained."""
        return self.tokens[: len(self.trained[0].prompt)]


class SessionCounts(Struct, frozen=True):
    """What happened in a session."""

    calls: int = 0
    unmatched: int = 0  # chats with a message of the model that this session did not write, or that was changed
    branches: int = 0


class TrainingSession:
    """The dialogue of one agent, for one sample of a group. At most `max_calls` requests are answered."""

    def __init__(self, tokenizer: Tokenizer, *, max_calls: int) -> None:
        self._tokenizer, self._max_calls = tokenizer, max_calls
        self._turns: list[SampledTurn] = []
        self._by_history: dict[bytes, SampledTurn] = {}  # by digest of the messages up to and including the turn
        self._by_tokens: dict[int, dict[bytes, SampledTurn]] = {}  # by length in bytes, and all ids
        self._calls = self._unmatched = 0
        self.reward: float | None = None  # the sum of what the client gave by `POST /rl/reward`
        self.problem = ""  # why this session cannot be trained on; empty: it can
        self.closed = False
        self._lock = threading.Lock()  # answers are recorded in the server's thread, and sessions closed in another

    # What the server asks

    def prompt(self, chat: Chat) -> list[int]:
        digests = [*_digests(chat)]
        for place in range(len(digests) - 1, -1, -1) if chat.add_generation_prompt else ():
            if turn := self._by_history.get(digests[place]):
                behind = self._behind(chat, turn, place)
                if behind is not None:
                    self._note_match(chat, place)
                    return [*turn.prompt, *turn.tokens, *behind]
        self._note_match(chat, -1)
        return self._fresh(chat)

    def begin_call(self) -> None:
        """A request is about to be answered. Raises RequestRefused beyond the limit of calls, which the sample fails with."""
        if self.closed:
            raise RequestRefused(410, "this session has ended")
        if self._calls >= self._max_calls:
            self.problem = f"made more than agent.max_calls={self._max_calls} calls"
            raise RequestRefused(400, f"{self._max_calls} calls are allowed in a session (agent.max_calls)")
        self._calls += 1

    def record(self, answered: Answered) -> None:
        with self._lock:
            if not self.closed and answered.tokens:
                self._add(answered)

    def close(self) -> None:
        """Record nothing any more: what comes later was not part of the agent's work."""
        with self._lock:
            self.closed = True

    def _add(self, answered: Answered) -> None:
        turn = SampledTurn(
            tuple(answered.prompt_tokens),
            tuple(answered.tokens),
            tuple(answered.logprobs),
            answered.versions,
            answered.finish,
            answered.routes,
        )
        turn.parent = self._longest_prefix(turn.prompt)
        if turn.parent is not None:
            turn.parent.num_children += 1
        self._turns.append(turn)
        self._by_tokens.setdefault(len(turn.data), {})[turn.data] = turn
        if answered.chat is not None and answered.message is not None:
            *_, digest = _digests(answered.chat, answered.message)
            self._by_history[digest] = turn

    def add_reward(self, value: float) -> None:
        if self.closed:
            raise RequestRefused(410, "this session has ended")
        self.reward = (self.reward or 0.0) + value

    # What training asks

    @property
    def counts(self) -> SessionCounts:
        return SessionCounts(self._calls, self._unmatched, sum(not turn.num_children for turn in self._turns))

    def branches(self) -> list[Branch]:
        """The training sequences, in the order in which their last answers came. Every sampled token is trained in exactly
        one of them."""
        trained: set[int] = set()
        branches: list[Branch] = []
        for leaf in self._turns:
            if leaf.num_children:
                continue
            own = tuple(turn for turn in leaf.way if id(turn) not in trained)
            trained.update(map(id, own))
            branches.append(Branch((*leaf.prompt, *leaf.tokens), own, leaf.finish == "length", _routes_to(leaf)))
        return branches

    # Tokens

    def _fresh(self, chat: Chat) -> list[int]:
        """Tokens of a chat of which nothing is known. Without a chat template, its texts stand one behind the other."""
        if not self._tokenizer.has_chat:
            return self._tokenizer.encode("".join(map(_text, chat.messages)))
        return template_tokens(self._tokenizer, chat)

    def _behind(self, chat: Chat, turn: SampledTurn, place: int) -> list[int] | None:
        """Tokens of the messages behind the one at `place`, which is the model's; None where the template cannot tell."""
        before, behind = chat.messages[:place], chat.messages[place + 1 :]
        if not self._tokenizer.has_chat:
            return self._tokenizer.encode("".join(map(_text, behind)))
        ended = turn.tokens[-1] in self._tokenizer.eos_ids
        try:
            return self._tokenizer.chat_behind(before, behind, ended=ended, tools=chat.tools, options=chat.options)
        except ModelError:
            return None

    def _longest_prefix(self, prompt: Sequence[int]) -> SampledTurn | None:
        """The turn with the most ids that this prompt begins with."""
        data = tokens_to_bytes(prompt)
        for length in sorted(self._by_tokens, reverse=True):
            if length <= len(data) and (turn := self._by_tokens[length].get(data[:length])):
                return turn
        return None

    def _note_match(self, chat: Chat, place: int) -> None:
        """Count chats whose last message of the model is not one that this session wrote, once it has written any."""
        said = [at for at, message in enumerate(chat.messages) if message.get("role") == "assistant"]
        self._unmatched += bool(self._turns and said and said[-1] != place)


def _routes_to(leaf: SampledTurn) -> bytes:
    """Experts of all tokens but the last of a leaf's sequence: of each token those of the first call that read it.
    Later calls read the same again."""
    found = b""
    for turn in leaf.way:
        if not turn.routes:
            return b""
        found += turn.routes[len(found) :]
    return found


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


_COMPARED = ("role", "tool_call_id", "name")


def _digests(chat: Chat, *more: Message) -> Iterator[bytes]:
    """A digest of the chat up to each of its messages. Reasoning is left out: clients do not send it back."""
    digest = hashlib.blake2b(_canonical([chat.tools, dict(chat.options)]), digest_size=16).digest()
    for message in (*chat.messages, *more):
        shown: dict[str, Any] = {key: message[key] for key in _COMPARED if message.get(key)}
        shown["content"] = _text(message)
        shown["tool_calls"] = [_call(call) for call in message.get("tool_calls") or ()]
        digest = hashlib.blake2b(digest + _canonical(shown), digest_size=16).digest()
        yield digest


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    return [call.get("id"), function.get("name"), function.get("arguments")]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=dict, ensure_ascii=True).encode()


# From branches to completions


def common_prompt(branches: Iterable[Branch]) -> tuple[int, ...]:
    """The longest beginning that all branches share before anything in them is trained."""
    heads = [branch.head for branch in branches]
    shortest = min(heads, key=len)
    shared = next((at for at, token in enumerate(shortest) if any(head[at] != token for head in heads)), len(shortest))
    return shortest[:shared]


def completion_of(branch: Branch, num_prompt: int, sample: int, player: int = 0) -> Completion:
    """A branch behind a prompt of `num_prompt` tokens, as an answer of several turns: what is not trained is given."""
    given: list[Given] = []
    end = num_prompt
    for turn in branch.trained:
        if len(turn.prompt) > end:
            given.append(Given(end - num_prompt, len(turn.prompt) - end))
        end = len(turn.prompt) + len(turn.tokens)
    if len(branch.tokens) > end:
        given.append(Given(end - num_prompt, len(branch.tokens) - end))
    routes, prompt_routes = _cut_routes(branch, num_prompt)
    return Completion(
        tokens=tokens_to_bytes(branch.tokens[num_prompt:]),
        behavior_logprobs=floats_to_bytes([logprob for turn in branch.trained for logprob in turn.logprobs]),
        versions=_joined(run for turn in branch.trained for run in turn.versions),
        truncated=branch.truncated,
        given=tuple(given),
        sample=sample,
        player=player,
        routes=routes,
        prompt_routes=prompt_routes,
    )


def _cut_routes(branch: Branch, num_prompt: int) -> tuple[bytes, bytes]:
    """Experts of the states that predict the tokens behind the prompt, and of those before. Nothing predicts the first token
    of all, where there is no prompt."""
    row_bytes = len(branch.routes) // max(1, len(branch.tokens) - 1)
    if not num_prompt:
        return bytes(row_bytes) + branch.routes, b""
    cut = (num_prompt - 1) * row_bytes
    return branch.routes[cut:], branch.routes[:cut]


def _joined(runs: Iterable[VersionRun]) -> tuple[VersionRun, ...]:
    """The same runs, with neighbors of the same version as one."""
    joined: list[VersionRun] = []
    for run in runs:
        if joined and joined[-1].version == run.version:
            joined[-1] = VersionRun(run.version, joined[-1].count + run.count)
        else:
            joined.append(run)
    return tuple(joined)
