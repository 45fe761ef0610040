"""Calls of agents: whatever order events come in, and whoever dies, the rules hold; and a broken rule would be noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.agent_world import agent_line, play_agents

from llamarl.config import EvaluateConfig, ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller.calls import Calls
from llamarl.controller.controller import Controller
from llamarl.controller.evaluation import Evaluation
from llamarl.controller.line import Channel, Line, Role
from llamarl.errors import ConfigError
from llamarl.types import GroupFacts

SEEDS = 60


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_rule_is_broken_by_calls_deaths_and_impatience(first: int) -> None:
    answered = 0
    for seed in range(first, first + 50):
        answered += play_agents(seed).num_answered
    assert answered > 1000


def broken(play: Callable[[int], object] = play_agents) -> bool:
    for seed in range(SEEDS):
        try:
            play(seed)
        except (AssertionError, KeyError):
            return True
    return False


def test_a_call_answered_by_an_older_version_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Calls._choose
    monkeypatch.setattr(Calls, "_choose", lambda self, n, version, among: choose(self, n, 0, among))
    assert broken()


def test_a_call_that_is_lost_with_its_replica_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "_return_call", lambda self, call, reason: None)
    assert broken()


def test_an_evaluation_by_several_versions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluation, "replica_of", lambda self, ordinal: None)
    assert broken()


def test_calls_left_behind_by_a_dead_agent_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "_cancel_all", lambda self, ordinal: None)
    assert broken()


def test_a_replica_beyond_its_capacity_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Calls._choose
    monkeypatch.setattr(Calls, "_choose", lambda self, n, version, among: choose(self, -9, version, among))
    assert broken()


def controller(max_attempts: int = 3) -> Controller:
    settings = ScheduleConfig(
        updates=4, groups_per_update=1, samples_per_group=2, max_staleness=1, probe_every=0, max_attempts=max_attempts
    )
    made = Controller(agent_line(replicas=2), settings, EvaluateConfig(prompts=0))
    made.handle(ev.Began())
    for name in ("agent/0", "reward/0", "trainer/0", "generator/0", "generator/1"):
        made.handle(ev.Started(name, 0))
    made.handle(ev.Published("trainer/0", 0, 0))
    for name in ("generator/0", "generator/1"):
        made.handle(ev.Loaded(name, 0, 0))
    return made


def runs(commands: list[ev.AnyCommand]) -> list[tuple[str, int]]:
    return [(c.executor, c.ordinal) for c in commands if isinstance(c, ev.RunGroup)]


def test_a_call_whose_replica_dies_is_answered_by_another_under_the_same_number() -> None:
    made = controller()
    call = ev.FIRST_CALL
    assert runs(made.handle(ev.CallMade("agent/0", 0, call, 0, 1))) == [("generator/0", call)]
    assert runs(made.handle(ev.Died("generator/0", 0, "killed"))) == [("generator/1", call)]
    said = made.handle(ev.GroupDone("generator/1", 0, call, GroupFacts(1)))
    assert ev.Forget((call,)) in said


def test_a_call_that_kills_its_replicas_is_refused() -> None:
    made = controller(max_attempts=2)
    call = ev.FIRST_CALL
    made.handle(ev.CallMade("agent/0", 0, call, 0, 1))
    made.handle(ev.Died("generator/0", 0, "killed"))
    said = made.handle(ev.Died("generator/1", 0, "killed"))
    assert [(c.executor, c.call) for c in said if isinstance(c, ev.RefuseCall)] == [("agent/0", call)]
    assert call not in (made.calls or ())


def test_calls_wait_in_order_when_all_replicas_are_full() -> None:
    made = controller()
    calls = [ev.FIRST_CALL + number for number in range(10)]
    given = [run for call in calls for run in runs(made.handle(ev.CallMade("agent/0", 0, call, 0, 1)))]
    assert [call for _, call in given] == calls[:8]  # two replicas with room for four each
    assert runs(made.handle(ev.GroupDone("generator/1", 0, given[1][1], GroupFacts(1)))) == [("generator/1", calls[8])]


def test_a_group_that_leaves_its_agents_takes_its_calls_along() -> None:
    made = controller()
    made.handle(ev.CallMade("agent/0", 0, ev.FIRST_CALL, 0, 1))
    said = made.handle(ev.GroupFailed("agent/0", 0, 0, "the agent crashed"))
    assert ev.CancelCall("generator/0", 0, ev.FIRST_CALL) in said
    assert not made.executors["generator/0"].groups


def test_a_line_says_what_is_wrong_with_its_calls() -> None:
    roles = [
        Role(name="agent", unit="group", done="generated"),
        Role(name="generator", unit="call", done="answered"),
        Role(name="trainer", unit="batch", done="trained"),
    ]
    links = [Channel("a", "groups", "task", "agent"), Channel("b", "groups", "agent", "trainer")]
    with pytest.raises(ConfigError, match="'generator' needs unit=call and a channel of calls"):
        Line(roles, links)
    with pytest.raises(ConfigError, match="calls come from the first role"):
        Line(roles, [*links, Channel("c", "calls", "trainer", "generator")])
