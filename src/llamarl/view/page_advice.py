"""Advice for the page: what the terminal says at once, and milder signs, each with its figure and the setting it is about."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import Struct

from llamarl.observe.advice import BASIS, WINDOW, advice_on, first_figures
from llamarl.view.run_reader import RunReader, flat
from llamarl.view.series import smoothed


class Advised(Struct, frozen=True):
    """One piece of advice."""

    text: str
    short: str  # the same in a few words
    metric: str  # the series that shows it
    value: float  # mean of that metric over the last updates
    setting: str
    now: str  # present value of the setting
    tone: str  # bad or fair


_Sign = tuple[str, float, int, str, str, str]
# metric, limit, +1: above it or -1: below it, setting, short words, long words with {value}
_SIGNS: tuple[_Sign, ...] = (
    (
        "zero_variance_share",
        0.4,
        1,
        "schedule.samples_per_group",
        "many groups without variance",
        "{value:.0%} of groups have no variance, so they teach nothing: harder (or easier) problems, or more samples",
    ),
    (
        "truncated_share",
        0.1,
        1,
        "generator.max_new_tokens",
        "many answers cut off",
        "{value:.0%} of the answers are cut off: raise the limit, or ask for shorter answers",
    ),
    (
        "effective_sample_size",
        0.5,
        -1,
        "schedule.max_staleness",
        "few effective samples",
        "the effective sample size is {value:.0%}: samples are far from the policy; lower the staleness or the learning rate",
    ),
    (
        "clipped_share",
        0.2,
        1,
        "algo.rho",
        "many tokens clipped",
        "{value:.0%} of the tokens are clipped: the policy moves far between sampling and training; lower trainer.lr",
    ),
    (
        "logprob_gap",
        0.05,
        1,
        "generator.dtype",
        "generator and trainer disagree",
        "generator and trainer differ by {value:.3f} per token on the same weights: use the same or a finer precision",
    ),
    (
        "skipped",
        0.0,
        1,
        "trainer.lr",
        "updates skipped",
        "{value:.0%} of the last updates were skipped, since loss or gradient was not a number; lower the learning rate",
    ),
)


def recent_means(run: RunReader) -> dict[str, float]:
    """Mean of each metric over the last updates."""
    found = {}
    for name in run.metrics.names:
        part = run.metrics.get(name)[-WINDOW:]
        known = part[~np.isnan(part)]
        if len(known):
            found[name] = float(known.mean())
    return found


def page_advice(run: RunReader) -> list[Advised]:
    means = recent_means(run)
    if not means:
        return []
    beside = {"best_reward": _best_reward(run), "reward_range": _reward_range(run)}
    given = advice_on(run.config, {**means, **first_figures(_first_of(run)), **beside})
    settings = flat(msgspec.to_builtins(run.config))
    found = [
        Advised(
            text=text,
            short=name,
            metric=BASIS[name][0],
            value=means.get(BASIS[name][0], 0.0),
            setting=BASIS[name][1],
            now=str(settings.get(BASIS[name][1], "")),
            tone="bad",
        )
        for name, text in given.items()
    ]
    told = {one.metric for one in found}
    if told & {"sampled_logprob", "reward"}:
        told.add("zero_variance_share")  # which they explain
    for metric, limit, side, setting, short, words in _SIGNS:
        value = means.get(metric)
        if value is not None and metric not in told and side * (value - limit) > 0:
            now = str(settings.get(setting, ""))
            found.append(Advised(words.format(value=value), short, metric, value, setting, now, "fair"))
    return found


def _first_of(run: RunReader) -> dict[str, float]:
    """Metrics of the first update."""
    found = {name: run.metrics.get(name)[:1] for name in run.metrics.names}
    return {name: float(part[0]) for name, part in found.items() if len(part) and not np.isnan(part[0])}


def _reward_range(run: RunReader) -> float:
    """Of the last updates: the largest mean reward minus the smallest; 1 if there are too few."""
    rewards = run.metrics.get("reward")[-WINDOW:]
    return float(np.ptp(rewards)) if len(rewards) == WINDOW and not np.isnan(rewards).any() else 1.0


def _best_reward(run: RunReader) -> float:
    """Highest mean reward of any window of updates."""
    rewards = smoothed(run.metrics.get("reward"), WINDOW)[WINDOW - 1 :]
    known = rewards[~np.isnan(rewards)]
    return float(known.max()) if len(known) else 0.0
