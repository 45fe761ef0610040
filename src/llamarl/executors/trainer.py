"""The trainer: one batch of rollouts in, one optimizer step, the next version of the policy out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from llamarl.algo.batch import TrainBatch, make_batch
from llamarl.algo.losses import Loss
from llamarl.config import Algo
from llamarl.config import Trainer as TrainerConfig
from llamarl.errors import ModelError
from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import (
    BatchResult,
    Message,
    PublishWeights,
    Report,
    SaveState,
    StateNotSaved,
    StateSaved,
    WeightsPublished,
    WorkOnBatch,
)
from llamarl.model.training_state import TrainingState
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.types import RolloutGroup
from llamarl.weights.transport import WeightWriter

_LOOK_AGAIN_S = 0.005  # how long a slice of "work" waits for a snapshot that is being written


class Trainer:
    def __init__(
        self,
        model: Transformer,
        weights: WeightWriter,
        loss: Loss,
        *,
        settings: TrainerConfig,
        algo: Algo,
        temperature: float,
        updates: int,
        carry_from: Path,
    ) -> None:
        self.model, self._weights, self._loss = model, weights, loss
        self._settings, self._algo, self._temperature, self._updates = settings, algo, temperature, updates
        self.optimizer = make_optimizer(model, settings)
        self._state = TrainingState(model, self.optimizer, carry_from)
        self._pool = ThreadPoolExecutor(1)
        self._saving: tuple[int, Future[dict[str, str]]] | None = None

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnBatch():
                yield BatchResult(message.update, self._update(message.update, message.groups))
            case PublishWeights():
                publication = self._weights.publish(message.version)
                yield WeightsPublished(
                    publication.version, publication.checksum, publication.num_bytes, publication.changed
                )
            case SaveState():
                self._begin_save(message)
            case _:
                raise UnexpectedMessage("trainer", message)

    @property
    def idle(self) -> bool:
        """An update is made as soon as its batch arrives; only a snapshot goes on in between."""
        return self._saving is None

    def work(self) -> Iterable[Report]:
        if self._saving is None or not wait([self._saving[1]], timeout=_LOOK_AGAIN_S).done:
            return
        (version, written), self._saving = self._saving, None
        try:
            yield StateSaved(version, written.result())
        except (OSError, ModelError) as error:  # a full or broken disk stops nothing but the snapshot
            yield StateNotSaved(version, str(error))

    def _begin_save(self, message: SaveState) -> None:
        """Copy, then write in a thread: the next update waits for the copy only."""
        if self._saving is not None:
            wait([self._saving[1]])  # an attempt that the controller has given up
        self._state.take()
        self._saving = (message.version, self._pool.submit(self._state.write, Path(message.folder)))

    def _update(self, update: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        metrics = describe_groups(groups)
        batch = make_batch(groups, version=update, skip_zero_variance=self._algo.zero_variance == "skip")
        if batch is None:
            return {**metrics, "trained_tokens": 0.0}  # nothing to learn from: the version is made all the same
        batch = batch.to(self.model.lm_head.weight.device)
        tokens = batch.with_policy(policy_logprobs(self.model, batch, self._temperature))
        loss, loss_metrics = self._loss(tokens, self._algo)
        return {**metrics, **describe_staleness(batch), **loss_metrics, **self._step(update, loss)}

    def _step(self, update: int, loss: Tensor) -> dict[str, float]:
        """Descend, unless loss or gradient is not a number: then weights and optimizer stay as they are, bit for bit."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm).item()
        lr = learning_rate(self._settings, update, self._updates)
        sound = math.isfinite(norm) and math.isfinite(loss.item())
        if sound:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return {"loss": loss.item(), "grad_norm": norm, "lr": lr, "skipped": float(not sound)}


def make_optimizer(model: Transformer, settings: TrainerConfig) -> torch.optim.AdamW:
    """AdamW; decay pulls on matrices only, since norms and biases have a scale of their own."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=settings.betas,
    )


def learning_rate(settings: TrainerConfig, update: int, updates: int) -> float:
    """Linear warm-up, then constant or linear down to `final_lr_share` at the last update."""
    warmup = settings.warmup_updates
    if update < warmup:
        return settings.lr * (update + 1) / warmup
    progress = (update - warmup) / max(1, updates - warmup)
    return settings.lr * (1 - (1 - settings.final_lr_share) * progress)


def policy_logprobs(model: Transformer, batch: TrainBatch, temperature: float) -> Tensor:
    """Log-probs [N] of the completion tokens under the distribution that the generator samples from."""
    hidden_BTC = model(batch.tokens_BT, batch.positions_BT, causal_attention)
    logits_NV = model.logits(hidden_BTC[batch.rows_N, batch.columns_N]) / temperature
    return torch.log_softmax(logits_NV, dim=-1).gather(1, batch.targets_N[:, None])[:, 0]


def describe_groups(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {"groups": 0.0, "completions": 0.0}
    lengths = [rollout.completion.num_tokens for rollout in rollouts]
    return {
        "groups": float(len(groups)),
        "completions": float(len(rollouts)),
        "reward": sum(rollout.reward for rollout in rollouts) / len(rollouts),
        "zero_variance_share": sum(len(set(group.rewards)) == 1 for group in groups) / len(groups),
        "answer_tokens": sum(lengths) / len(lengths),
        "truncated_share": sum(rollout.completion.truncated for rollout in rollouts) / len(rollouts),
    }


def describe_staleness(batch: TrainBatch) -> dict[str, float]:
    staleness = batch.staleness_N.float()
    return {
        "trained_tokens": float(batch.num_tokens),
        "staleness_mean": staleness.mean().item(),
        "staleness_max": staleness.max().item(),
    }
