"""The simulation drives the real controller: its ledger is clean, its rules hold, and its times are those of the parts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from llamarl.config.file import load_config
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.default_line import default_line
from llamarl.controller.ledger import Issued, Record, Trained
from llamarl.controller.ledger_state import audit
from llamarl.model_spec import shape_named
from llamarl.observe.timeline import Timeline
from llamarl.plan.gpus import GPUS, BesideFactors
from llamarl.plan.lengths import Lengths
from llamarl.simulate.clock import Clock, Device
from llamarl.simulate.setup import SimulationSetup, make_simulation
from llamarl.simulate.simulation import Faults, SimulationResult
from llamarl.simulate.workers import QueueWorker, WorkItem

TAIL = "lognormal:median=200,sigma=1,max=1024"


def scene(*overrides: str, answers: str = TAIL, **more: Any) -> SimulationSetup:
    settings = [
        "schedule.updates=20",
        "schedule.groups_per_update=16",
        "schedule.samples_per_group=4",
        "generator.slots=128",
        "generator.max_new_tokens=1024",
        "generator.max_prompt_tokens=128",
        "evaluate.prompts=0",
        "snapshots.every=5",
        "schedule.probe_every=0",
        *overrides,
    ]
    return SimulationSetup(
        config=load_config(None, settings),
        shape=shape_named("llama-3.2-1b"),
        gpu=GPUS["h100"],
        answers=Lengths(answers),
        prompt=128,
        **more,
    )


def play(one: SimulationSetup) -> tuple[SimulationResult, list[Record]]:
    records: list[Record] = []
    return make_simulation(one, hear=records.append).run(), records


def test_it_is_the_real_controller_and_its_ledger_is_clean() -> None:
    simulation = make_simulation(scene())
    assert type(simulation.controller) is Controller
    found, records = play(scene("schedule.max_staleness=2", "generator.replicas=3", "evaluate.prompts=16"))
    report = audit(records)
    assert report.clean
    assert report.trained == 20 * 16
    assert found.updates == 20
    assert found.groups == 20 * 16


def test_its_events_tell_a_fresh_controller_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decided by the simulation: what it told replays, as a real run does."""
    one, heard = scene("evaluate.prompts=8"), list[Record]()
    simulation = make_simulation(one, hear=heard.append)
    told: list[ev.AnyEvent] = []
    handle = simulation.controller.handle

    def note(event: ev.AnyEvent) -> list[ev.AnyCommand]:
        told.append(event)
        return handle(event)

    monkeypatch.setattr(simulation.controller, "handle", note)
    simulation.run()
    config = one.config
    fresh = Controller(default_line(config), config.schedule, config.evaluate, config.snapshots)
    said = [command for event in told for command in fresh.handle(event)]
    assert [command.record for command in said if isinstance(command, ev.Write)] == heard


@pytest.mark.parametrize(("share", "staleness"), [(0.25, 0), (0.5, 1), (0.75, 3)])
def test_dynamic_sampling_generates_as_many_groups_as_the_formula_says(share: float, staleness: int) -> None:
    """P / (1 - q) for an update; the sum over 60 updates is within four standard deviations of a negative binomial."""
    one = scene(
        "schedule.updates=60",
        "schedule.dynamic_sampling=1000",
        f"schedule.max_staleness={staleness}",
        answers="fixed:32",
        skipped=share,
    )
    found, records = play(one)
    report, trained = audit(records), 60 * 16
    assert report.clean
    assert (report.trained, report.num_groups) == (trained, trained + found.replaced)
    assert found.groups == trained
    spread = (trained * share) ** 0.5 / (1 - share)
    assert abs(report.num_groups - trained / (1 - share)) < 4 * spread


def test_without_dynamic_sampling_flat_groups_are_trained_and_none_is_replaced() -> None:
    found, records = play(scene(skipped=0.5))
    assert found.replaced == 0
    assert audit(records).num_groups == 20 * 16


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_bound_on_staleness_holds(staleness: int) -> None:
    found, records = play(scene(f"schedule.max_staleness={staleness}"))
    version = {record.ordinal: record.version for record in records if isinstance(record, Issued)}
    ages = [
        record.update - version[ordinal]
        for record in records
        if isinstance(record, Trained)
        for ordinal in record.ordinals
    ]
    assert 0 <= min(ages) <= max(ages) <= staleness
    assert sum(found.staleness.values()) == pytest.approx(1)
    assert max(found.staleness) == max(ages)


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = play(scene()), play(scene())
    assert one[1] == other[1]
    assert one[0].wall_s == other[0].wall_s
    assert play(scene("seed=1"))[0].wall_s != one[0].wall_s


def test_synchronous_is_the_sum_of_its_parts_and_asynchronous_no_more_than_the_longer_one() -> None:
    """Answers of one length, so that there is no tail. Two batches may be under way: each takes at least half of the sum."""
    sync = scene("schedule.max_staleness=0", "placement=colocated", answers="fixed:300")
    split = scene("schedule.max_staleness=1", answers="fixed:300")
    replica, trainer = sync.replica, sync.trainer
    train_s = trainer.update_s(make_simulation(sync).answers.batch(sync.gpu, tuple(range(16))))
    generate_s = replica.drain_s(64, 64, 4, sync.answers)
    together, apart = play(sync)[0].update_s, play(split)[0].update_s
    assert together == pytest.approx(train_s + generate_s, rel=0.05)
    assert 0.99 * max(train_s, together / 2) < apart < 1.02 * max(train_s, generate_s)


