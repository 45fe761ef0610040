"""Which GPU each rank takes where the config leaves it to us."""

from __future__ import annotations

import pytest
import torch

from llamarl.builders.devices import describe_devices, device_of, first_gpu
from llamarl.config import Config
from llamarl.config.file import load_config

SPLIT = ["trainer.data=2", "generator.replicas=2", "generator.tensor=2", "algo.reference_kl=0.1"]
ROLES = {"trainer": 2, "generator": 4, "reference": 1}


def gpus(config: Config, role: str, count: int) -> set[int | None]:
    return {device_of("x", "auto", first_gpu(config, role) + number).index for number in range(count)}


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


def test_a_job_says_what_it_computes_on_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["trainer.data=2", "generator.replicas=2"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert describe_devices(config) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert describe_devices(config) == ["generator on cuda:2, cuda:3; trainer on cuda:0, cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert describe_devices(config) == ["generator on cuda:0; trainer on cuda:0"]
