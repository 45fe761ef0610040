"""Which shapes are captured, and when. What a graph computes is tested on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import lively_model

from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.graphs import _WORTH, Graphs
from llamarl.generate.kv_splits import parts_of_long, parts_up_to
from llamarl.generate.limits import Limits
from llamarl.generate.sequences import DecodeBatch


def test_a_shape_that_occurs_now_and_then_is_not_worth_a_capture() -> None:
    graphs = Graphs(torch.device("cpu"))
    assert graphs.worth("seldom"), "without graphs nothing is captured, and nothing costs"
    graphs.enabled = True
    assert [graphs.worth("often") for _ in range(_WORTH + 1)] == [False] * _WORTH + [True]
    assert not graphs.worth("another")


def choosing_device(slots: int, beside: int = 0) -> Any:
    """On a GPU, as far as the choice of graphs goes."""
    limits = Limits(slots=slots, max_prompt_tokens=8, max_new_tokens=8, prefill_beside=beside)
    device: Any = ContinuousDecoder(lively_model(), limits, eos_ids=(), seed=0)._device
    device._on_gpu = device._graphs.enabled = True
    device._graphs._capture = lambda body: SimpleNamespace(replay=body)
    return device


def test_all_slots_take_part_until_a_graph_of_fewer_rows_is_worth_its_capture() -> None:
    device = choosing_device(slots=32)
    for _ in range(_WORTH + 2):
        device._decode_of(DecodeBatch(slots=[5, 9, 2], firsts=[], counts=[], skips=[0] * 3), 8, False)
    assert [key[:2] for key in device._graphs._captured] == [("decode", 32), ("decode", 4)]
    assert device._batch[0, :4].tolist() == [5, 9, 2, 32], "the row without a sequence points to nobody's slot"


def test_parts_make_a_graph_of_its_own_only_where_sequences_are_cut_by_their_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = choosing_device(slots=32), choosing_device(slots=1024)
    for parts in (0, 2, 8):
        few._decode_of(DecodeBatch(slots=[5], firsts=[], counts=[], skips=[0], parts=parts), 8, False)
        many._decode_of(DecodeBatch(slots=[5], firsts=[], counts=[], skips=[0], parts=parts), 8, False)
    assert len(few._graphs._captured) == 1 and len(many._graphs._captured) == 3
    monkeypatch.setattr("llamarl.generate.device_runner._SHARING_BYTES", 1)
    for parts in (0, 8):
        sharing = DecodeBatch(slots=[5, 6], firsts=[0], counts=[2], skips=[8, 8], parts=parts)
        many._decode_of(sharing, 8, False)
    assert len(many._graphs._captured) == 4, "prompts that are read once for many rows are never cut by length"


def test_graphs_that_most_jobs_need_are_captured_before_the_work() -> None:
    device = choosing_device(slots=256)
    for capture in device.preparations(8, 1024, 2048, filtered=False):
        capture()
    captured = [key[1:] for key in device._graphs._captured]
    assert captured[0] == (256, 8, False, 0, None, False, False), "all slots first: every job needs that"
    assert [width for width, *_ in captured[-3:]] == [4, 2, 1]
    assert device._batch[0].tolist() == [256] * 256, "nobody's slot: a capture must not touch a sequence"
    device._decode_of(DecodeBatch(slots=[5, 9, 2], firsts=[], counts=[], skips=[0] * 3), 8, False)
    assert len(device._graphs._captured) == len(captured)
    assert device._batch[0, :4].tolist() == [5, 9, 2, 256], "a graph that is there is used at once"


def test_bursts_that_read_prompts_are_captured_before_the_work_where_there_are_any() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamarl.generate.decoder.beside_rows", lambda limits, device: limits.prefill_beside)
        device, without = choosing_device(slots=32, beside=4), choosing_device(slots=32)
    for capture in [
        *device.preparations(1, 1024, 2048, filtered=False),
        *without.preparations(1, 1024, 2048, filtered=False),
    ]:
        capture()
    beside = [key[1] for key in device._graphs._captured if key[-1]]
    assert beside == [32], "only full batches read beside their answers"
    assert without._graphs._captured and not any(key[-1] for key in without._graphs._captured)


def test_parts_are_prepared_up_to_what_the_longest_sequence_needs() -> None:
    assert parts_up_to(512) == ()
    for longest in (513, 1024, 2000, 5000, 100_000):
        possible = {parts_of_long([length, *[1] * 30]) for length in range(1, min(longest, 6000) + 1)}
        assert {0, *parts_up_to(longest)} == possible
