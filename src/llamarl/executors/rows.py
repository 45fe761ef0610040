"""The first role of a job that samples nothing: rows of data in, rollouts out."""

from __future__ import annotations

from collections.abc import Iterable

from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import GroupResult, Message, Report, WorkOnGroup
from llamarl.types import PromptGroup, WrittenAnswer, unjudged, written_group


class RowReader:
    """Every row counts as written by the version that is trained on it, so none is stale."""

    idle = True  # a row is answered as soon as it arrives

    def __init__(self, rows_per_update: int) -> None:
        self._rows_per_update = rows_per_update

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnGroup(group=PromptGroup(written=WrittenAnswer()) as group):
                version = group.ordinal // self._rows_per_update
                yield GroupResult(unjudged(written_group(group, version)))
            case _:
                raise UnexpectedMessage("reader of rows", message)

    def work(self) -> Iterable[Report]:
        return ()
