"""A probe: one group sampled by the version that is about to be trained. The trainer measures it and never trains on it.

Generator and trainer then hold the same weights, so their log-probs differ by their arithmetic alone. With S = 0 this is true
of every group; otherwise, and with agents, whose answers come in pieces, every `probe_every` updates the update waits until
its probe is answered.
"""

from __future__ import annotations

from llamarl.config import ScheduleConfig

_FIRST = -(1 << 40)  # far below the ordinals of evaluations


def probed_version(ordinal: int) -> int:
    return _FIRST - ordinal


class Probes:
    def __init__(self, schedule: ScheduleConfig, *, agents: bool = False) -> None:
        self._every = schedule.probe_every if schedule.max_staleness or agents else 0
        self._exact = schedule.deterministic
        self._issued: int | None = None
        self._answered: set[int] = set()  # versions whose answers are kept
        self._given_up: int | None = None  # a version whose probe cannot be answered

    def is_due(self, version: int) -> bool:
        return self._every > 0 and version > 0 and version % self._every == 0

    def keeps_waiting(self, version: int) -> bool:
        """Whether the update that turns `version` into the next must wait for its probe."""
        return self.is_due(version) and version not in self._answered and version != self._given_up

    def issue(self, version: int) -> int | None:
        """The ordinal of a probe that is wanted now; None: no probe is, or it is under way."""
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
        """The probe can never be answered: the update goes on without it."""
        self._given_up = probed_version(ordinal)

    def measured(self, version: int) -> tuple[int, ...]:
        """The update of `version` is made. Returns ordinals of probes whose answers are not needed any more: none where an
        update that is made again must come out the same, since no snapshot covers it yet."""
        return () if self._exact or version not in self._answered else (_FIRST - version,)

    def covered(self, version: int) -> tuple[int, ...]:
        """No job goes back behind `version`. Returns ordinals of probes whose answers are not needed any more."""
        gone = {one for one in self._answered if one < version}
        self._answered -= gone
        return tuple(_FIRST - one for one in sorted(gone)) if self._exact else ()

    def rewind(self) -> tuple[int, ...]:
        """A version that is made again may have other bytes, so its answer is void, except in deterministic mode. Returns
        ordinals of void probes."""
        if self._exact or self._issued is None or self._issued not in self._answered:
            return ()  # there is no answer, or the probe is still under way and stays
        void, self._issued = self._issued, None
        self._answered.discard(void)
        return (_FIRST - void,)
