"""What an executor says goes out at once, but for groups that were quickly done while more of them wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import pytest
from helpers.groups import prompt_group

from llamarl.engine import rank_loop
from llamarl.engine.envelope import Envelope
from llamarl.engine.ranks import Ranks
from llamarl.engine.runner import Runner
from llamarl.messages import GroupRefused, Message, PublishWeights, Report, Stop, Up, WeightsPublished, WorkOnGroup

SLOW, POISON = 3, 7  # ordinals
QUICK_S = 0.2  # far above what a busy machine adds to nothing


@pytest.fixture(autouse=True)
def slower_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_loop, "_QUICK_S", QUICK_S)


class Judge:
    """Answers every group with its ordinal: quickly, slowly or not at all."""

    idle = True

    def handle(self, message: Message) -> Iterable[Report]:
        if isinstance(message, PublishWeights):
            return [WeightsPublished(message.version, 1, True)]
        assert isinstance(message, WorkOnGroup)
        if message.group.ordinal == POISON:
            raise ValueError("poison")
        if message.group.ordinal == SLOW:
            time.sleep(1.5 * QUICK_S)
        return [GroupRefused(message.group.ordinal, "")]

    def work(self) -> Iterable[Report]:
        raise AssertionError("it is idle")


class Preparing(Judge):
    """Prepares itself in one slice, before anything else."""

    preparing = "compile"

    @property
    def idle(self) -> bool:  # type: ignore[override]
        return not self.preparing

    def work(self) -> Iterable[Report]:
        self.preparing = ""
        return []


class Script:
    """An inbox that has been filled before; `None` is a moment in which it is empty."""

    last_sent_s = 0.0

    def __init__(self, messages: Sequence[Message | None]) -> None:
        self._messages = list(messages)
        self.said: list[list[int]] = []  # ordinals, or minus the version, by envelope

    def next(self, *, wait: bool) -> Message | None:
        message = self._messages.pop(0)
        while wait and message is None:
            message = self._messages.pop(0)
        return message

    def send(self, envelope: Envelope) -> None:
        self.last_sent_s = time.monotonic()
        said = [
            report.ordinal if isinstance(report, GroupRefused) else -report.version
            for report in envelope.reports
            if isinstance(report, GroupRefused | WeightsPublished)
        ]
        if said:
            self.said.append(said)
        else:
            assert envelope.reports in ((Up(),), ())


def group(ordinal: int) -> WorkOnGroup:
    return WorkOnGroup(prompt_group([1], ordinal=ordinal))


def said_to(*messages: Message | None) -> list[list[int]]:
    connection = Script([*messages, None, Stop()])
    rank_loop.run_rank(Judge, connection, Ranks(0, 1))
    return connection.said


def test_groups_that_wait_together_are_answered_together() -> None:
    assert said_to(group(0), group(1), group(2)) == [[0, 1, 2]]


def test_nothing_waits_for_a_group_that_has_not_come() -> None:
    assert said_to(group(0), None, group(1)) == [[0], [1]]


def test_what_took_long_is_said_at_once() -> None:
    assert said_to(group(SLOW), group(4), group(5)) == [[SLOW], [4, 5]]


def test_groups_are_answered_before_anything_else_begins() -> None:
    assert said_to(group(0), group(1), PublishWeights(9), group(2)) == [[0, 1], [-9], [2]]


def test_what_was_done_before_a_failure_is_said() -> None:
    connection = Script([group(0), group(1), group(POISON)])
    with pytest.raises(ValueError, match="poison"):
        rank_loop.run_rank(Judge, connection, Ranks(0, 1))
    assert connection.said == [[0, 1]]


def test_the_phases_of_a_start_are_told() -> None:
    runner = Runner(Preparing())
    runner.note_start(time.monotonic() - 1)
    runner.work()
    assert [(span.kind, span.name) for span in runner.envelope().spans] == [("work", "start"), ("work", "compile")]
