"""`llamarl runs` and `llamarl rollouts`: what runs there are, and what their policies wrote."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from llamarl.cli.printable import printable
from llamarl.errors import InputError
from llamarl.observe.display import format_seconds
from llamarl.observe.rollout_log import DamagedGroup, GroupPlace
from llamarl.runs.listing import RunEntry, find_runs, list_runs
from llamarl.runs.rollouts import KeptGroup, KeptRollout, RolloutReader
from llamarl.runs.run import Run
from llamarl.runs.to_json import rollout_row

_SHOWN_GROUPS = 3
_MAX_SHOWN = 60  # characters of a setting's value, or of an answer
_LEAST_ROOM = 40  # columns for settings beside the others; else they get lines of their own
_INDENT = 4


def runs_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where the runs are")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object for each run")] = False,
) -> None:
    """List the runs below FOLDER: state, updates, newest score, wall time and the settings in which they differ."""
    entries, problems = list_runs(list(find_runs(folder)))
    for problem in problems:
        print(f"llamarl: {printable(problem)}; left out", file=sys.stderr)
    if not entries:
        raise InputError(f"{folder}: holds no run")
    with suppress(BrokenPipeError):
        if as_json:
            for entry in entries:
                print(json.dumps(msgspec.to_builtins(entry)))
        else:
            print("\n".join(_table(entries, _columns())))


def _columns() -> int:
    """Columns of the terminal; elsewhere lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def _table(entries: list[RunEntry], columns: int = sys.maxsize) -> Iterator[str]:
    """Settings that do not fit into so many columns go on in the next line, or in lines of their own."""
    rows = [("run", "state", "update", "score", "wall time", "settings that differ"), *map(_cells, entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    beside = sum(widths) + 2 * len(widths)
    indent = beside if columns - beside >= _LEAST_ROOM else _INDENT
    for row in rows:
        start = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        settings = textwrap.wrap(row[5], max(1, columns - indent), break_on_hyphens=False)
        first = settings.pop(0) if settings and indent == beside else ""
        yield f"{start}  {first}".rstrip()
        yield from (" " * indent + more for more in settings)


def _cells(entry: RunEntry) -> tuple[str, ...]:
    score = "-" if entry.score is None else f"{entry.score:.3f}"
    settings = " ".join(f"{key}={_value(value)}" for key, value in entry.settings.items())
    return (
        printable(entry.folder),
        entry.state,
        f"{entry.updates} of {entry.of_updates}",
        score,
        format_seconds(entry.wall_s),
        settings,
    )


def _value(value: Any) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def rollouts_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    update: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="of this update; default: the newest one, with --json all of them"),
    ] = None,
    worst: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="only the K rollouts with the lowest reward")
    ] = None,
    best: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="only the K rollouts with the highest reward")
    ] = None,
    group: Annotated[int | None, typer.Option(metavar="ID", min=0, help="only the group with this number")] = None,
    all_groups: Annotated[bool, typer.Option("--all", help=f"all groups, not only the first {_SHOWN_GROUPS}")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object for each rollout")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="with --json: also tokens, versions and log-probs of each token")
    ] = False,
) -> None:
    """Print the rollouts that a run trained on: prompt, answers, rewards, advantages and what became of them."""
    chosen = [name for name, value in (("--worst", worst), ("--best", best), ("--group", group)) if value is not None]
    if len(chosen) > 1:
        raise InputError(f"{chosen[1]}: cannot take effect with {chosen[0]}; leave one of them out")
    if tokens and not as_json:
        raise InputError("--tokens: cannot take effect without --json")
    reader = Run(run).rollouts
    updates = _updates(run, reader, update, group, every=as_json)
    for line in reader.damage:
        print(f"llamarl: {printable(line)}", file=sys.stderr)
    with suppress(BrokenPipeError):
        for number in updates:
            selected = _selected(reader, number, worst, best, group)
            if as_json:
                _print_json(selected, tokens=tokens)
            else:
                _print_update(reader, number, selected, None if all_groups or chosen else _SHOWN_GROUPS)


