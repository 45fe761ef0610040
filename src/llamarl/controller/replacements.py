"""Dynamic sampling: groups whose rewards are all equal give their place in a batch to others, within a budget.

The decision is made when the group is taken into a batch, in the order of the window, so with W = 1 it follows from the
rewards alone. A group that is replaced is in no batch and frees its place at once; the job then needs one group more, with
the next ordinal. In deterministic mode, a group that replaces one of batch u is sampled by version u: by then the number of
groups that version u must sample is known, whatever the timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from llamarl.config import ScheduleConfig
from llamarl.types import GroupFacts


class Replacements:
    """Counts replaced groups by the update in whose batch another group took their place."""

    def __init__(self, schedule: ScheduleConfig) -> None:
        self._schedule, self.budget = schedule, schedule.dynamic_sampling
        self.total = 0
        self._in_update: Counter[int] = Counter()
        self._last = -1  # the newest update with a replaced group
        self._flat: set[int] = set()  # settled groups whose rewards are all equal, and that no batch has taken yet

    def note(self, ordinal: int, facts: GroupFacts) -> None:
        """Hear what a role found out about a group."""
        if self.budget and facts.same_rewards:
            self._flat.add(ordinal)

    def replace(self, ordinal: int, update: int) -> bool:
        """Whether the group, which is taken now, is replaced in the batch of `update`; if so, it is counted."""
        if ordinal not in self._flat:
            return False
        self._flat.remove(ordinal)
        if self._in_update[update] >= self.budget:
            return False
        self._in_update[update] += 1
        self._last = max(self._last, update)
        self.total += 1
        return True

    def in_update(self, update: int) -> int:
        return self._in_update[update]

    def resume(self, replaced: Iterable[tuple[int, int]], same_rewards: Iterable[int]) -> None:
        """Go on with the counts by update of an earlier start, and with its settled groups without variance."""
        self._in_update = Counter(dict(replaced))
        self.total, self._last = self._in_update.total(), max(self._in_update, default=-1)
        self._flat = set(same_rewards) if self.budget else set()

    def sampling_version(self, ordinal: int) -> int:
        """Version that samples this group in deterministic mode: the smallest v with ordinal < (S+1+v)*P + R(v), where R(v)
        is the number of groups replaced in batches up to v. R(v) is final once v + 1 is visible."""
        schedule = self._schedule
        version = schedule.sampling_version(max(0, ordinal - self.total))  # not too large, since R(v) <= total
        while ordinal >= schedule.num_places + version * schedule.groups_per_update + self._up_to(version):
            version += 1
        return version

    def _up_to(self, update: int) -> int:
        """Number of groups replaced in batches up to that of `update`."""
        return self.total - sum(self._in_update[later] for later in range(update + 1, self._last + 1))


def replacement_metrics(replacements: Replacements, update: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """What an update reports of dynamic sampling; nothing where it is off. `metrics` are those of the update."""
    if not replacements.budget:
        return {}
    replaced = replacements.in_update(update)
    groups = metrics.get("groups", 0.0) - metrics.get("sft_rows", 0.0)
    flat = replaced + metrics.get("zero_variance_share", 0.0) * groups
    return {
        "groups_replaced": float(replaced),
        "no_variance_share": flat / max(1.0, replaced + groups),
        "replacements_used_up": float(replaced == replacements.budget),
    }
