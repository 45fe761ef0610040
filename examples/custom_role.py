"""A role of your own between reward and trainer. `python examples/custom_role.py [SETTING=VALUE ...]` runs a job with it.

It gives each token an advantage of its own: that of its answer, discounted by the distance from the answer's end. A role
that learns, such as a critic, also saves its state, and reads it again from `context.snapshot`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from msgspec.structs import replace

from llamarl import Job
from llamarl.algo.advantages import TOKEN_ADVANTAGES, group_advantages
from llamarl.builders.context import BuildContext
from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.controller.line import Channel, Line, Role
from llamarl.messages import BatchResult, Message, Report, SaveState, StateSaved, WorkOnBatch
from llamarl.types import Rollout, RolloutGroup, floats_to_bytes


class Discounter:
    idle = True  # every message is answered at once, so there is no work in between

    def __init__(self, context: BuildContext) -> None:
        """Called in the role's own process. `context` holds the config, and the snapshot to go on from, if there is one."""

    def handle(self, message: Message) -> Iterable[Report]:
        if isinstance(message, WorkOnBatch):  # the groups of one update come in and leave with one column more
            yield BatchResult(message.update, {}, tuple(map(discount, message.groups)))
        elif isinstance(message, SaveState):  # its part of a snapshot: no files
            yield StateSaved(message.version, {})

    def work(self) -> Iterable[Report]:
        return ()


def discount(group: RolloutGroup) -> RolloutGroup:
    return replace(group, rollouts=tuple(map(with_column, group.rollouts, group_advantages(group.rewards))))


def with_column(rollout: Rollout, advantage: float) -> Rollout:
    values = [advantage * 0.95**distance for distance in reversed(range(rollout.completion.num_tokens))]
    return replace(rollout, columns={**rollout.columns, TOKEN_ADVANTAGES: floats_to_bytes(values)})


def make_job(settings: list[str]) -> Job:
    line = default_line(config := load_config(None, settings))
    links = [channel for channel in line.channels if channel.name != "rollouts"]
    links += [Channel("rollouts", "groups", "reward", "discounter"), Channel("out", "groups", "discounter", "trainer")]
    role = Role(name="discounter", unit="batch", done="discounted", threads=1)
    return Job(config, line=Line([*line.roles, role], links), builders={"discounter": Discounter})


if __name__ == "__main__":
    summary = make_job(sys.argv[1:]).run()
    print(f"held-out accuracy {summary.eval_before} -> {summary.eval_after} after {summary.updates} updates")
