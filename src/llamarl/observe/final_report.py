"""The report printed at the end of a job: what was learned, and where the time went."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from llamarl.observe.display import format_seconds
from llamarl.observe.starts import Starts
from llamarl.observe.summary import MemoryUsed, Summary


def print_report(console: Console, summary: Summary, folder: Path) -> None:
    for line in report_lines(summary, folder):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def report_lines(summary: Summary, folder: Path) -> list[str]:
    """The report on a job, line by line."""
    lines = [""]
    if summary.eval_before is not None and summary.eval_after is not None:
        label = f"held-out {summary.score_name}"
        lines.append(f"{label:<18} {summary.eval_before:.3f} -> {summary.eval_after:.3f}")
    waiting = ", ".join(f"{role} {share:.0%}" for role, share in sorted(summary.idle_share.items()))
    if isinstance(summary.sft_loss, float):
        lines.append(f"loss on the rows   {summary.sft_loss:.3f} in the last update")
    if not isinstance(summary.sft_loss, float) or summary.reward_first or summary.reward_last:
        lines.append(f"reward             {summary.reward_first:.3f} -> {summary.reward_last:.3f}")
    lines += [
        f"updates            {_updates(summary)} in {format_seconds(summary.train_s)}"
        f" (whole run {format_seconds(summary.wall_s)})",
        f"groups             {summary.groups_trained} trained"
        + (f" ({flat} without variance)" if (flat := summary.groups_without_variance) else "")
        + f", {summary.groups_dropped} dropped"
        + (f", {summary.groups_replaced} replaced" if summary.groups_replaced else "")
        + ("; none had anything to learn from" if summary.groups_trained and not summary.tokens_trained else ""),
        *(
            [f"skipped            {summary.skipped} updates: loss or gradient was not a number"]
            if summary.skipped
            else []
        ),
        *(
            [
                f"scorer             failed {summary.score_failures} times, was late {summary.score_timeouts} times: "
                "tried again or dropped, never taken for wrong"
            ]
            if summary.score_failures or summary.score_timeouts
            else []
        ),
        *(
            [f"tools              failed {summary.tool_failures} times, were late {summary.tool_timeouts} times"]
            if summary.tool_failures or summary.tool_timeouts
            else []
        ),
        *_agents(summary),
        *(
            [f"staleness          mean {summary.staleness_mean:.2f}, max {summary.staleness_max}"]
            if summary.tokens_trained
            else []
        ),
        f"tokens             {summary.tokens_generated:,} generated, {summary.tokens_trained:,} trained",
        f"time spent waiting {waiting}",
    ]
    if isinstance(summary.memory, MemoryUsed):
        lines.append(f"memory             {summary.memory.described()}")
    if summary.policy:
        lines.append(f"policy             {folder / summary.policy}")
    lines += [f"NOTE: {advice}" for advice in summary.advice]
    for path in Starts(folder).several_versions():
        lines.append(f"NOTE: {path} was changed between starts: scores of before and after may not be comparable")
    if summary.outcome != "finished":
        lines.append(f"{summary.outcome}; go on with: {resume_command(folder)}")
    return lines


def _updates(summary: Summary) -> str:
    if not summary.updates_before:
        return str(summary.updates)
    return f"{summary.updates}, {summary.updates - summary.updates_before} of them since the last start,"


def resume_command(folder: Path) -> str:
    return f"llamarl train --run {shlex.quote(str(folder))} --resume"


def _agents(summary: Summary) -> list[str]:
    counts = summary.agents
    if not isinstance(counts, dict) or not counts.get("agent_sessions"):
        return []
    calls, sessions = counts["agent_calls"], counts["agent_sessions"]
    unmatched = counts["agent_unmatched"] / max(1, calls)
    lines = [
        f"agents             {sessions:,} sessions, {calls / sessions:.1f} calls and "
        f"{counts['agent_branches'] / sessions:.2f} branches each; {unmatched:.1%} of calls with another history"
    ]
    if counts["agent_failures"] or counts["agent_timeouts"]:
        lines.append(
            f"agents             failed {counts['agent_failures']} times, were late {counts['agent_timeouts']} times: "
            "tried again or dropped, never taken for wrong"
        )
    if counts.get("agent_restarts"):
        lines.append(f"agents             the environment server was started again {counts['agent_restarts']} times")
    return lines