def test_one_gpu_for_both_gives_each_half_of_it() -> None:
    two, one = play(scene(answers="fixed:300"))[0], play(scene(answers="fixed:300", gpus=1))[0]
    sync = play(scene("schedule.max_staleness=0", "placement=colocated", answers="fixed:300"))[0]
    assert two.update_s < one.update_s
    assert one.update_s == pytest.approx(sync.update_s, rel=0.15), "sharing one device gains nothing but the tail"


def test_side_by_side_both_do_more_than_in_turn() -> None:
    """As with MPS: 1 s of each one's work, the generator's at a quarter of its speed until the trainer ends."""
    clock = Clock(Timeline())
    device = Device(beside=BesideFactors(generator=0.25, trainer=0.75))
    seats = []
    for name in ("generator/0", "trainer/0"):
        done = ev.BatchDone(name, 0, 0)
        clock.seat(QueueWorker(name, lambda _, done=done: WorkItem(1.0, "work", done)), device)  # type: ignore[misc]
        seats.append(clock.send(name, ev.RunBatch(name, 0, 0, ())))
    clock.look(seats)
    ended = dict[str, float]()
    while events := clock.next():
        ended |= {event.executor: clock.now_s for event in events if isinstance(event, ev.BatchDone)}
    assert ended == {"trainer/0": pytest.approx(4 / 3), "generator/0": pytest.approx(4 / 3 + 2 / 3)}


def test_a_trainer_on_a_part_of_the_gpu_leaves_the_rest_to_the_generator_and_is_slower_alone_too() -> None:
    device = Device(beside=BesideFactors(generator=0.25, trainer=0.75, trainer_on_part=1.2), trainer_share=0.5)
    for busy, speeds in (
        ({"generator": 1, "trainer": 1}, (0.625, 0.375)),
        ({"trainer": 1}, (1.0, 0.6)),
        ({"generator": 1}, (1.0, 0.375)),
    ):
        device.busy = Counter(busy)
        assert device.speeds_now() == speeds
    waits, took = [], []
    for share in (1.0, 0.3):
        setup = scene("engine.mps=on", f"engine.mps_trainer_share={share}", answers="fixed:300", gpus=1)
        found = play(setup)[0]
        waits.append(found.idle_share["trainer"])
        took.append(found.update_s)
    assert waits[1] < waits[0] and took[0] < took[1]


@pytest.mark.parametrize(
    ("settings", "gpus", "beside"),
    [
        (["engine.mps=on"], 1, True),
        (["engine.mps=auto"], 1, True),
        (["engine.mps=off"], 1, False),
        (["engine.mps=auto"], 2, False),  # a GPU for each
        (["engine.mps=auto", "engine=monarch"], 1, False),
        (["engine.mps=auto", "placement=colocated", "schedule.max_staleness=0"], 1, False),
    ],
)
def test_a_job_on_one_gpu_takes_turns_or_not_as_its_settings_say(settings: list[str], gpus: int, beside: bool) -> None:
    job, plain = (scene(*some, answers="fixed:300", gpus=gpus) for some in (settings, [*settings, "engine.mps=off"]))
    faster = play(job)[0].update_s < 0.97 * play(plain)[0].update_s
    assert job.computes_beside == faster == beside


def test_more_staleness_and_more_replicas_are_never_slower() -> None:
    times = [play(scene(f"schedule.max_staleness={age}"))[0].update_s for age in (1, 2, 4)]
    assert times[0] >= times[1] * 0.999 >= times[2] * 0.998
    slow = scene("schedule.groups_per_update=128", "schedule.updates=5")
    more = replace(slow, config=replace(slow.config, generator=replace(slow.config.generator, replicas=4)))
    assert play(more)[0].update_s < 0.8 * play(slow)[0].update_s, "128 slots do not hold 512 answers, four times 128 do"


def test_faults_cost_time_and_lose_nothing() -> None:
    quiet, _ = play(scene("schedule.updates=60"))
    faults = Faults(mtbf_s=quiet.wall_s / 4, restart_s=quiet.update_s * 3, seed=3)
    found, records = play(scene("schedule.updates=60", "schedule.max_attempts=1000", faults=faults))
    assert found.deaths > 2
    assert found.wall_s > quiet.wall_s
    report = audit(records)
    assert report.clean
    assert report.trained == 60 * 16
    assert report.rewinds == 0 or found.redone_updates > 0


def test_idle_shares_are_those_of_the_parts() -> None:
    found = play(scene("schedule.max_staleness=0", "placement=colocated"))[0]
    busy = [1 - found.idle_share[role] for role in ("trainer", "generator")]
    assert sum(busy) == pytest.approx(1, abs=0.1), "they take turns"
    assert all(0 < share < 1 for share in busy)


def test_it_stops_after_the_hours_it_was_given() -> None:
    found = play(scene("schedule.updates=1000", max_s=60.0))[0]
    assert 60 <= found.wall_s < 70
    assert found.updates < 1000
