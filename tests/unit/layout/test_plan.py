"""A plan brings every byte that a target wants exactly once, from a rank that holds it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from helpers.layouts import Ends, ends
from hypothesis import given, settings

from llamarl.errors import InputError
from llamarl.layout.boxes import Box, intersect, relative, shape_of, split_rows, subtract, volume, whole
from llamarl.layout.plan import MIN_SHARED_BYTES, Resharding, ShardSpec, TransferPlan, plan_transfer, reshardings_of


def plan_of(found: Ends, item_bytes: int = 2) -> TransferPlan:
    sides = [
        [{name: ShardSpec(box, item_bytes) for name, box in rank.items()} for rank in side]
        for side in (found.sources, found.targets)
    ]
    return plan_transfer(reshardings_of(*sides), len(found.sources), len(found.targets))


@settings(deadline=None, max_examples=150)
@given(ends())
def test_every_element_is_received_exactly_once_from_a_rank_that_holds_it(found: Ends) -> None:
    plan = plan_of(found)
    received = [{name: np.zeros(shape_of(box)) for name, box in rank.items()} for rank in found.targets]
    for move in plan:
        assert intersect(move.box, found.sources[move.source][move.source_name]) == move.box
        assert intersect(move.box, found.targets[move.target][move.target_name]) == move.box
        frame = found.targets[move.target][move.target_name]
        received[move.target][move.target_name][relative(move.box, frame)] += 1
    assert all((count == 1).all() for rank in received for count in rank.values())


@settings(deadline=None, max_examples=50)
@given(ends())
def test_the_bytes_it_states_are_those_of_its_moves_and_the_minimum(found: Ends) -> None:
    plan = plan_of(found, item_bytes=4)
    moved = [(move.source, move.target, 4 * volume(move.box)) for move in plan]
    assert plan.sent_bytes == [sum(n for s, _, n in moved if s == rank) for rank in range(plan.num_sources)]
    assert plan.received_bytes == [sum(n for _, t, n in moved if t == rank) for rank in range(plan.num_targets)]
    wanted = sum(4 * volume(box) for rank in found.targets for box in rank.values())
    assert plan.total_bytes == plan.minimum_bytes == wanted


def replicated(num_sources: int, num_targets: int, names: int, rows: int = 1 << 12) -> TransferPlan:
    box: Box = ((0, rows), (0, 1 << 10))
    kind = Resharding(tuple((f"p{i}", f"p{i}") for i in range(names)), 2, (box,) * num_sources, (box,) * num_targets)
    return plan_transfer([kind], num_sources, num_targets)


@pytest.mark.parametrize(("sources", "targets"), [(4, 1), (8, 3), (3, 8), (1, 4), (5, 5)])
def test_ranks_that_hold_the_same_share_the_work(sources: int, targets: int) -> None:
    sent = replicated(sources, targets, names=2).sent_bytes
    assert max(sent) <= 1.01 * sum(sent) / len(sent)


def test_small_pieces_are_not_cut_only_to_be_spread() -> None:
    rows = MIN_SHARED_BYTES // (2 * (1 << 10))
    assert len(list(replicated(8, 1, names=1, rows=rows))) == 1
    assert len(list(replicated(8, 1, names=1, rows=4 * rows))) == 4


def test_a_tied_head_is_taken_from_the_embedding() -> None:
    embedding = ShardSpec(((0, 8), (0, 4)), 2)
    halves = [{"lm_head.weight": ShardSpec(((first, first + 4), (0, 4)), 2)} for first in (0, 4)]
    plan = plan_transfer(reshardings_of([{"model.embed_tokens.weight": embedding}], halves), 1, 2)
    assert {(move.source_name, move.target_name, move.box[0]) for move in plan} == {
        ("model.embed_tokens.weight", "lm_head.weight", rows) for rows in ((0, 4), (4, 8))
    }


def test_what_nobody_holds_is_named() -> None:
    wanted = {"w": ShardSpec(((0, 8), (2, 6)), 2)}
    with pytest.raises(InputError, match="'w' is held by no source"):
        reshardings_of([{}], [wanted])
    halves = reshardings_of([{"w": ShardSpec(((0, 4), (0, 6)), 2)}], [wanted])
    with pytest.raises(InputError, match=r"no source holds w\[4:8, 2:6\]"):
        plan_transfer(halves, 1, 1)
    with pytest.raises(InputError, match="'w' travels in another type"):
        reshardings_of([{"w": ShardSpec(((0, 8), (0, 6)), 4)}], [wanted])


def test_what_nobody_asks_for_is_not_sent() -> None:
    held = {name: ShardSpec(((0, 4),), 2) for name in "ab"}
    plan = plan_transfer(reshardings_of([held], [{"a": held["a"]}]), 1, 1)
    assert {move.source_name for move in plan} == {"a"}


def test_boxes_minus_boxes() -> None:
    box: Box = ((0, 5), (2, 7), (1, 3))
    cells = np.zeros((5, 7, 3), dtype=int)
    for first, second in product(((0, 5), (1, 3)), ((2, 7), (3, 4), (2, 5))):
        cut = intersect(box, (first, second, (1, 2)))
        cells[:] = 0
        for piece in (*subtract(box, cut), cut):
            cells[tuple(slice(*edges) for edges in piece)] += 1
        assert cells.sum() == volume(box) == (cells == 1).sum()


def test_rows_are_cut_without_gaps() -> None:
    box = whole((10, 3))
    for parts in range(1, 13):
        pieces = split_rows(box, parts)
        assert [pieces[0][0][0], *(piece[0][1] for piece in pieces)][-1] == 10
        assert sum(map(volume, pieces)) == 30
        assert len(pieces) <= parts
    assert split_rows((), 4) == [()]
