"""Rows that begin with the same pages stand side by side, so that these pages can be read once for all of them."""

from __future__ import annotations

from random import Random

from helpers.groups import prompt_group

from llamarl.generate.kv_splits import SharedCut, parts_of_long, shared_cut
from llamarl.generate.pages import PagePool
from llamarl.generate.scheduler import Scheduler
from llamarl.generate.sequences import DecodeBatch, Running, Sampled, make_batch

PAGE, STEPS = 4, 4


def scheduler_with(samples: list[int], prompt_tokens: int, slots: int = 64) -> Scheduler:
    scheduler = Scheduler(slots, PagePool(1000), PAGE)
    for ordinal, count in enumerate(samples):
        scheduler.add(prompt_group([1] * prompt_tokens, ordinal=ordinal, samples=count, max_new_tokens=30))
    scheduler.admit(0, STEPS)
    return scheduler


def pages_read(batch: DecodeBatch, running: dict[int, Running]) -> None:
    """Every row once; each reading's rows have the same pages there, and nobody skips without a reading."""
    assert sorted(batch.slots) == sorted(running)
    served: set[int] = set()
    for first, count in zip(batch.firsts, batch.counts, strict=True):
        rows = range(first, first + count)
        assert not served & set(rows)
        served |= set(rows)
        pages = batch.skips[first] // PAGE
        assert count > 1 and pages * PAGE == batch.skips[first] > 0
        assert len({tuple(running[batch.slots[row]].pages[:pages]) for row in rows}) == 1
        assert {batch.skips[row] for row in rows} == {batch.skips[first]}
    assert all(skip == 0 or row in served for row, skip in enumerate(batch.skips))


def test_the_samples_of_a_group_share_the_full_pages_of_their_prompt() -> None:
    scheduler = scheduler_with([8, 3, 1, 10], prompt_tokens=14)
    batch = make_batch(scheduler.running.values(), 8, PAGE)
    pages_read(batch, scheduler.running)
    assert sorted(batch.counts) == [2, 3, 8, 8]  # the group of one reads its prompt alone
    assert batch.saved_tokens == (7 + 2 + 7 + 1) * 12


def test_few_readings_of_long_prompts_are_cut_into_more_parts() -> None:
    """So that a GPU's memory is busy whatever the number of readings, without parts that hold next to nothing."""
    assert shared_cut(32 * 8, longest=384) == SharedCut(4, block=16)
    assert shared_cut(8 * 8, longest=8192 - 16) == SharedCut(4, block=64)
    assert shared_cut(4 * 8, longest=4096 - 16) == SharedCut(8, block=64)
    assert shared_cut(2, longest=65536) == SharedCut(16, block=64)
    assert shared_cut(4 * 8, longest=2000) == SharedCut(4, block=16)


def test_prompts_that_fill_no_page_share_nothing() -> None:
    scheduler = scheduler_with([8, 8], prompt_tokens=4)  # its last token is not in the cache yet
    batch = make_batch(scheduler.running.values(), 8, PAGE)
    assert batch.firsts == [] and set(batch.skips) == {0}
    assert batch.saved_tokens == 0


def test_whatever_runs_is_in_the_batch_once() -> None:
    random = Random(0)
    scheduler = scheduler_with([random.randint(1, 12) for _ in range(20)], prompt_tokens=22, slots=40)
    for _ in range(30):
        victim = random.choice(list(scheduler.running.values()))
        scheduler.pause(victim, Sampled([5] * random.randint(1, 9), [0.0] * 9, [0] * 9))
        scheduler.admit(0, STEPS)
        pages_read(make_batch(scheduler.running.values(), random.randint(2, 8), PAGE), scheduler.running)


def test_a_sequence_that_was_paused_has_pages_of_its_own() -> None:
    scheduler = scheduler_with([4], prompt_tokens=14)
    scheduler.pause(scheduler.youngest, Sampled([5], [0.0], [0]))
    scheduler.admit(0, STEPS)
    batch = make_batch(scheduler.running.values(), 8, PAGE)
    pages_read(batch, scheduler.running)
    assert batch.counts == [3]


def test_long_sequences_come_first_and_their_group_with_them() -> None:
    scheduler = scheduler_with([3, 2, 2], prompt_tokens=14)
    for one in scheduler.running.values():
        one.max_count = 20 if one.sequence.group.prompt.ordinal == 1 else one.slot
    batch = make_batch(scheduler.running.values(), 8, PAGE)
    pages_read(batch, scheduler.running)
    ordinals = [scheduler.running[slot].sequence.group.prompt.ordinal for slot in batch.slots]
    assert ordinals == [1, 1, 2, 2, 0, 0, 0]


def test_only_what_is_far_longer_than_the_rest_is_cut_and_into_as_many_parts_as_it_needs() -> None:
    assert parts_of_long([300, 300, 500]) == 0
    assert parts_of_long([4096] * 8) == 0
    assert parts_of_long([100] * 20 + [400]) == 0  # would be one part
    assert parts_of_long([300] * 20 + [900]) == 2
    assert parts_of_long([300] * 20 + [2150]) == 4
    assert parts_of_long([900] * 20 + [4096]) == parts_of_long([900] * 20 + [9000]) == 8
