"""Whether the generators serve the trainer's adapters: both sides' hashes, and the effect that the adapters have on both.

The effect is log-probs with minus without adapters. Of the same adapters it differs between the sides by arithmetic alone. A
larger difference is a fault: adapters that are not applied, or not all of them, or with another factor, in another order, or
of another version. There are two measures. One is how far the sides are apart, against what arithmetic explains. The other is
the share of the trainer's effect that is served: the slope of one effect over the other, in which rounding averages out over
the tokens, so that it notices a fault that changes less than rounding does. The trainer's effect is rounded too; in a deep
model with small adapters it may be nothing else. Where it could be, the slope is taken along a second effect of the same
adapters, of four times minus twice their size: if that goes another way, the slope has a large error, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from llamarl.algo.batch import document_of
from llamarl.errors import JobFailed
from llamarl.families.adapters import LORA_B, adapter_parameters
from llamarl.model.adapter_digest import AdapterHash, HashedPart, PendingHash
from llamarl.train.policy import Policy
from llamarl.train.shards import trained_shards
from llamarl.train.token_column import TokenColumn
from llamarl.types import (
    Completion,
    CompletionGroup,
    Group,
    RolloutGroup,
    bytes_to_floats,
    bytes_to_tokens,
    completions_of,
    sampled_places,
)

_OF_FLOOR = 4.0  # times the difference of the base's log-probs; on CPUs it was 0.5 to 3.8, in fp32 and bf16
_OF_SHARE = 0.1  # by which the share that is served may be off, besides its standard errors
_STANDARD_ERRORS = 6.0
_ROUNDED = 0.01  # share of the squared effect that rounding may be, for the effect to be its own measure


class AdaptersDiffer(JobFailed):
    """A generator samples with other adapters than the trainer trains."""


class EffectTolerance(Struct, frozen=True):
    """What the effect may differ by besides arithmetic as seen in the base."""

    share: float = 0.0  # of the effect
    least: float = 1e-5  # log-probs; what fp32 may always differ by


class EffectGap(Struct, frozen=True):
    """The effect of the adapters, and how much the sides differ in it and in the base; means over tokens, absolute."""

    effect: float
    gap: float
    floor: float
    served: float = 1.0  # share of the trainer's effect that the generator has
    served_error: float = 0.0  # its standard error

    @classmethod
    def of(cls, trained: Tensor, served: Tensor, base: Tensor, second: Tensor | None = None) -> EffectGap:
        """From the trainer's and the generator's effect on the same tokens, and the difference of the base's log-probs.
        `second` is another effect on the trainer, rounded by itself, for an effect that may be rounding for the most part."""
        trained, served = trained.double(), served.double()
        may_be_rounding = base.double().square().sum() > _ROUNDED * trained.square().sum()
        along = trained if second is None or not may_be_rounding else second.double()
        found = cls(_mean(trained), _mean(trained - served), _mean(base))
        common = (trained * along).sum().item()
        if common == 0:
            return found
        share = (along * served).sum().item() / common
        # Rounding is larger where the effect is, and a token with most of the effect fits the slope, however it was rounded.
        rest = (served - share * trained) / (1 - trained * along / common).abs().clamp(min=1e-6)
        error = (rest * along).square().sum().sqrt().item() / abs(common)
        return replace(found, served=share, served_error=error)

    def agrees(self, tolerance: EffectTolerance) -> bool:
        """Arithmetic differs more, the more the adapters change."""
        arithmetic = (_OF_FLOOR * self.floor + tolerance.least) * (1 + self.effect)
        off = _OF_SHARE + tolerance.share + _STANDARD_ERRORS * self.served_error
        return self.gap <= arithmetic + tolerance.share * self.effect and abs(self.served - 1) <= off

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "adapter_effect": self.effect,
            "adapter_effect_gap": self.gap,
            "adapter_base_gap": self.floor,
            "adapter_served": self.served,
            "adapter_served_error": self.served_error,
        }


def check_effect(policy: Policy, groups: Sequence[Group], version: int, tolerance: EffectTolerance) -> dict[str, float]:
    """Metrics of the answers that a generator has measured with this version; none if there are no such answers. Raises
    AdaptersDiffer. Every rank computes all of them (a collective)."""
    if policy.model.adapters is None:
        return {}
    found = list(_measured(groups, version))
    if not found:
        return {}
    on = _logprobs(policy, found, version)
    with policy.model.adapters.off():
        off = _logprobs(policy, found, version)
    with _enlarged(policy, 2.0):
        twice = _logprobs(policy, found, version)
    with _enlarged(policy, 4.0):
        fourfold = _logprobs(policy, found, version)
    effect = torch.cat([_column(one.adapter_effect) for _, one in found])
    base = torch.cat([_column(one.base_logprobs) for _, one in found])
    new = first_seen(found)
    gap = EffectGap.of((on - off)[new], effect[new], (off - base)[new], (fourfold - twice)[new])
    if not gap.agrees(tolerance):
        raise AdaptersDiffer(
            f"model.lora: with version {version}, the adapters change the trainer's log-probs by {gap.effect:.2g} on average "
            f"and the generator's differ from that by {gap.gap:.2g} (the base's: {gap.floor:.2g}), its share of that is "
            f"{gap.served:.2f}; the generator does not compute with the adapters that are trained"
        )
    return gap.metrics


def _measured(groups: Sequence[Group], version: int) -> Iterator[tuple[CompletionGroup | RolloutGroup, Completion]]:
    for group in groups:
        for one in completions_of(group):
            fresh = all(run.version == version for run in one.versions)
            if one.base_logprobs and fresh and isinstance(group, CompletionGroup | RolloutGroup):
                yield group, one


def _logprobs(
    policy: Policy, found: Sequence[tuple[CompletionGroup | RolloutGroup, Completion]], version: int
) -> Tensor:
    """Log-probs of all sampled tokens, in the order of the completions."""
    documents = [document_of(group.prompt, one, version=version) for group, one in found]
    column = TokenColumn(documents, policy)
    for pack in policy.packs(documents, same_everywhere=True):
        logprobs_N = policy.logprobs(pack)
        if pack.counts:
            column.fill(pack.places, logprobs_N)
    return torch.cat([_column(one) for one in column.complete(same_everywhere=True)])


@contextmanager
def _enlarged(policy: Policy, size: float) -> Iterator[None]:
    """Computes with adapters of so many times their size, until the end of the block. Weights themselves are changed, since
    compiled passes know the factor; by a power of two, so that afterwards they are what they were."""
    weights = [one.detach() for name, one in policy.model.named_parameters() if f"{LORA_B}." in name]
    for one in weights:
        one.mul_(size)
    try:
        yield
    finally:
        for one in weights:
            one.div_(size)


def first_seen(found: Sequence[tuple[CompletionGroup | RolloutGroup, Completion]]) -> Tensor:
    """Which sampled tokens follow something that no answer before has. The same token after the same ones says nothing new:
    its rounding is the same too."""
    seen, new = set[tuple[bytes, bytes]](), list[bool]()
    for group, one in found:
        tokens = bytes_to_tokens(one.tokens)
        for place in sampled_places(len(tokens), one.given):
            before = (group.prompt.prompt_tokens, tokens[: place + 1].tobytes())
            new.append(before not in seen)
            seen.add(before)
    return torch.tensor(new)


def _column(data: bytes) -> Tensor:
    return torch.from_numpy(np.array(bytes_to_floats(data)))


def _mean(values: Tensor) -> float:
    return values.abs().double().mean().item()


class TrainedHash:
    """Hash of the trainer's adapters as the generators hold them, after these changes of type. Each rank counts the shards of
    the named adapters."""

    def __init__(self, policy: Policy, types: tuple[torch.dtype, ...], counts_here: Sequence[str]) -> None:
        self._policy, self._names = policy, counts_here
        self._hash = AdapterHash(policy.computing.device, types)

    @cached_property
    def _parts(self) -> list[HashedPart]:
        """Of the shards, which stay where they are."""
        model = self._policy.model
        assert model.adapters is not None
        lora, shards = model.adapters.lora, trained_shards(model)
        specs = adapter_parameters(model.shape, lora)
        return [
            HashedPart(name, shards[name].tensor, shards[name].box, specs[name].shape, lora.scale)
            for name in self._names
        ]

    def begin(self) -> PendingHash:
        """To be called by all ranks together (a collective)."""
        mesh, total = self._policy.computing.mesh, self._hash.total(self._parts)
        return PendingHash(mesh.sum_over_shards(total) if mesh.size > 1 else total)
