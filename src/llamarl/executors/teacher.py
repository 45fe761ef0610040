"""Teachers with ranks of their own: they add their log-probs of sampled tokens to batches on their way to the trainer. Where
it learns whole distributions, they also leave their states for it, in the folder of the batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import BatchResult, Message, Report, SaveState, StateSaved, WorkOnBatch
from llamarl.train.endpoint_teacher import EndpointTeacher
from llamarl.train.sent_states import StateSender
from llamarl.train.teacher import Teachers
from llamarl.types import RolloutGroup


class Teacher:
    idle = True  # a batch is answered as soon as it arrives

    def __init__(self, teachers: Teachers | EndpointTeacher | StateSender) -> None:
        self._teachers = teachers

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnBatch():
                yield BatchResult(message.update, {}, self._taught(message))
            case SaveState():
                yield StateSaved(message.version, {})  # everything that it holds is in its model folder
            case _:
                raise UnexpectedMessage("teacher", message)

    def _taught(self, message: WorkOnBatch) -> tuple[RolloutGroup, ...]:
        if isinstance(self._teachers, StateSender):
            return self._teachers.send(message.groups, Path(message.folder))
        return self._teachers.add_column(message.groups)

    def work(self) -> Iterable[Report]:
        return ()
