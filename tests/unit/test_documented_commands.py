"""Commands that README and docs print are ones that exist, with options that exist; those that are cheap run as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers.cli import llamarl

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/cli.md"}),
]  # which is made from them
_LINE = re.compile(r"^(?:\$ | {4}|)(?:.*\| )?llamarl (.+?)(?:\s+#.*)?$", re.MULTILINE)
_INLINE = re.compile(r"`llamarl ([a-z][^`]*)`")


def commands() -> list[tuple[str, str]]:
    """(page, what follows `llamarl`), with optional parts in brackets taken as given."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        lines = [*_LINE.findall(text), *(" ".join(words.split()) for words in _INLINE.findall(text))]
        found += [(page.name, re.sub(r"[\[\]]", "", line)) for line in lines]
    return sorted(set(found))


def test_there_are_commands_to_look_at() -> None:
    assert len(commands()) > 30


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda value: value[:60])
def test_a_printed_command_and_its_options_exist(page: str, command: str) -> None:
    words = shlex.split(command.partition(" < ")[0].partition(" > ")[0])
    depth = 2 if words[0] in ("bench", "env") and len(words) > 1 and not words[1].startswith("-") else 1
    code, out, err = llamarl(*words[:depth], "--help")
    assert code == 0, f"{page}: llamarl {command}: {err}"
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert option in out, f"{page}: llamarl {command}: no option {option}"


def test_the_tours_planning_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(llamarl("config").out)
    printed = [command for page, command in commands() if page == "tour.md"]
    planning = [command for command in printed if command.startswith(("plan ", "simulate "))]
    assert len(planning) == 3
    for command in sorted(planning):  # `plan` writes what one `simulate` reads
        small = ["schedule.updates=4"] if command.startswith("simulate") else []
        code, _, err = llamarl(*shlex.split(command), *small)
        assert code == 0, f"llamarl {command}: {err}"
