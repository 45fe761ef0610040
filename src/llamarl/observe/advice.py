"""Advice on a run that does not learn: what is wrong, why, and which setting to change.

Pure functions from rows of metrics to lines of text. Each piece of advice is given once while the job runs, and again at
its end if it still holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from llamarl.config import Config
from llamarl.config.in_vain import scored_by
from llamarl.plugins import is_reference

WINDOW = 10  # number of recent updates that advice is based on
_MOST = 0.9
_HALF = 0.5
_ROUNDING = 1e-6
_SURE, _UNSURE = (
    -0.02,
    -0.1,
)  # log-probs of sampled tokens; above the first, answers to a prompt are nearly always the same
Means = Mapping[str, float]  # mean of each metric over the recent updates
Rule = Callable[[Config, Means], str]


def _got_worse(config: Config, means: Means) -> str:
    best, now = means.get("best_reward", 0.0), means.get("reward", 0.0)
    if best <= 0 or now > _HALF * best or _collapsed(config, means):
        return ""
    return (
        f"the policy got worse: mean reward {best:.3f} -> {now:.3f}; go back to an earlier snapshot and lower trainer.lr "
        f"(now {config.trainer.lr:g})"
    )


def _collapsed(config: Config, means: Means) -> str:
    """The policy has become sure of one answer, and it is not a better one. At low temperatures it is sure from the start."""
    share, reward = means.get("zero_variance_share", 0.0), means.get("reward", 0.0)
    before, now = means.get("first_logprob", 0.0), means.get("sampled_logprob", -1.0)
    if _learns_otherwise(config) or share < _MOST or now < _SURE or before > _UNSURE or reward > means["first_reward"]:
        return ""
    return (
        f"the policy gives nearly the same answer each time: the mean log-prob of its tokens is {now:.4f} (at first "
        f"{before:.2f}), the reward {reward:.3f} (at first {means['first_reward']:.3f}); go back to an earlier snapshot, "
        f"and lower trainer.lr (now {config.trainer.lr:g}) or set algo.entropy (now {config.algo.entropy:g})"
    )


def _same_reward(config: Config, means: Means) -> str:
    reward, share = means.get("reward", 0.0), means.get("zero_variance_share", 0.0)
    same = share == 1 and means.get("reward_range", 1.0) < _ROUNDING and reward
    if _learns_otherwise(config) or not same or _collapsed(config, means):
        return ""
    return (
        f"every answer of the last updates got the same reward, {reward:.3f}: if not all of them are right, the scorer does "
        "not look at what they differ by (try it on a right and a wrong one: llamarl score); if they are, take harder data"
    )


def _learns_otherwise(config: Config) -> bool:
    """Also from groups whose answers all have the same reward."""
    return bool(config.teacher) or config.has_critic


def _no_variance(config: Config, means: Means) -> str:
    share = means.get("zero_variance_share", 0.0)
    nearer = (_collapsed, _got_worse, _same_reward)  # to what is wrong
    if share < _MOST or _learns_otherwise(config) or any(rule(config, means) for rule in nearer):
        return ""
    if is_reference(config.reward.scorer):
        told = "see whether your function gives parts of an answer a part of the reward"
    elif scored_by(config, "numeric", "math", "reasoning_gym"):
        told = "set reward.answer_from"
    else:
        told = "set reward.scorer to numeric, or to a function of your own"
    return (
        f"{share:.0%} of the groups have the same reward for all their answers (mean {means.get('reward', 0.0):.3f}), so "
        "there is next to nothing to learn from; read some (llamarl rollouts RUN --worst 5); if the format is missed: "
        f"{told}, task.template, task.few_shot; if the task is too hard or too easy: other data, a larger "
        f"schedule.samples_per_group (now {config.schedule.samples_per_group}) or generator.temperature "
        f"(now {config.generator.temperature:g})"
    )


def _cut_off(config: Config, means: Means) -> str:
    share = means.get("truncated_share", 0.0)
    if share < _HALF or _got_worse(config, means):
        return ""
    return (
        f"{share:.0%} of the answers are cut off at generator.max_new_tokens={config.generator.max_new_tokens} "
        f"(mean length {means.get('answer_tokens', 0.0):.0f}); raise it, or ask for shorter answers"
    )


def _no_tokens(config: Config, means: Means) -> str:
    if means.get("trained_tokens", 0.0) or means.get("zero_variance_share", 0.0) >= _MOST or not means.get("groups"):
        return ""
    masked = " and algo.overlong=mask leaves out answers that are cut off" if config.algo.overlong == "mask" else ""
    return (
        "no token was trained on in the last updates: groups without variance are skipped "
        f"(algo.zero_variance=skip){masked}"
    )


def _empty_batches(config: Config, means: Means) -> str:
    groups = config.schedule.groups_per_update
    left = means.get("groups", float(groups)) / groups
    if left > _HALF:
        return ""
    return (
        f"{1 - left:.0%} of the groups were dropped before they could be trained on; "
        "`llamarl audit RUN` lists the reasons, among them prompts longer than "
        f"generator.max_prompt_tokens={config.generator.max_prompt_tokens}"
    )


def _budget_used_up(config: Config, means: Means) -> str:
    share = means.get("replacements_used_up", 0.0)
    if share < _MOST or means.get("zero_variance_share", 0.0) >= _MOST:
        return ""
    return (
        f"schedule.dynamic_sampling={config.schedule.dynamic_sampling} was used up in {share:.0%} of the last updates, and "
        f"{means.get('no_variance_share', 0.0):.0%} of all groups had no variance; raise it, or choose easier or harder data"
    )


_RULES: dict[str, Rule] = {
    "collapsed": _collapsed,
    "got worse": _got_worse,
    "same reward": _same_reward,
    "no variance": _no_variance,
    "cut off": _cut_off,
    "no tokens": _no_tokens,
    "empty batches": _empty_batches,
    "budget used up": _budget_used_up,
}

# The metric that each piece of advice rests on, and the setting that it is about.
BASIS: dict[str, tuple[str, str]] = {
    "got worse": ("reward", "trainer.lr"),
    "collapsed": ("sampled_logprob", "trainer.lr"),
    "same reward": ("reward", "reward.scorer"),
    "no variance": ("zero_variance_share", "schedule.samples_per_group"),
    "cut off": ("truncated_share", "generator.max_new_tokens"),
    "no tokens": ("trained_tokens", "algo.zero_variance"),
    "empty batches": ("groups", "generator.max_prompt_tokens"),
    "budget used up": ("replacements_used_up", "schedule.dynamic_sampling"),
}


def advice_on(config: Config, means: Means) -> dict[str, str]:
    """Advice by its name in `BASIS`. `means` are over the recent updates; its `best_reward` is the highest mean reward of
    any such window, its `reward_range` the largest reward of a recent update minus the smallest; `first_reward` and
    `first_logprob` are those of the first update."""
    found = {name: rule(config, means) for name, rule in _RULES.items()}
    return {name: text for name, text in found.items() if text}


def first_figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """What advice compares with, from the first update's metrics."""
    return {"first_reward": metrics.get("reward", 0.0), "first_logprob": metrics.get("sampled_logprob", 0.0)}


