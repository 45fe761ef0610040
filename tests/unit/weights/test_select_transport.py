"""The transport follows from where both ends are."""

from __future__ import annotations

import pytest

from llamarl.errors import ConfigError
from llamarl.weights.select_transport import Place, select_transport, settle_transport

CPU, GPU0, GPU1 = Place("here", "cpu"), Place("here", "cuda:0"), Place("here", "cuda:1")
FAR = Place("there", "cuda:0")


def test_gpus_of_one_host_share_device_memory() -> None:
    assert select_transport([GPU0], [GPU0]) == "cuda"
    assert select_transport([GPU0, GPU1], [GPU1]) == "cuda"


def test_where_a_cpu_takes_part_it_is_host_memory() -> None:
    assert select_transport([CPU], [CPU]) == "memfd"
    assert select_transport([CPU], [GPU0]) == "memfd"
    assert select_transport([GPU0], [GPU1, CPU]) == "memfd"


def test_gpus_that_cannot_reach_each_other_go_through_host_memory() -> None:
    assert select_transport([GPU0], [GPU1], can_reach=lambda reader, writer: False) == "memfd"
    assert select_transport([GPU0], [GPU0], can_reach=lambda reader, writer: False) == "cuda"


def test_the_user_may_save_device_memory_but_not_ask_for_what_cannot_work() -> None:
    assert settle_transport("memfd", "cuda") == "memfd"
    assert settle_transport("cuda", "cuda") == "cuda"
    assert [settle_transport("auto", found) for found in ("memfd", "cuda", "group")] == ["memfd", "cuda", "group"]
    for found in ("memfd", "group"):
        with pytest.raises(ConfigError, match=r"weights\.transport: cuda needs the trainer and all generators on GPUs"):
            settle_transport("cuda", found)


def test_between_hosts_it_is_a_process_group_over_a_network_that_the_user_trusts() -> None:
    with pytest.raises(ConfigError, match=r"engine\.trusted_network: weights would go from here to there"):
        select_transport([GPU0], [FAR])
    assert select_transport([GPU0], [FAR], "ib0") == "group"