Selected = Iterable[tuple[KeptGroup, tuple[KeptRollout, ...]]]


def _updates(run: Path, reader: RolloutReader, update: int | None, group: int | None, *, every: bool) -> list[int]:
    there = reader.updates
    if not there:
        raise InputError(f"{run}: holds no rollouts; none were trained yet, or observe.rollouts_mb=0")
    if group is not None:
        found = reader.find(group).update
        if update not in (None, found):
            raise InputError(f"--group {group}: is of update {found}, not {update}")
        return [found]
    if update is not None and update not in there:
        raise InputError(f"--update {update}: no rollouts of it; there are those of {there[0]} to {there[-1]}")
    return [update] if update is not None else there if every else there[-1:]


def _selected(reader: RolloutReader, update: int, worst: int | None, best: int | None, group: int | None) -> Selected:
    """Groups of an update with the rollouts to show. Only what is shown is read; a damaged group is left out with a line."""
    places = reader.places(update)
    if worst is None and best is None:
        for place in places:
            if group in (None, place.ordinal) and (read := _read(reader, place)):
                yield read, read.rollouts
        return
    sign, left, damaged = -1.0 if worst is None else 1.0, worst or best, set[int]()
    ranked = [(sign * reward, at, n) for at, place in enumerate(places) for n, reward in enumerate(place.rewards)]
    for _, at, number in sorted(ranked):
        if not left:
            return
        if at in damaged:
            continue
        if read := _read(reader, places[at]):
            left -= 1
            yield read, (read.rollouts[number],)
        else:
            damaged.add(at)


def _read(reader: RolloutReader, place: GroupPlace) -> KeptGroup | None:
    """A group; None, with a line, if it is damaged."""
    try:
        return reader.read(place)
    except DamagedGroup as error:
        print(f"llamarl: group {place.ordinal} is left out: {printable(str(error))}", file=sys.stderr)
        return None


def _print_json(selected: Selected, *, tokens: bool) -> None:
    for group, rollouts in selected:
        for rollout in rollouts:
            print(json.dumps(rollout_row(group, rollout, tokens=tokens)))


def _print_update(reader: RolloutReader, update: int, selected: Selected, count: int | None) -> None:
    kept = len(reader.places(update))
    print(f"update {update}: {kept} of {reader.num_groups(update)} groups are kept")
    last = None
    for group, rollouts in islice(selected, count):
        if group.ordinal != last:
            last = group.ordinal
            _print_prompt(group)
        for rollout in rollouts:
            _print_rollout(rollout)
    if count is not None and kept > count:
        print(f"\n{kept - count} more groups: --all")


def _print_prompt(group: KeptGroup) -> None:
    print(f"\ngroup {group.ordinal}: expected {printable(group.answer)}")
    if group.dropped:
        print(f"  dropped: {printable(group.dropped)}")
    print(_indented(group.prompt, "  > "))


def _print_rollout(rollout: KeptRollout) -> None:
    parts = " ".join(f"{printable(name)}={value:g}" for name, value in rollout.parts.items())
    facts = [
        *([f"player {rollout.player}"] if rollout.player else []),
        f"reward {rollout.reward:g}" + (f" ({parts})" if parts else ""),
        f"advantage {rollout.advantage:+.3f}",
        *([] if rollout.given is None else [f"answer {printable(rollout.given)[:_MAX_SHOWN]}"]),
        f"{(count := int(rollout.sampled.sum()))} token{'s' * (count != 1)}"
        + (" (cut off)" if rollout.truncated else ""),
        rollout.status + (f": {printable(rollout.reason)}" if rollout.reason else ""),
    ]
    print(f"\n  [{rollout.number}] {', '.join(facts)}")
    for turn in rollout.turns:
        print(_indented(turn.text, "      " if turn.role == "model" else "      reply> "))


def _indented(text: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in printable(text, lines=True).split("\n"))
