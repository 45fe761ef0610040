"""Settings that let any example run in seconds on a CPU, with the tiny model in place of a real one."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
BRIEF = [
    "engine=inline",
    "schedule.updates=2",
    "schedule.groups_per_update=4",
    "schedule.samples_per_group=4",
    "generator.slots=32",
    "evaluate.prompts=8",
    "trainer.warmup_updates=0",
]
# The tiny model knows digits and 256 positions. It cannot solve word problems, but everything around it is real.
TINY = [
    "model.path=tiny",
    "task.chat=false",
    "task.template='{prompt}'",
    "generator.max_prompt_tokens=128",
    "generator.max_new_tokens=8",
]
