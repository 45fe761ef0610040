"""A probe: one group sampled by the very version that is about to be trained, measured by the trainer, never trained on.

Generator and trainer hold the same weights then, so what their log-probs differ by is their arithmetic alone. With
S = 0 every group is such a one; otherwise, every `probe_every` updates, the update waits until its probe has been answered.
"""

from __future__ import annotations

from llamarl.config import ScheduleConfig

_FIRST = -(1 << 40)  # far below the ordinals of evaluations


def probed_version(ordinal: int) -> int:
    return _FIRST - ordinal


class Probes:
    def __init__(self, schedule: ScheduleConfig) -> None:
        self._every = schedule.probe_every if schedule.max_staleness else 0
        self._exact = schedule.deterministic
        self._issued: int | None = None
        self._answered: set[int] = set()  # versions whose answers are kept
        self._given_up: int | None = None

    def is_due(self, version: int) -> bool:
        return self._every > 0 and version > 0 and version % self._every == 0

    def keeps_waiting(self, version: int) -> bool:
        """The update that turns `version` into the next may not begin yet."""
        return self.is_due(version) and version not in self._answered and version != self._given_up

    def issue(self, version: int) -> int | None:
        """The ordinal of a probe that is wanted now; None when there is none, or it is under way."""
        if not self.keeps_waiting(version) or self._issued == version:
            return None
        self._issued = version
        return _FIRST - version

    def ordinal(self, version: int) -> int | None:
        """The answered probe of a version, for the trainer."""
        return _FIRST - version if version in self._answered else None

    def answered(self, ordinal: int) -> None:
        self._answered.add(probed_version(ordinal))

    def failed(self, ordinal: int) -> None:
        """It can never be answered: the update goes on without."""
        self._given_up = probed_version(ordinal)

    def measured(self, version: int) -> tuple[int, ...]:
        """The update of `version` is made: ordinals of probes whose answers nobody needs any more. Where an update that is
        made again must come out the same, that is none before a snapshot covers it."""
        return () if self._exact or version not in self._answered else (_FIRST - version,)

    def covered(self, version: int) -> tuple[int, ...]:
        """Nothing goes back behind `version`: likewise."""
        gone = {one for one in self._answered if one < version}
        self._answered -= gone
        return tuple(_FIRST - one for one in sorted(gone)) if self._exact else ()

    def rewind(self) -> tuple[int, ...]:
        """A version that is made again may have other bytes, so its answer is void; but for those that never differ."""
        if self._exact or self._issued is None or self._issued not in self._answered:
            return ()  # nothing to void, or it is still under way: then it stays
        void, self._issued = self._issued, None
        self._answered.discard(void)
        return (_FIRST - void,)
