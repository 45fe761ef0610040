"""The reference: a policy that never changes. It adds its log-probs to batches on their way to the trainer."""

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
                yield StateSaved(message.version, {})  # everything that it holds is in its model folder
            case _:
                raise UnexpectedMessage("reference", message)

    def work(self) -> Iterable[Report]:
        return ()
