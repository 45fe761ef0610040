"""Claim 3: asynchronous (the run of claim 1) against synchronous (0, co-located: generator and trainer take turns) on GSM8K
with answers of up to 512 tokens: time of an update, share of it that the trainer waits, and how long the GPU is idle.

    python benchmarks/claims/async_against_sync.py [--runs FOLDER] [KEY=VALUE ...]

The same updates of both runs are compared, so the same prompts.
"""

from __future__ import annotations

from typing import Any

from arms import ASYNC, SYNC, Figures, Record, Window, as_figures, keep, made, read_options
from plot import bars
from windows import steady

from llamarl.config.file import load_config
from llamarl.observe.run_folder import CONFIG


def main() -> None:
    options = read_options(__doc__)
    sync, asynchronous = made(SYNC, options), made(ASYNC, options)
    first = steady(sync)
    second = steady(asynchronous, first.last - first.first + 1)
    arms = {"sync": measured(sync, first), "async": measured(asynchronous, second)}
    print(f"{'':8}  {'update':>8}  {'tokens':>8}  {'trainer waits':>13}  {'generator waits':>15}  {'GPU idle':>8}")
    for name, row in arms.items():
        idle = "-" if row["gpu_idle"] is None else f"{row['gpu_idle']:.1%}"
        shares = f"{row['trainer_waits']:13.1%}  {row['generator_waits']:15.1%}  {idle:>8}"
        print(f"{name:8}  {row['update_s']:6.2f} s  {row['answer_tokens']:8,.0f}  {shares}")
    gain = arms["sync"]["update_s"] / arms["async"]["update_s"]
    print(f"async is {gain:.2f} times as fast")
    staleness = load_config(options.runs / ASYNC.name / CONFIG).schedule.max_staleness
    keep("async_against_sync", options, {**arms, "gain": gain, "max_staleness": staleness}, picture)


def picture(figures: Figures) -> str:
    asynchronous = f"async (S = {figures.get('max_staleness', 1)})"
    values = {"sync (S = 0)": figures["sync"]["update_s"], asynchronous: figures["async"]["update_s"]}
    return bars("Sync against async, GSM8K, answers up to 512 tokens", "seconds an update", values, " s")


def measured(record: Record, window: Window) -> dict[str, Any]:
    return {
        **as_figures(window),
        "answer_tokens": record.answer_tokens(window),
        "trainer_waits": record.waiting("trainer/0", window),
        "generator_waits": record.waiting("generator/0", window),
        "gpu_idle": record.gpu_idle(window),
    }


if __name__ == "__main__":
    main()
