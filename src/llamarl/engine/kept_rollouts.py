"""Decides which groups of a batch stay readable, and gathers what is known of them until they are trained. Experts are left
out: no reader needs them, and they would be most of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from llamarl.controller.ledger import Trained
from llamarl.engine.group_store import GroupStore
from llamarl.engine.prompts import Prompts
from llamarl.observe.rollout_log import RolloutLog, SavedGroup
from llamarl.types import Group, without_routes


class KeptRollouts:
    """Writes the rollouts of each update when the ledger counts it. `reasons` are those of groups that were dropped before
    this start of the job: of them only the prompt is left."""

    def __init__(
        self,
        log: RolloutLog,
        store: GroupStore,
        prompts: Prompts,
        *,
        reasons: Mapping[int, str],
        note: Callable[[str], None],
    ) -> None:
        self._log, self._store, self._prompts, self._note = log, store, prompts, note
        self._dropped: dict[int, tuple[str, Group | None]] = {o: (reason, None) for o, reason in reasons.items()}
        self._logprobs: dict[int, dict[int, tuple[bytes, ...]]] = {}  # by update, until it counts
        self._told = False

    def wanted(self, ordinals: Iterable[int]) -> tuple[int, ...]:
        """The groups of a batch whose log-probs the trainer should report."""
        return tuple(o for o in self._log.choose(self._groups_of(ordinals)) if o not in self._dropped)

    def add_logprobs(self, update: int, logprobs: dict[int, tuple[bytes, ...]]) -> None:
        if logprobs:
            self._logprobs[update] = logprobs

    def drop(self, ordinal: int, reason: str) -> None:
        """The group is about to leave the store."""
        self._dropped[ordinal] = (reason, self._store.get(ordinal) if ordinal in self._store else None)

    def forget(self, ordinals: Iterable[int]) -> None:
        for ordinal in ordinals:
            self._dropped.pop(ordinal, None)

    def rewind(self, to_update: int) -> None:
        self._logprobs = {update: kept for update, kept in self._logprobs.items() if update < to_update}
        self._log.rewind(to_update)

    def write(self, trained: Trained) -> None:
        groups = self._groups_of(trained.ordinals + trained.dropped)
        logprobs = self._logprobs.pop(trained.update, {})
        kept = [
            SavedGroup(
                trained.update,
                without_routes(groups[o]),
                logprobs.get(o, ()),
                self._dropped[o][0] if o in self._dropped else "",
            )
            for o in self._log.choose(groups)
        ]
        self._log.add(trained.update, len(groups), kept)
        if kept and len(kept) < len(groups) and not self._told:
            self._told = True
            self._note(
                f"rollouts of {len(kept)} of {len(groups)} groups per update stay readable (observe.rollouts_mb)"
            )

    def _groups_of(self, ordinals: Iterable[int]) -> dict[int, Group]:
        return {ordinal: self._group(ordinal) for ordinal in ordinals}

    def _group(self, ordinal: int) -> Group:
        if ordinal not in self._dropped:
            return self._store.get(ordinal)
        return self._dropped[ordinal][1] or self._prompts.group(ordinal)
