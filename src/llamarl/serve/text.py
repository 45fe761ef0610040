"""Text of sampled tokens, all at once or as they come, up to the stop string that ended them."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.model.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what a part of a character decodes to


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string begins, and which one it is; of those that begin at one place, the one given first."""
    places = [(text.find(stop), order, stop) for order, stop in enumerate(stops)]
    found = min((place for place in places if place[0] >= 0), default=None)
    return None if found is None else (found[0], found[2])


def whole_text(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> tuple[str, str | None]:
    """Text of an answer without its end, and the stop string that ended it, if one did."""
    text = tokenizer.decode(without_end(tokenizer, tokens))
    found = first_stop(text, stops) if stops else None
    return (text, None) if found is None else (text[: found[0]], found[1])


def without_end(tokenizer: Tokenizer, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens without the end token, which is no text even where the tokenizer does not call it special."""
    return tokens[:-1] if tokens and tokens[-1] in tokenizer.eos_ids else tokens


def held_back(text: str, marks: Sequence[str]) -> int:
    """Number of characters at the end of a text that may be the beginning of one of the marks."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(mark.startswith(end) for mark in marks):
            return size
    return 0


class TextStream:
    """Turns tokens that come piece by piece into text. What may still become part of a character or of a stop string is held
    back; all pieces together are the text that `whole_text` gives."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._context, self._read = 0, 0  # tokens before `_read` are text already; decoding begins at `_context`
        self._pending = ""
        self.stop: str | None = None  # the stop string that ended the text

    def push(self, tokens: Sequence[int], *, last: bool) -> str:
        """The text that these tokens add; after the last ones, everything that was held back."""
        if self.stop is not None:
            return ""
        self._tokens.extend(without_end(self._tokenizer, tokens) if last else tokens)
        self._pending += self._new_text(last)
        if found := first_stop(self._pending, self._stops):
            place, self.stop = found
            return self._pending[:place]
        keep = 0 if last else held_back(self._pending, self._stops)
        ready, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        return ready

    def _new_text(self, last: bool) -> str:
        decode, tokens = self._tokenizer.decode, self._tokens
        if self._read == len(tokens):
            return ""
        before, now = decode(tokens[self._context : self._read]), decode(tokens[self._context :])
        if now.endswith(_UNFINISHED) and not last:
            return ""
        self._context, self._read = self._read, len(tokens)
        return now[len(before) :]
