"""Probes are answered by the version that is about to be trained, whoever dies meanwhile, and hold up nothing else."""

from __future__ import annotations

from helpers.world import World, standard_line
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller.probe import probed_version


def schedule(every: int, staleness: int = 1) -> ScheduleConfig:
    return ScheduleConfig(
        updates=9,
        groups_per_update=2,
        samples_per_group=2,
        max_staleness=staleness,
        probe_every=every,
        max_restarts=99,
        max_attempts=99,
    )


class ProbeWorld(World):
    """Also sees that a probe is only given to a replica with the weights that are to be probed."""

    def _obey(self, command: ev.AnyCommand) -> None:
        if isinstance(command, ev.RunGroup) and command.kind == "probe":
            assert self.holds[command.executor] == probed_version(command.ordinal) == self.controller.newest
        super()._obey(command)


def probes_of(world: World) -> dict[int, int | None]:
    """By update, as the trainer got them the first time that the update was made."""
    found: dict[int, int | None] = {}
    for command in world.commands:
        if isinstance(command, ev.RunBatch):
            version = None if command.probe is None else probed_version(command.probe)
            assert version in (None, command.update)
            found.setdefault(command.update, version)
    return found


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_every_due_update_has_its_probe_whatever_dies(data: st.DataObject, every: int, staleness: int) -> None:
    world = ProbeWorld(
        standard_line(replicas=2, capacity=6), schedule(every, staleness), prompts=2, every=3, save_every=2
    )
    kills = 0
    while world.end is None:
        assert world.outstanding, "deadlock"
        if kills < 6 and data.draw(st.integers(0, 9)) == 0:
            kills += 1
            world.kill(data.draw(st.sampled_from(["generator/0", "generator/1", "reward/0", "trainer/0"])))
        else:
            world.complete(data.draw(st.integers(0, len(world.outstanding) - 1)))
    world.check_end()
    for update, version in probes_of(world).items():
        due = update > 0 and update % every == 0
        assert version == (update if due else None)
    asked = {c.ordinal for c in world.commands if isinstance(c, ev.RunGroup) and c.kind == "probe"}
    assert asked <= world.forgotten, "a probe is kept for ever"


def test_without_staleness_there_is_nothing_to_probe() -> None:
    world = ProbeWorld(standard_line(), schedule(1, staleness=0))
    world.run(lambda count: 0)
    world.check_end()
    assert set(probes_of(world).values()) == {None}


def test_a_probe_that_cannot_be_answered_is_done_without() -> None:
    world = ProbeWorld(standard_line(), schedule(2))
    while world.end is None:
        command = world.outstanding[0]
        refuse = isinstance(command, ev.RunGroup) and command.kind == "probe"
        world.complete(0, fail="the prompt is empty" if refuse else "")
    world.check_end()
    assert set(probes_of(world).values()) == {None}
