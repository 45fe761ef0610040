"""The planner's question: which workload, on which GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from random import Random

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.errors import InputError
from llamarl.families.family import COLUMNS, FP8_TILE, ROWS
from llamarl.families.parameters import layer_parameters
from llamarl.model_spec import ModelSpec
from llamarl.plan.gpus import Gpu
from llamarl.plan.lengths import Lengths
from llamarl.plan.terms import MEMORY_SHARE, held_bytes, seen_square
from llamarl.plan.trainer import UpdateLoad, in_trees, packed, shared_prompts

TENSOR_SIZES = tuple(1 << power for power in range(11))


class Workload(Struct, frozen=True, kw_only=True):
    """One update's prompts and answers."""

    groups: int  # prompts per update
    samples: int  # answers per prompt
    prompt: int  # tokens per prompt
    answers: Lengths
    skipped: float = 0.0  # share of groups that are not trained on, because their rewards are all equal
    share_prompts: bool = True  # whether the trainer computes a prompt once for all its answers, where that pays

    @property
    def answers_per_update(self) -> int:
        return self.groups * self.samples

    @property
    def longest_document(self) -> int:
        return self.prompt + self.answers.longest

    def batch(self, gpu: Gpu, windows: Sequence[int] = ()) -> UpdateLoad:
        """The trained part of a typical update of a model whose layers have these windows."""
        count, answers = self.answers_per_update * (1 - self.skipped), self.answers
        if gpu.is_cpu:
            return self._on_cpu(gpu, count)
        tokens = count * (self.prompt + answers.mean)
        squares = count * self._mean_square(windows)
        prompts = self.groups * (1 - self.skipped)
        shared = shared_prompts(gpu, prompts, self.prompt, self.samples, windows) if self.share_prompts else None
        return UpdateLoad(tokens, count * answers.mean, squares, shared)

    def _on_cpu(self, gpu: Gpu, count: float) -> UpdateLoad:
        """That of `count` answers, by some of them with typical lengths, dealt out to groups by chance."""
        groups, answers = ceil(64 / self.samples), self.answers
        typical = [answers.quantile((at + 0.5) / (groups * self.samples)) for at in range(groups * self.samples)]
        Random(0).shuffle(typical)
        share = answers.mean / (self.prompt + answers.mean)
        alone = packed(gpu, [self.prompt + length for length in typical], share)
        dealt = [typical[first::groups] for first in range(groups)]
        trees = in_trees(gpu, self.prompt, dealt) if self.share_prompts else ()
        times = count / len(typical)
        return replace(alone.times(times), in_trees=tuple(one.times(times) for one in trees))

    def _mean_square(self, windows: Sequence[int]) -> float:
        """Mean squared length of the documents, as far as tokens see each other."""
        answers = self.answers
        if not windows:
            return self.prompt**2 + 2 * self.prompt * answers.mean + answers.mean_square
        shares = np.diff(answers.edges).tolist()
        lengths = zip(answers.values.tolist(), shares, strict=True)
        return float(sum(seen_square(self.prompt + length, windows) * share for length, share in lengths))


class Question(Struct, frozen=True, kw_only=True):
    """A model, a number of GPUs, a workload and the options that a plan may use."""

    shape: ModelSpec
    gpu: Gpu
    gpus: int
    work: Workload
    max_staleness: int = 1
    precisions: tuple[str, ...] = ("bf16",)  # allowed precisions of the generators' weights
    fallbacks: tuple[str, ...] = ()  # precisions that are allowed too where those do not fit (fallback.py)
    hosts: int = 1  # most hosts that one replica of the generator may span
    lora: LoraConfig = NO_LORA
    base: str = "bf16"  # precision of the frozen weights, with adapters; fp8 is not split over ranks
    offload: bool = False  # whether the optimizer state may be in host memory between updates
    expert: int = 1  # parts of the tensor ranks that hold different experts, of trainer and generators
    copied_heads: bool = False
    """Whether ranks of a replica may hold copies of a key-value head. No builder does that: such a plan is a baseline."""

    def __post_init__(self) -> None:
        if self.work.longest_document > self.shape.max_positions:
            raise InputError(
                f"--answer: prompt and answer may take {self.work.longest_document} tokens, but the model has "
                f"{self.shape.max_positions} positions"
            )
        if self.has_narrow_base and self.precisions != ("fp8",):
            raise InputError("--base fp8: generators compute with the base's own weights; leave out --precision")
        if self.expert > 1 and (self.shape.experts % self.expert or not self.shape.experts):
            raise InputError(f"--expert {self.expert}: the model has {self.shape.experts} experts; it must divide them")
        if self.has_narrow_base and self.shape.experts:
            raise InputError("--base fp8: experts are trained in their own precision; leave it out")
        if not all(self.can_hold(name, 1) for name in self.precisions):
            raise InputError(f"--precision fp8: the model has matrices whose sizes are no multiples of {FP8_TILE}")

    @property
    def memory_bytes(self) -> float:
        """Memory of one GPU that a plan may use."""
        return self.gpu.memory_bytes * MEMORY_SHARE

    def tensor_sizes(self) -> Sequence[int]:
        """Tensor-parallel sizes that divide the model evenly and fit in a host."""
        most = 1 if self.has_narrow_base else self.gpu.gpus_per_host
        return [size for size in TENSOR_SIZES if size <= most and self._splits(self.shape, size)]

    def _splits(self, shape: ModelSpec, size: int) -> bool:
        return size % self.expert == 0 and shape.splits_over(size, self.expert)

    @property
    def has_narrow_base(self) -> bool:
        return bool(self.lora) and self.base == "fp8"

    def generator_sizes(self) -> Sequence[int]:
        """Tensor-parallel sizes of a generator, which may span several hosts."""
        shape, most = self.shape, 1 if self.has_narrow_base else self.hosts * self.gpu.gpus_per_host
        whole = replace(shape, num_kv_heads=shape.num_heads) if self.copied_heads else shape
        return [size for size in TENSOR_SIZES if size <= most and self._splits(whole, size)]

    def can_hold(self, precision: str, tp: int) -> bool:
        """Whether a generator of `tp` ranks can hold its weights in this precision. Experts can be held in any."""
        if precision != "fp8":
            return True
        layers = (layer_parameters(self.shape, number) for number in range(self.shape.num_layers))
        matrices = {matrix for layer in layers for matrix in layer if matrix.is_product}
        return not any(one.local_size(dim, tp) % FP8_TILE for one in matrices for dim in (ROWS, COLUMNS))

    def saves_memory(self, precision: str) -> bool:
        """Whether generators can hold their weights in this precision, in less memory than in bf16. Those of experts are
        quantized on arrival, so wide ones stay beside them."""
        narrow, wide = (held_bytes(self.shape, name, self.lora) for name in (precision, "bf16"))
        return self.can_hold(precision, 1) and narrow < wide
