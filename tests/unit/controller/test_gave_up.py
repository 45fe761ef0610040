"""An executor that gives up ends the job at once, with its reason in the ledger; words of the dead do not."""

from __future__ import annotations

from llamarl.config import Config, EvaluateConfig, ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.default_line import default_line
from llamarl.controller.ledger import Closed


def test_giving_up_ends_the_job_with_the_reason() -> None:
    controller = Controller(default_line(Config()), ScheduleConfig(), EvaluateConfig())
    controller.handle(ev.Began())
    assert controller.handle(ev.GaveUp("reward/0", 7, "not mine")) == []
    commands = controller.handle(ev.GaveUp("reward/0", 0, "the scorer is broken"))
    assert commands == [
        ev.Write(Closed("stopped: the scorer is broken")),
        ev.Sync(),
        ev.Abort("the scorer is broken"),
    ]
    assert controller.finished
