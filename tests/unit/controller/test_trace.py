"""The worked trace in docs/architecture.md is what the controller really does."""

from __future__ import annotations

from pathlib import Path

from helpers.world import standard_line

from llamarl.config import EvaluateConfig, ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.types import GroupFacts

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
WORDS = {"version": "version", "ordinal": "group", "update": "update", "ordinals": "groups"}
GENERATOR, REWARD, TRAINER = (("generator/0", 0), ("reward/0", 0), ("trainer/0", 0))
FACTS = GroupFacts(num_tokens=8)
EVENTS: tuple[ev.AnyEvent, ...] = (
    ev.Began(),
    ev.Started(*GENERATOR),
    ev.Started(*REWARD),
    ev.Started(*TRAINER),
    ev.Published(*TRAINER, version=0),
    ev.Loaded(*GENERATOR, version=0),
    ev.GroupDone(*GENERATOR, ordinal=0, facts=FACTS),
    ev.GroupDone(*GENERATOR, ordinal=1, facts=FACTS),
    ev.GroupDone(*REWARD, ordinal=0, facts=FACTS),
    ev.GroupDone(*REWARD, ordinal=1, facts=FACTS),
    ev.BatchDone(*TRAINER, update=0),
    ev.Published(*TRAINER, version=1),
    ev.Loaded(*GENERATOR, version=1),
)


def in_words(said: ev.AnyEvent | ev.AnyCommand) -> str:
    parts = [type(said).__name__, getattr(said, "executor", "")]
    for field, word in WORDS.items():
        if (value := getattr(said, field, None)) is not None:
            parts.append(f"{word} {value}".replace("(", "").replace(")", "").replace(",", ""))
    return " ".join(filter(None, parts))


def trace() -> str:
    schedule = ScheduleConfig(updates=8, groups_per_update=2, samples_per_group=2, max_staleness=1)
    controller, lines = Controller(standard_line(capacity=12), schedule, EvaluateConfig(prompts=0)), list[str]()
    for number, event in enumerate(EVENTS, start=1):
        commands = [in_words(c) for c in controller.handle(event) if not isinstance(c, ev.Write | ev.Sync)]
        left = f"{number:>6}  {in_words(event)}"
        for command in commands or [""]:
            lines.append(f"{left:<42}{command}".rstrip())
            left = ""
    return "\n".join(lines)


def test_the_page_shows_what_the_controller_does() -> None:
    assert trace() in PAGE.read_text(), f"the trace is now:\n{trace()}"
