"""The curriculum of a job: its choices while it runs, and the record from which they are made again after a kill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from llamarl.errors import InputError
from llamarl.io.record_log import SegmentWriter, read_records
from llamarl.tasks.curriculum import Choice, Curriculum, CurriculumRule, Outcome, standing_metrics
from llamarl.types import GroupFacts

_encode = msgspec.json.Encoder().encode
_decode_rule = msgspec.json.Decoder(CurriculumRule).decode
_decode_outcome = msgspec.json.Decoder(Outcome).decode


class OutcomeLog(Protocol):
    """What hears the outcome of every group, and chooses problems, or which groups are rows, by it."""

    def choice(self, ordinal: int) -> Choice | None:
        """The problem of an ordinal; None: the next one in the order of the data."""

    def hear(self, ordinal: int, facts: GroupFacts | None) -> None:
        """What is known of a group that was scored; None: it was dropped."""

    def metrics(self, ordinals: Iterable[int]) -> Mapping[str, float]:
        """What an update on these groups reports."""

    def sync(self) -> None: ...

    def close(self) -> None: ...


class NoCurriculum:
    """Problems come in the order of the data."""

    def choice(self, ordinal: int) -> Choice | None:
        return None

    def hear(self, ordinal: int, facts: GroupFacts | None) -> None:
        pass

    def metrics(self, ordinals: Iterable[int]) -> Mapping[str, float]:
        return {}

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class CurriculumLog:
    """Outcomes in the folder, in the order in which they came; its first record is the rule. An outcome is on disk before
    the version that its group helped to make is visible, so before any choice can depend on it."""

    def __init__(self, folder: Path, rule: CurriculumRule) -> None:
        self._curriculum = Curriculum(rule)
        known, outcomes = read_curriculum(folder)
        if known is not None and known != rule:
            raise InputError(
                f"--resume: task.curriculum: the data or its settings are other ones than when {folder} was begun; "
                "problems could not be told apart"
            )
        for outcome in outcomes:
            self._curriculum.hear(outcome.ordinal, outcome.reward)
        self._writer = SegmentWriter(folder)
        self._num_missing = 0
        if known is None:
            self._writer.append(_encode(rule))

    def choice(self, ordinal: int) -> Choice:
        found = self._curriculum.choice(ordinal)
        for lost in self._curriculum.missing[
            self._num_missing :
        ]:  # only a kill can lose it: it counts as none, for good
            self._write(lost, None)
        self._num_missing = len(self._curriculum.missing)
        return found

    def hear(self, ordinal: int, facts: GroupFacts | None) -> None:
        reward = None if facts is None else facts.reward
        if self._curriculum.hear(ordinal, reward):
            self._write(ordinal, reward)

    def metrics(self, ordinals: Iterable[int]) -> Mapping[str, float]:
        return standing_metrics(self._curriculum.standing(min(ordinals)))

    def sync(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()

    def _write(self, ordinal: int, reward: float | None) -> None:
        chosen = self._curriculum.choice(ordinal)
        self._writer.append(_encode(Outcome(ordinal, chosen.part, chosen.number, reward)))


def read_curriculum(folder: Path) -> tuple[CurriculumRule | None, list[Outcome]]:
    """The rule and the outcomes that a run has recorded; None: it has recorded nothing."""
    records = [record for _, record in read_records(folder)]
    try:
        rule = _decode_rule(records[0]) if records else None
        return rule, [_decode_outcome(record) for record in records[1:]]
    except msgspec.MsgspecError as error:
        raise InputError(f"{folder}: not the record of a curriculum: {error}") from None
