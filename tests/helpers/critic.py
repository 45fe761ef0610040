"""A second training role: a critic that fits the mean reward and passes its value to the trainer as a column."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from llamarl.builders.context import BuildContext
from llamarl.executors.executor import Executor, UnexpectedMessage
from llamarl.messages import BatchResult, Message, Report, SaveState, StateSaved, WorkOnBatch
from llamarl.model.training_state import hash_file
from llamarl.types import Rollout, RolloutGroup, floats_to_bytes


class Critic:
    idle = True

    def __init__(self) -> None:
        self._value = torch.zeros(1, requires_grad=True)
        self._optimizer = torch.optim.SGD([self._value], lr=0.25)

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnBatch():
                rewards = torch.tensor([reward for group in message.groups for reward in group.rewards])
                loss = ((self._value - rewards) ** 2).mean()
                self._optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()
                groups = tuple(self._add_value(group) for group in message.groups)
                yield BatchResult(message.update, {"value": self._value.item(), "critic_loss": loss.item()}, groups)
            case SaveState():
                file = Path(message.folder) / "critic" / "critic.safetensors"
                file.parent.mkdir()
                save_file({"value": self._value.detach()}, file)
                yield StateSaved(message.version, {"critic/critic.safetensors": hash_file(file)})
            case _:
                raise UnexpectedMessage("critic", message)

    def work(self) -> Iterable[Report]:
        return ()

    def _add_value(self, group: RolloutGroup) -> RolloutGroup:
        value = self._value.item()
        return RolloutGroup(
            group.prompt,
            tuple(
                Rollout(one.completion, one.reward, {"values": floats_to_bytes([value] * one.completion.num_tokens)})
                for one in group.rollouts
            ),
        )


def build_critic(context: BuildContext) -> Executor:
    return Critic()
