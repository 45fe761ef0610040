"""Settled groups become batches: each ordinal once, in order or nearly so, whatever the order they settle in."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from llamarl.controller.window import Window

sizes, widths, batches, seeds = st.integers(1, 5), st.integers(1, 12), st.integers(1, 8), st.integers(0, 2**32)


def settled_in(order: list[int], size: int, width: int) -> list[tuple[int, ...]]:
    window = Window(size, width)
    return [batch for ordinal in order for batch in window.settle(ordinal)]


def shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    Random(seed).shuffle(order)
    return order


@given(sizes, widths, batches, seeds)
def test_every_ordinal_is_in_exactly_one_batch_of_the_right_size(size: int, width: int, count: int, seed: int) -> None:
    found = settled_in(shuffled(size * count, seed), size, width)
    assert all(len(batch) == size for batch in found)
    assert sorted(ordinal for batch in found for ordinal in batch) == list(range(size * count))


@given(sizes, widths, batches, seeds)
def test_at_most_width_minus_one_younger_groups_pass_an_older(size: int, width: int, count: int, seed: int) -> None:
    found = settled_in(shuffled(size * count, seed), size, width)
    batch_of = {ordinal: number for number, batch in enumerate(found) for ordinal in batch}
    for ordinal, number in batch_of.items():
        passed_by = [other for other in batch_of if other > ordinal and batch_of[other] < number]
        assert len(passed_by) <= width - 1


@given(sizes, batches, seeds)
def test_a_width_of_one_gives_consecutive_ordinals(size: int, count: int, seed: int) -> None:
    found = settled_in(shuffled(size * count, seed), size, width=1)
    assert found == [tuple(range(number * size, (number + 1) * size)) for number in range(count)]


@given(sizes, widths, batches, seeds)
def test_a_batch_closes_as_soon_as_the_rules_let_it(size: int, width: int, count: int, seed: int) -> None:
    """Against the rule said plainly: take the smallest settled ordinal while it lies in [oldest, oldest + width)."""
    window = Window(size, width)
    settled: set[int] = set()
    taken: list[int] = []
    for ordinal in shuffled(size * count, seed):
        settled.add(ordinal)
        closed_before = len(taken) // size
        while settled:
            oldest = next(number for number in range(size * count) if number not in taken)
            if min(settled) >= oldest + width:
                break
            taken.append(min(settled))
            settled.remove(min(settled))
        expected = [
            tuple(sorted(taken[number * size : (number + 1) * size]))
            for number in range(closed_before, len(taken) // size)
        ]
        assert window.settle(ordinal) == expected


def test_a_full_width_window_never_waits_for_a_slow_group_until_all_others_have_passed() -> None:
    assert settled_in([3, 2, 1, 0], size=1, width=4) == [(3,), (2,), (1,), (0,)]
    assert settled_in([3, 2, 1, 0], size=1, width=3) == [(2,), (1,), (0,), (3,)]
