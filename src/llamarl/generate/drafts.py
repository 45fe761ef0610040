"""Guesses of how answers go on, and whether guessing pays. Uses no tensor and no device.

A draft is what followed the same few tokens before: in the answers of siblings, finished or not, in earlier answers to the
same prompt, in the answer itself, or in the prompt. It may be wrong; `drafting.py` keeps of it what the policy would have
sampled anyway.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

Text = tuple[int, int]  # ordinal of a group and index of the sample
MATCHED = 3  # tokens that must be the same before a draft begins
_MOST_COMPARED = 32  # tokens by which the best of several places is chosen
_MOST_PLACES = 16  # of one run of tokens, the newest ones
_TRIAL = 12  # drafted steps, or plain bursts, that are timed before they are compared
_UNTIL_NEXT_TRIAL = 256  # steps, until what was slower is tried again
AUTO_DRAFT = 8  # tokens drafted with `auto`


class SuffixIndex:
    """Texts of one group, and where each run of a few tokens occurs in them."""

    def __init__(self) -> None:
        self._texts: dict[Text, list[int]] = {}
        self._places: dict[tuple[int, ...], list[tuple[Text, int]]] = defaultdict(list)  # text, end of the run

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._texts.values()))

    def __contains__(self, text: Text) -> bool:
        return text in self._texts

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Append tokens to a text, which may be new."""
        found = self._texts.setdefault(text, [])
        for token in tokens:
            found.append(token)
            if len(found) >= MATCHED:
                places = self._places[tuple(found[-MATCHED:])]
                places.append((text, len(found)))
                del places[:-_MOST_PLACES]

    def catch_up(self, text: Text, tokens: Sequence[int], offset: int) -> None:
        """Append what is new of `tokens`, which are those of the text behind its first `offset`."""
        self.extend(text, tokens[len(self._texts[text]) - offset :])

    def draft(self, text: Text, most: int) -> list[int]:
        """What may follow this text: the tokens behind the place that has most in common with its end."""
        own = self._texts[text]
        best, longest = [], 0
        for other, end in reversed(self._places.get(tuple(own[-MATCHED:]), [])):
            following = self._texts[other][end : end + most]
            if following and (length := self._common(own, self._texts[other], end)) > longest:
                best, longest = following, length
        return best

    def _common(self, own: list[int], other: list[int], end: int) -> int:
        """Number of tokens before `end` that are those before the end of `own`."""
        most = min(_MOST_COMPARED, len(own), end)
        return next((n for n in range(MATCHED, most) if own[-1 - n] != other[end - 1 - n]), most)


class DraftChoice:
    """How many tokens to draft: always as many as set or, with `auto`, as many as were measured to pay, which depends on the
    machine and on how well answers can be guessed. Never changes what is sampled."""

    def __init__(self, draft: int | Literal["auto"], clock: Callable[[], float] = time.perf_counter) -> None:
        self.most = AUTO_DRAFT if draft == "auto" else draft
        self._auto, self._clock = draft == "auto", clock
        self._spent = {True: 0.0, False: 0.0}  # seconds, with and without drafts
        self._tokens = {True: 0, False: 0}
        self._steps = {True: 0, False: 0}
        self._began_s = 0.0

    def begin(self) -> bool:
        """Whether to draft in the next step, which begins now."""
        self._began_s = self._clock()
        if not self._auto:
            return True
        for drafted in (True, False):
            if self._steps[drafted] < _TRIAL:
                return drafted
        if sum(self._steps.values()) >= _UNTIL_NEXT_TRIAL:
            slower = not self._faster
            self._steps = dict.fromkeys(self._steps, _TRIAL)
            self._steps[slower], self._spent[slower], self._tokens[slower] = 0, 0.0, 0
            return slower
        return self._faster

    @property
    def _faster(self) -> bool:
        """Whether drafts gave more tokens in a second."""
        return self._tokens[True] * self._spent[False] > self._tokens[False] * self._spent[True]

    def end(self, *, drafted: bool, tokens: int) -> None:
        """A step has ended that gave so many tokens."""
        self._steps[drafted] += 1
        self._tokens[drafted] += tokens
        self._spent[drafted] += self._clock() - self._began_s
