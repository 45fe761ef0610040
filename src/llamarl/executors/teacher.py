"""A teacher with ranks of its own: it adds its log-probs of sampled tokens to batches on their way to the trainer."""

from __future__ import annotations

from collections.abc import Iterable

from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import BatchResult, Message, Report, SaveState, StateSaved, WorkOnBatch
from llamarl.train.endpoint_teacher import EndpointTeacher
from llamarl.train.teacher import Teachers


class Teacher:
    idle = True  # a batch is answered as soon as it arrives

    def __init__(self, teachers: Teachers | EndpointTeacher) -> None:
        self._teachers = teachers

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnBatch():
                yield BatchResult(message.update, {}, self._teachers.add_column(message.groups))
            case SaveState():
                yield StateSaved(message.version, {})  # everything that it holds is in its model folder
            case _:
                raise UnexpectedMessage("teacher", message)

    def work(self) -> Iterable[Report]:
        return ()
