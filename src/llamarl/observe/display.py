"""What the terminal shows while a job runs."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from msgspec import Struct
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_SECONDS_BETWEEN_LINES = 5.0
_ATTENTION = "NOTE: "  # begins a note that the user should act on


class Progress(Struct, frozen=True):
    """The state of a job after an update. Tokens and time count from this start of the job."""

    update: int
    updates: int
    metrics: dict[str, float]
    tokens_generated: int
    tokens_trained: int
    elapsed_s: float
    waiting: dict[str, float]  # share of the last seconds that each executor waited
    accuracy: float | None  # mean score of the newest evaluation
    score_failures: int = 0  # failed attempts to score an answer so far
    score_timeouts: int = 0
    tool_failures: int = 0  # failed calls of a tool so far
    tool_timeouts: int = 0
    updates_before: int = 0  # updates made by earlier starts of the job
    score_name: str = "accuracy"  # name of `accuracy`: "accuracy" or "mean reward"

    @property
    def generated_per_s(self) -> float:
        return self.tokens_generated / max(1e-9, self.elapsed_s)

    @property
    def trained_per_s(self) -> float:
        return self.tokens_trained / max(1e-9, self.elapsed_s)

    @property
    def left_s(self) -> float:
        return self.elapsed_s / max(1, self.update - self.updates_before) * (self.updates - self.update)


class Display(Protocol):
    """Shows the progress of a job to the user."""

    def progress(self, done: int, of: int) -> None:
        """Show, before the first update, how many of the answers it needs are scored."""

    def update(self, snapshot: Progress) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Quiet:
    """A display that shows nothing."""

    def progress(self, done: int, of: int) -> None:
        pass

    def update(self, snapshot: Progress) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Unwatched(Quiet):
    """A display that shows nothing, but makes a warning of Python's of what needs attention."""

    def note(self, text: str) -> None:
        if text.startswith(_ATTENTION):
            with suppress(Warning):  # where warnings are errors, a note must not end the job
                warnings.warn(text.removeprefix(_ATTENTION), stacklevel=2)


class Lines:
    """Prints plain lines: the first and the last update, and at most one line every few seconds between them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_s = time.monotonic()
        self._began = False  # whether an update has been shown

    def progress(self, done: int, of: int) -> None:
        if self._is_time():
            self._console.print(progress_of(done, of), highlight=False, soft_wrap=True)

    def update(self, snapshot: Progress) -> None:
        if self._is_time() or not self._began or snapshot.update == snapshot.updates:
            self._began = True
            self._console.print(line_of(snapshot), highlight=False, soft_wrap=True)

    def _is_time(self) -> bool:
        due = time.monotonic() - self._last_s >= _SECONDS_BETWEEN_LINES
        if due:
            self._last_s = time.monotonic()
        return due

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        pass


class LiveView:
    """A panel for a terminal that is redrawn in place; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text("starting ..."), console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def progress(self, done: int, of: int) -> None:
        self._live.update(Text(progress_of(done, of)))

    def update(self, snapshot: Progress) -> None:
        self._live.update(panel_of(snapshot))

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._live.stop()


class LastingConsole(Console):
    """A console whose reader may leave, as `head` does: nothing more is shown then, and the job goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_display(console: Console, *, quiet: bool) -> Display:
    """The display that suits a console: a live panel on a terminal, plain lines otherwise."""
    if quiet:
        return Quiet()
    return LiveView(console) if console.is_terminal else Lines(console)


def progress_of(done: int, of: int) -> str:
    return f"{done} of {of} answers for the next update" + ("; training" if done == of else "")


def answers_of(metrics: dict[str, float]) -> str:
    """Mean length of the answers, share of cut-off answers, and share of groups without variance."""
    if "answer_tokens" not in metrics:
        return ""
    return (
        f"length {metrics['answer_tokens']:.0f}  cut off {metrics.get('truncated_share', 0.0):.0%}  "
        f"no variance {metrics.get('zero_variance_share', 0.0):.0%}  "
    )


def streams_of(metrics: Mapping[str, float]) -> str:
    """What each stream of an update says of itself: the reward, the loss on rows of data, the KL to a teacher, and how much
    a critic on the trainer's ranks explains."""
    named = (
        ("reward", "reward"),
        ("sft_loss", "loss on the rows"),
        ("teacher_kl", "KL to the teacher"),
        ("explained_variance", "explained"),
    )
    found = [f"{name} {metrics[key]:.3f}  " for key, name in named if key in metrics]
    return "".join(found) or f"reward {0.0:.3f}  "


def line_of(snapshot: Progress) -> str:
    """A snapshot as one line of text."""
    metrics = snapshot.metrics
    waiting = " ".join(f"{executor} {share:.0%}" for executor, share in snapshot.waiting.items())
    return (
        f"update {snapshot.update:>4} of {snapshot.updates}  {streams_of(metrics)}"
        f"{answers_of(metrics)}"
        f"staleness {metrics.get('staleness_mean', 0.0):.2f}  "
        f"generated {snapshot.generated_per_s:,.0f} tok/s  trained {snapshot.trained_per_s:,.0f} tok/s  "
        f"{unjudged(snapshot.score_failures, snapshot.score_timeouts)}"
        f"{without_reply(snapshot.tool_failures, snapshot.tool_timeouts)}"
        f"waiting: {waiting}  {format_seconds(snapshot.left_s)} left"
    )


def unjudged(failures: int, timeouts: int) -> str:
    """Counts of answers that could not be scored; empty if there are none."""
    return f"not judged {failures} failed, {timeouts} late  " if failures or timeouts else ""


def without_reply(failures: int, timeouts: int) -> str:
    """Counts of tool calls without a reply; empty if there are none."""
    return f"tools {failures} failed, {timeouts} late  " if failures or timeouts else ""


def panel_of(snapshot: Progress) -> Group:
    """A snapshot as a panel for the live view."""
    metrics = snapshot.metrics
    facts = Table.grid(padding=(0, 3))
    accuracy = "-" if snapshot.accuracy is None else f"{snapshot.accuracy:.3f}"
    facts.add_row("reward", f"{metrics.get('reward', 0.0):.3f}", f"held-out {snapshot.score_name}", accuracy)
    facts.add_row(
        "staleness",
        f"{metrics.get('staleness_mean', 0.0):.2f} (max {metrics.get('staleness_max', 0.0):.0f})",
        "effective sample size",
        f"{metrics.get('effective_sample_size', 1.0):.3f}",
    )
    facts.add_row(
        "generated", f"{snapshot.generated_per_s:,.0f} tok/s", "trained", f"{snapshot.trained_per_s:,.0f} tok/s"
    )
    if "sft_loss" in metrics or "teacher_kl" in metrics:
        facts.add_row("streams", streams_of(metrics))
    if answers := answers_of(metrics):
        facts.add_row("answers", answers)
    if said := unjudged(snapshot.score_failures, snapshot.score_timeouts):
        facts.add_row("scorer", said)
    if said := without_reply(snapshot.tool_failures, snapshot.tool_timeouts):
        facts.add_row("tools", said)
    waits = Table.grid(padding=(0, 3))
    for executor, share in snapshot.waiting.items():
        waits.add_row(executor, ProgressBar(total=1.0, completed=1.0 - share, width=30), f"waits {share:.0%}")
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"update {snapshot.update} of {snapshot.updates}", style="bold"),
        ProgressBar(total=snapshot.updates, completed=snapshot.update, width=40),
        f"{format_seconds(snapshot.left_s)} left",
    )
    return Group(head, facts, waits)


def format_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02} min"
