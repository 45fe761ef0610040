"""A critic with ranks of its own: it gives advantages to batches on their way to the trainer, and learns from them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import BatchResult, Message, MustStop, Report, SaveState, WorkOnBatch
from llamarl.train.critic import Critic, OutOfOrder
from llamarl.train.state import critic_state
from llamarl.train.state_saver import StateSaver


class CriticExecutor:
    """No state is saved of version `policy_only_at`."""

    def __init__(self, critic: Critic, *, carry_from: Path, policy_only_at: int | None = None) -> None:
        self._critic = critic
        states = [critic_state(critic.learner.policy, critic.learner.optimizer, carry_from)]
        self._saver = StateSaver(states, critic.learner.policy.computing.mesh, policy_only_at=policy_only_at)

    @property
    def idle(self) -> bool:
        """A batch is answered as soon as it arrives. Between messages a snapshot is written."""
        return self._saver.idle

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnBatch():
                yield self._work_on(message)
            case SaveState():
                self._saver.begin(message)
            case _:
                raise UnexpectedMessage("critic", message)

    def _work_on(self, message: WorkOnBatch) -> Report:
        try:
            done = self._critic.work_on(message.update, message.groups)
        except OutOfOrder as error:
            return MustStop(str(error))
        return BatchResult(message.update, done.metrics, done.groups, timings=done.timings)

    def work(self) -> Iterable[Report]:
        return self._saver.work()
