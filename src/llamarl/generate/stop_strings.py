"""Stop strings: texts that end an answer. They are looked for in text, since the same text may be spelled in many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.model.tokenizer import Tokenizer

_SPARE_TOKENS = 8  # read before the tokens that can hold a stop string, since a tokenizer may join or trim at a start


class StopStrings:
    """The texts, and the tokens besides the model's own end tokens, that end an answer; none: no answer holds one."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], token_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._stops, self._token_ids = tokenizer, tuple(stops), frozenset(token_ids)
        self._longest_bytes = max((len(stop.encode()) for stop in self._stops), default=0)

    def __bool__(self) -> bool:
        return bool(self._stops or self._token_ids)

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """Number of tokens up to the one that completes the first stop string; None if there is none."""
        by_token = self._first_token(tokens, 0)
        by_text = self._end_of_text(tokens if by_token is None else tokens[:by_token])
        return by_token if by_text is None else by_text

    def end_behind(self, tokens: Sequence[int], known: int) -> int | None:
        """The same as `end_of`, where the first `known` tokens are known to hold none: only the last ones are read."""
        start = max(0, known - self._longest_bytes - _SPARE_TOKENS)
        if self._first_token(tokens, known) is None and not self._holds(tokens[start:]):
            return None
        return self.end_of(tokens)

    def _first_token(self, tokens: Sequence[int], start: int) -> int | None:
        if not self._token_ids:
            return None
        return next((place + 1 for place in range(start, len(tokens)) if tokens[place] in self._token_ids), None)

    def _end_of_text(self, tokens: Sequence[int]) -> int | None:
        if not self._holds(tokens):
            return None
        without, within = (
            0,
            len(tokens),
        )  # the shortest part that holds one is longer than the first, not than the second
        while within - without > 1:
            middle = (without + within) // 2
            if self._holds(tokens[:middle]):
                within = middle
            else:
                without = middle
        return within

    def _holds(self, tokens: Sequence[int]) -> bool:
        if not self._stops:
            return False
        text = self._tokenizer.decode(tokens)
        return any(stop in text for stop in self._stops)
