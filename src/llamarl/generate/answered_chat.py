"""Tokens of a chat with answers: the prompt as a generator would see it, then the answers as it would have sampled them."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.errors import ModelError
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.supervised import ASSISTANT, AnsweredChat
from llamarl.types import Given, Turn, WrittenAnswer, tokens_to_bytes


@dataclass(frozen=True)
class RowTokens:
    """Tokens of a row. Those of `answer` are learned, unless they are `given`."""

    prompt: list[int]
    answer: list[int]
    given: tuple[Given, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def written(self) -> WrittenAnswer:
        return WrittenAnswer(tokens_to_bytes(self.answer), self.given)

    def cut(self, length: int) -> RowTokens | None:
        """The row without what goes beyond `length` tokens; None if nothing to learn is left."""
        left = length - len(self.prompt)
        given = tuple(Given(one.start, min(one.count, left - one.start)) for one in self.given if one.start < left)
        learned = min(left, len(self.answer)) - sum(one.count for one in given)
        return RowTokens(self.prompt, self.answer[:left], given) if learned > 0 else None


Piece = tuple[list[int], bool]  # tokens, and whether they are learned


def row_tokens(tokenizer: Tokenizer, chat: AnsweredChat, *, learn_all: bool = False) -> RowTokens:
    """ModelError where the chat template cannot say what the assistant's tokens are."""
    pieces = _plain(tokenizer, chat) if chat.plain else _pieces(tokenizer, chat.turns)
    if learn_all:
        tokens = [token for piece, _ in pieces for token in piece]
        return RowTokens(tokens[:1], tokens[1:])
    first = next(at for at, (_, learned) in enumerate(pieces) if learned)
    answer: list[int] = []
    given: list[Given] = []
    for tokens, learned in pieces[first:]:
        if not learned and tokens:
            given.append(Given(len(answer), len(tokens)))
        answer += tokens
    return RowTokens([token for tokens, _ in pieces[:first] for token in tokens], answer, tuple(given))


def _plain(tokenizer: Tokenizer, chat: AnsweredChat) -> list[Piece]:
    ended = [*tokenizer.encode(chat.answer), tokenizer.eos_ids[0]]
    return [(tokenizer.encode(chat.question), False), (ended, True)]


def _pieces(tokenizer: Tokenizer, turns: tuple[Turn, ...]) -> list[Piece]:
    """Each answer, and what stands before it: the template's text of the turns so far, from where the last answer ended."""
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    pieces: list[Piece] = []
    done = ""
    for at, turn in enumerate(turns):
        if turn.role != ASSISTANT or at == 0:
            continue
        opened = tokenizer.chat_text(messages[:at], add_generation_prompt=True)
        closed = tokenizer.chat_text(messages[: at + 1], add_generation_prompt=False)
        if not opened.startswith(done) or not closed.startswith(opened):
            raise ModelError("the chat template rewrites earlier turns, so it does not say which tokens answer which")
        pieces.append((tokenizer.encode(opened[len(done) :]), False))
        said, ended = _up_to_stop(tokenizer, closed[len(opened) :], turn.content)
        done = opened + said
        pieces.append((tokenizer.encode(said) + ([] if ended else [tokenizer.eos_ids[0]]), True))
    return pieces


def _up_to_stop(tokenizer: Tokenizer, text: str, content: str) -> tuple[str, bool]:
    """The answer with the stop token behind it, where a generator would have ended; and whether there is one."""
    start = max(0, text.find(content.strip())) + len(content.strip())
    ends = [at + len(stop) for stop in tokenizer.stop_texts if (at := text.find(stop, start)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)
