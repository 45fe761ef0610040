"""The reference: a policy that never changes. Batches pass it on their way to the trainer and get its log-probs."""

from __future__ import annotations

from collections.abc import Iterable

from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import BatchResult, Message, Report, SaveState, StateSaved, WorkOnBatch
from llamarl.train.policy import Policy
from llamarl.train.reference import add_reference_column


class Reference:
    idle = True  # a batch is answered as soon as it arrives

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnBatch():
                yield BatchResult(message.update, {}, add_reference_column(self._policy, message.groups))
            case SaveState():
                yield StateSaved(message.version, {})  # it has nothing that its model folder does not have
            case _:
                raise UnexpectedMessage("reference", message)

    def work(self) -> Iterable[Report]:
        return ()
