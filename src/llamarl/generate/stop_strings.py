"""Stop strings: texts that end an answer. They are looked for in text, since the same text may be spelled in many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.model.tokenizer import Tokenizer


class StopStrings:
    """The stop strings of a job, `generator.stop`; none: no answer holds one."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)

    def __bool__(self) -> bool:
        return bool(self._stops)

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """Number of tokens up to the one that completes the first stop string; None if there is none."""
        if not self._stops or not self._holds(tokens):
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
        text = self._tokenizer.decode(tokens)
        return any(stop in text for stop in self._stops)