class Advisor:
    """Collects the metrics of every update and gives advice on them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._given: set[str] = set()
        self._best_reward = 0.0  # highest mean reward of any window
        self._first: dict[str, float] = {}

    def hear(self, metrics: Mapping[str, float]) -> list[str]:
        """Add an update's metrics; returns the advice that becomes due with it."""
        self._recent.append(metrics)
        self._first = self._first or first_figures(metrics)
        if len(self._recent) < WINDOW:
            return []
        due = {name: text for name, text in self._judge().items() if name not in self._given}
        self._given |= due.keys()
        return list(due.values())

    def final(self) -> list[str]:
        """Advice that holds at the end, also for runs shorter than the window."""
        return list(self._judge().values()) if self._recent else []

    def _judge(self) -> dict[str, str]:
        names = {name for row in self._recent for name in row}
        means = {name: sum(row.get(name, 0.0) for row in self._recent) / len(self._recent) for name in names}
        if len(self._recent) == WINDOW:
            rewards = [row.get("reward", 0.0) for row in self._recent]
            means["reward_range"] = max(rewards) - min(rewards)
            self._best_reward = max(self._best_reward, means.get("reward", 0.0))
        return advice_on(self._config, {**means, **self._first, "best_reward": self._best_reward})


def advice_before(config: Config) -> list[str]:
    """Advice that follows from the settings alone."""
    warmup, updates = config.trainer.warmup_updates, config.schedule.updates
    if warmup < updates:
        return []
    return [
        f"NOTE: the learning rate is still warming up when the run is over: trainer.warmup_updates={warmup}, "
        f"schedule.updates={updates}; lower the first"
    ]
