"""Which GPU each rank takes where the config leaves it to us."""

from __future__ import annotations

import pytest
import torch

from llamarl.builders.devices import describe_devices, device_of
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.controller.gpu_numbers import first_gpus
from llamarl.controller.line import Channel, Line, Role

SPLIT = ["trainer.data=2", "generator.replicas=2", "generator.tensor=2", "algo.reference_kl=0.1"]
ROLES = {"trainer": 2, "generator": 4, "reference": 1}


def gpus(config: Config, role: str, count: int) -> set[int | None]:
    first = first_gpus(default_line(config), config.placement)[role]
    return {device_of("x", "auto", first + number).index for number in range(count)}


def test_side_by_side_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = load_config(None, SPLIT)
    taken = [gpus(config, role, count) for role, count in ROLES.items()]
    assert [len(some) for some in taken] == list(ROLES.values())
    assert len(set.union(*taken)) == sum(ROLES.values()), "two ranks share a GPU though there are enough"


def test_co_located_roles_share_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = load_config(
        None, ["placement=colocated", "schedule.max_staleness=0", "trainer.data=4", "generator.replicas=4"]
    )
    assert gpus(config, "trainer", 4) == gpus(config, "generator", 4) == {0, 1, 2, 3}


def test_one_gpu_serves_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert {index for role, count in ROLES.items() for index in gpus(load_config(None, SPLIT), role, count)} == {0}


def test_a_role_of_ones_own_takes_the_next_gpus_and_the_others_keep_theirs() -> None:
    config = load_config(None, [*SPLIT, "reward_model.path=x"])
    line = default_line(config)
    channels = [channel for channel in line.channels if channel.target != "trainer"]
    critic = Role(name="critic", unit="batch", done="valued", ranks=3, gpu=True)
    links = [Channel("referenced", "groups", "reference", "critic"), Channel("valued", "groups", "critic", "trainer")]
    found = first_gpus(Line([*line.roles, critic], [*channels, *links]), "split")
    assert first_gpus(line, "split") == {"trainer": 0, "generator": 2, "reference": 6, "reward_model": 7}
    assert found == {"trainer": 0, "generator": 2, "critic": 6, "reference": 9, "reward_model": 10}


def test_a_job_says_what_it_computes_on_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["trainer.data=2", "generator.replicas=2"])
    numbers = first_gpus(default_line(config), "split")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert describe_devices(config, numbers) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert describe_devices(config, numbers) == ["generator on cuda:2, cuda:3; trainer on cuda:0, cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert describe_devices(config, numbers) == ["generator on cuda:0; trainer on cuda:0"]
