"""A log replays its run, also one that an older release wrote."""

from __future__ import annotations

import msgspec
from helpers.world import World, standard_line

from llamarl.config import ScheduleConfig
from llamarl.controller.replay import replay, setting_of


def test_a_log_with_the_kinds_that_channels_once_had_replays_its_run() -> None:
    world = World(standard_line(), ScheduleConfig(updates=2, groups_per_update=1, samples_per_group=2))
    world.run(lambda count: 0)
    setting = msgspec.json.encode(setting_of(world.controller))
    old = setting.replace(b'"kind":"groups"', b'"kind":"scatter"', 1).replace(b'"kind":"groups"', b'"kind":"gather"')
    assert b"groups" in setting and b'"kind":"groups"' not in old
    for first in (setting, old):
        found = replay({0: [first, *map(msgspec.json.encode, world.history)]}, world.records)
        assert (found.difference, found.num_records) == ("", len(world.records))
