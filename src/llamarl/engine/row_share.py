"""Which ordinals are rows of data, so that rows are a share of the tokens that an update learns from; and the record from
which the same ordinals are rows again after a kill.

How long answers will be is not known when a group is admitted. Ordinals form stages, as those of a curriculum do
(`tasks/curriculum.py`): in stage k, a sampled group is taken to have as many tokens as those of stage k - 2 had on average,
and before that as many as rows would have in its place. An ordinal is a row if rows stay within their share with it. So
timing decides nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from llamarl.config import Config
from llamarl.errors import InputError
from llamarl.io.record_log import SegmentWriter, read_records
from llamarl.tasks.curriculum import Choice, ordinals_under_way
from llamarl.types import GroupFacts

_PROBLEM = -1


class RowShare(Protocol):
    def row_of(self, ordinal: int) -> int | None:
        """Number of the row that the ordinal is; None: it is a problem."""

    def problem_of(self, ordinal: int) -> int:
        """Number of the problem that the ordinal is."""


class NoRows:
    """Every ordinal is a problem."""

    def row_of(self, ordinal: int) -> int | None:
        return None

    def problem_of(self, ordinal: int) -> int:
        return ordinal


class ShareRule(Struct, frozen=True):
    """Everything that the choice depends on besides the tokens of rows and answers."""

    share: float
    stage: int  # number of ordinals in a stage
    first_guess: float  # tokens of a sampled group, before any is known
    skips_flat: bool  # nothing is learned from groups whose rewards are all equal


def share_rule(config: Config, mean_row_tokens: float) -> ShareRule:
    return ShareRule(
        config.sft.share,
        ordinals_under_way(config.schedule),
        config.schedule.samples_per_group * mean_row_tokens,
        config.algo.zero_variance == "skip" and not config.teacher,
    )


class TokenShare:
    """Chooses rows. `tokens_of` gives the number of learned tokens of a row by its number; `hear` must be told the tokens of
    every sampled group, and the first that is told counts."""

    def __init__(self, rule: ShareRule, tokens_of: Callable[[int], int]) -> None:
        self._rule, self._tokens_of = rule, tokens_of
        self._row_of = array("q")  # number of the row, or _PROBLEM, by ordinal, of all stages so far
        self._problem_of = array("q")
        self._heard: dict[int, int | None] = {}  # of stages that are not counted yet
        self._counted = self._num_rows = 0
        self._of_rows = self._of_answers = 0.0  # tokens, as they were taken to be when they were chosen
        self._each = rule.first_guess
        self.missing: list[int] = []  # ordinals whose tokens were not told in time, and count as none

    def row_of(self, ordinal: int) -> int | None:
        self._reach(ordinal)
        found = self._row_of[ordinal]
        return None if found == _PROBLEM else found

    def problem_of(self, ordinal: int) -> int:
        self._reach(ordinal)
        return self._problem_of[ordinal]

    def hear(self, ordinal: int, tokens: int | None) -> bool:
        """The tokens of a sampled group; None: it was dropped. False: they were known before, or it is a row."""
        if ordinal < self._counted or ordinal in self._heard or self.row_of(ordinal) is not None:
            return False
        self._heard[ordinal] = tokens
        return True

    def _reach(self, ordinal: int) -> None:
        while ordinal >= len(self._row_of):
            self._begin_stage()

    def _begin_stage(self) -> None:
        first, stage = len(self._row_of), self._rule.stage
        self._count(range(self._counted, max(self._counted, first - stage)))
        for _ in range(stage):
            self._choose()

    def _count(self, ordinals: range) -> None:
        sampled = [ordinal for ordinal in ordinals if self._row_of[ordinal] == _PROBLEM]
        self.missing += [ordinal for ordinal in sampled if ordinal not in self._heard]
        found = [tokens for one in sampled if (tokens := self._heard.pop(one, None)) is not None]
        if found:
            self._each = sum(found) / len(found)
        self._counted = ordinals.stop

    def _choose(self) -> None:
        ordinal, with_row = len(self._row_of), self._of_rows + self._tokens_of(self._num_rows)
        is_row = with_row <= self._rule.share * (with_row + self._of_answers)
        self._problem_of.append(ordinal - self._num_rows)
        self._row_of.append(self._num_rows if is_row else _PROBLEM)
        if is_row:
            self._num_rows, self._of_rows = self._num_rows + 1, with_row
        else:
            self._of_answers += self._each


class HeardTokens(Struct, frozen=True, array_like=True):
    """A line of the record: the learned tokens of a sampled group; None: dropped, or lost with a kill."""

    ordinal: int
    tokens: int | None


_encode = msgspec.json.Encoder().encode
_decode_rule = msgspec.json.Decoder(ShareRule).decode
_decode_heard = msgspec.json.Decoder(HeardTokens).decode


class RowShareLog:
    """The tokens of sampled groups in a folder, in the order in which they came; its first record is the rule. They are on
    disk before the version that their group helped to make is visible, so before any choice can depend on them."""

    def __init__(self, folder: Path, rule: ShareRule, tokens_of: Callable[[int], int]) -> None:
        self._rule, self._share = rule, TokenShare(rule, tokens_of)
        records = [record for _, record in read_records(folder)]
        try:
            known = _decode_rule(records[0]) if records else rule
            heard = [_decode_heard(record) for record in records[1:]]
        except msgspec.MsgspecError as error:
            raise InputError(f"{folder}: not the record of rows beside rollouts: {error}") from None
        if known != rule:
            raise InputError(f"--resume: sft: the rows or their settings are other ones than when {folder} was begun")
        for one in heard:
            self._share.hear(one.ordinal, one.tokens)
        self._num_missing = 0
        self._writer = SegmentWriter(folder)
        if not records:
            self._writer.append(_encode(rule))

    def row_of(self, ordinal: int) -> int | None:
        found = self._share.row_of(ordinal)
        self._write_missing()
        return found

    def problem_of(self, ordinal: int) -> int:
        return self._share.problem_of(ordinal)

    def choice(self, ordinal: int) -> Choice | None:
        return None

    def hear(self, ordinal: int, facts: GroupFacts | None) -> None:
        tokens = None if facts is None else 0 if facts.same_rewards and self._rule.skips_flat else facts.num_tokens
        if self._share.hear(ordinal, tokens):
            self._writer.append(_encode(HeardTokens(ordinal, tokens)))
        self._write_missing()

    def metrics(self, ordinals: Iterable[int]) -> Mapping[str, float]:
        return {}

    def sync(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()

    def _write_missing(self) -> None:
        """Only a kill can lose what should have been heard: it counts as none, for good."""
        for lost in self._share.missing[self._num_missing :]:
            self._writer.append(_encode(HeardTokens(lost, None)))
        self._num_missing = len(self._share.missing)
