"""A critic: a model with one value for each state. It says what the tokens of a batch were worth, then learns from the batch.

Values are always those of its newest weights, also for tokens that older versions of the policy have sampled. It learns the
`value` stream with the trainer's own `Learner`: the same packs, parallelism and optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec.structs import replace as with_fields

from llamarl.algo.advantages import TOKEN_ADVANTAGES, final_rewards, why_left_out
from llamarl.algo.batch import VALUE, Document, document_of
from llamarl.algo.gae import RETURNS, VALUES, Floats, explained_variance, gae, whitened
from llamarl.config import AlgoConfig
from llamarl.train.learner import Learner
from llamarl.train.token_column import TokenColumn
from llamarl.types import Rollout, RolloutGroup, bytes_to_floats


class OutOfOrder(Exception):
    """The critic and its batches do not belong together, as if it had not come back from the snapshot that the job goes on
    from: it would learn from batches twice, or never."""


@dataclass(frozen=True)
class ValuedBatch:
    """A batch whose sampled tokens have values and advantages, and what the critic says of its own update."""

    groups: tuple[RolloutGroup, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Valued:
    """One answer with its values, its advantages and the critic's targets, one number for each sampled token."""

    rollout: Rollout
    document: Document
    values: Floats
    advantages: Floats
    returns: Floats
    learned: bool  # whether the critic learns from it

    def with_columns(self, advantages: Floats) -> Rollout:
        """The answer as the policy learns from it."""
        added = {VALUES: _bytes(self.values), TOKEN_ADVANTAGES: _bytes(advantages)}
        return with_fields(self.rollout, columns={**self.rollout.columns, **added})

    def lesson(self) -> Document:
        return replace(self.document, streams=VALUE, columns={VALUES: self.values, RETURNS: self.returns})


class Critic:
    """`target_lambda` is GAE's lambda for its own targets; that of the policy's advantages is `algo.gae_lambda`.
    `next_update` is the update that it is at: it has learned from all batches before."""

    def __init__(self, learner: Learner, algo: AlgoConfig, *, target_lambda: float, next_update: int = 0) -> None:
        self.learner, self._algo = learner, algo
        self._target_lambda, self._next_update = target_lambda, next_update

    def work_on(self, update: int, groups: Sequence[RolloutGroup]) -> ValuedBatch:
        """Adds columns to the rollouts, then learns from them. OutOfOrder if the batch is not the next one."""
        if update != self._next_update:
            raise OutOfOrder(f"critic: it is at update {self._next_update}, but was given the batch of update {update}")
        self._next_update += 1
        valued = self._value([group for group in groups if group.prompt.written is None])
        found = [one for of_group in valued.values() for one in of_group]
        rollouts = self._with_columns(found)
        out = tuple(
            RolloutGroup(group.prompt, tuple(next(rollouts) for _ in valued[group.ordinal]))
            if group.ordinal in valued
            else group
            for group in groups
        )
        metrics, lessons = _describe(found), [one.lesson() for one in found if one.learned]
        if not lessons:
            return ValuedBatch(out, metrics)
        learned = self.learner.learn(update, lessons)
        steps = {_OWN_NAMES.get(name, name): value for name, value in learned.steps.items()}
        return ValuedBatch(out, {**metrics, **learned.metrics, **steps}, learned.timings)

    def _with_columns(self, found: Sequence[Valued]) -> Iterator[Rollout]:
        """What is learned is whitened by its own mean and deviation; what is not keeps its advantages, which nobody reads."""
        raw = [one.advantages for one in found if one.learned]
        learned = iter(whitened(raw) if self._algo.whiten else raw)
        for one in found:
            yield one.with_columns(next(learned) if one.learned else one.advantages)

    def _value(self, groups: Sequence[RolloutGroup]) -> Mapping[int, list[Valued]]:
        """The answers of each group with their values, by ordinal. Ranks share the passes, and each has all results."""
        documents = [document_of(group.prompt, one.completion, version=0) for group in groups for one in group.rollouts]
        columns = iter(zip(documents, self._values(documents), strict=True))
        return {
            group.ordinal: [
                self._valued(rollout, reward, *next(columns))
                for rollout, reward in zip(group.rollouts, final_rewards(group, self._algo), strict=True)
            ]
            for group in groups
        }

    def _values(self, documents: Sequence[Document]) -> list[Floats]:
        if not documents:
            return []
        policy = self.learner.policy
        column = TokenColumn(documents, policy)
        for pack in policy.packs(documents):
            values_N = policy.values(pack)
            if pack.counts:
                column.fill(pack.places, values_N)
        return [bytes_to_floats(one) for one in column.complete()]

    def _valued(self, rollout: Rollout, reward: float, document: Document, values: Floats) -> Valued:
        algo, target = self._algo, self._target_lambda
        advantages = gae(values, reward, gamma=algo.gamma, decay=algo.gae_lambda)
        returns = values + gae(values, reward, gamma=algo.gamma, decay=target)
        learned = not why_left_out(rollout, flat=False, algo=algo)
        return Valued(rollout, document, values, advantages, returns, learned)


def _bytes(values: Floats) -> bytes:
    return values.astype("<f4").tobytes()


# Metrics of the critic's optimizer beside those of the policy's.
_OWN_NAMES = {"loss": "value_loss", "grad_norm": "value_grad_norm", "lr": "value_lr", "optimizer_steps": "value_steps"}


def _describe(found: Sequence[Valued]) -> dict[str, float]:
    """Figures of a batch before the critic learns from it: its values have not seen these answers."""
    learned = [one for one in found if one.learned]
    if not learned:
        return {"value_tokens": 0.0}
    values, returns = [one.values for one in learned], [one.returns for one in learned]
    advantages = np.concatenate([one.advantages for one in learned]).astype(np.float64)
    explained = explained_variance(values, returns)
    return {
        "value_tokens": float(len(advantages)),
        "value_mean": float(np.concatenate(values).mean(dtype=np.float64)),
        "return_mean": float(np.concatenate(returns).mean(dtype=np.float64)),
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std()),
        **({} if explained is None else {"explained_variance": explained}),
    }
