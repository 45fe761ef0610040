"""Time of the trainer's update, and memory of one of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from msgspec import Struct

from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.model_spec import ModelSpec
from llamarl.plan.gpus import Gpu
from llamarl.plan.terms import (
    WORKSPACE_BYTES,
    context_exchange_s,
    num_trained,
    offload_s,
    offloaded_bytes,
    offloaded_state_bytes,
    offloaded_step_s,
    pass_bytes,
    replica_exchange_s,
    seen_square,
    shard_exchange_s,
    tensor_exchange_s,
    total_s,
    train_terms,
    training_state,
    visiting_state_bytes,
)

CPU_ROW = 64  # shortest row on a CPU, in tokens; otherwise a row is as long as the longest document (train/packing.py)
ACCUMULATE_BYTES = 12  # per parameter and pass, to sum the gradients of several passes: two reads and one write
LEAST_SHARED = 32  # tokens, on a GPU; to cut attention for a shorter prompt costs more than it saves (train/packing.py)


class SharedPrompts(Struct, frozen=True):
    """Prompts of an update that are computed once for all their answers."""

    count: float
    tokens: float  # tokens of each
    samples: float  # answers of each
    square: float  # squared length of each, as far as tokens see each other


class UpdateLoad(Struct, frozen=True):
    """Tokens of one update, including padding, as if every document was computed apart."""

    tokens: float
    answer_tokens: float
    squares: float
    """Sum of the documents' squared lengths, as far as tokens see each other: with windows, the mean over the layers."""
    shared: SharedPrompts | None = None
    joins: float = 0.0  # tokens whose attention is joined from two parts
    in_trees: tuple[
        UpdateLoad, ...
    ] = ()  # on a CPU: the same update with answers behind one prompt, in trees of several sizes

    def times(self, factor: float) -> UpdateLoad:
        return UpdateLoad(self.tokens * factor, self.answer_tokens * factor, self.squares * factor)

    def computed(self, tokens_per_pack: int) -> UpdateLoad:
        """What passes compute: each prompt once, or once in each pack that holds some of its answers."""
        if self.shared is None:
            return self
        each = self.answer_tokens / self.shared.count
        packs = min(self.shared.samples, max(1.0, ceil(each / max(1.0, tokens_per_pack - self.shared.tokens))))
        saved = self.shared.count * (self.shared.samples - packs)
        return UpdateLoad(
            self.tokens - saved * self.shared.tokens,
            self.answer_tokens,
            self.squares - saved * self.shared.square,
            joins=self.answer_tokens,
        )


def shared_prompts(
    gpu: Gpu, count: float, tokens: float, samples: float, windows: Sequence[int] = ()
) -> SharedPrompts | None:
    """What `trainer.share_prompts: auto` does with prompts of this length on a GPU (`in_trees`: on a CPU)."""
    shared = not gpu.is_cpu and count > 0 and samples > 1 and tokens >= LEAST_SHARED
    return SharedPrompts(count, tokens, samples, seen_square(tokens, windows)) if shared else None


def packed(gpu: Gpu, lengths: Sequence[float], answer_share: float, windows: Sequence[int] = ()) -> UpdateLoad:
    """Load of documents with these lengths (prompt and answer). On a GPU, attention skips everything outside a document and
    the causal half of the rest, and what is beyond the `windows` of the layers; on a CPU it computes whole rows."""
    tokens = sum(lengths)
    if not gpu.is_cpu:
        return UpdateLoad(tokens, tokens * answer_share, sum(seen_square(length, windows) for length in lengths))
    if not lengths:
        return UpdateLoad(0.0, 0.0, 0.0)
    width = max(CPU_ROW, *lengths)
    rows = max(ceil(tokens / width), *(ceil(_longer(lengths, width / (each + 1)) / each) for each in range(1, 9)))
    width = max(tokens / rows, *lengths)  # as wide as the fullest one
    return UpdateLoad(rows * width, tokens * answer_share, 2 * rows * width * width)


def _longer(lengths: Sequence[float], limit: float) -> int:
    return sum(length > limit for length in lengths)


def in_trees(gpu: Gpu, prompt: float, groups: Sequence[Sequence[float]]) -> tuple[UpdateLoad, ...]:
    """What `trainer.share_prompts: auto` may choose from on a CPU: groups of answers of these lengths, where 2, 4 and so on
    share one prompt and a row. Equal answers, which packs compute once, are not known here."""
    samples, found = max(map(len, groups), default=0), list[UpdateLoad]()
    if not gpu.is_cpu:
        return ()
    for size in sorted({min(samples, 1 << power) for power in range(1, samples.bit_length() + 1)}):
        parts = [group[start : start + size] for group in groups for start in range(0, len(group), size)]
        trees = [prompt + sum(part) for part in parts]
        found.append(packed(gpu, trees, 1 - prompt * len(trees) / sum(trees)))
    return tuple(found)


class TrainerRanks(Struct, frozen=True):
    """A trainer of replicate * data * context * tp ranks: FSDP over `data` and `context`, whose ranks share each pack, tensor
    parallel over `tp`, and copies of them."""

    shape: ModelSpec
    gpu: Gpu
    precision: str
    data: int
    tp: int
    recompute: str
    tokens_per_pack: int
    replicate: int = 1
    lora: LoraConfig = NO_LORA
    base: str = "bf16"  # precision of the frozen weights, with adapters
    context: int = 1
    offload: bool = False  # whether the optimizer state is in host memory between updates
    expert: int = 1  # parts of the tensor ranks that hold different experts

    @property
    def ranks(self) -> int:
        return self.replicate * self.fsdp_ranks * self.tp

    @property
    def fsdp_ranks(self) -> int:
        """Ranks that FSDP shards the weights over."""
        return self.data * self.context

    @property
    def batch_ranks(self) -> int:
        """Ranks that share an update's documents."""
        return self.replicate * self.data

    @property
    def layout(self) -> str:
        """The mesh in words."""
        replicas = f"{self.replicate} replicas x " if self.replicate > 1 else ""
        context = f" x context {self.context}" if self.context > 1 else ""
        experts = f" (EP {self.expert})" if self.expert > 1 else ""
        return f"{replicas}FSDP {self.data}{context} x TP {self.tp}{experts}"

    def passes(self, tokens: float) -> float:
        """Forward and backward passes of each rank for this many tokens in all. Context ranks share each pass."""
        return max(1.0, -(-tokens // (self.tokens_per_pack * self.batch_ranks)))

    def update_s(self, batch: UpdateLoad) -> float:
        """Time of an update. FSDP's communication overlaps with the passes; that of tensor parallelism does not. Replicas sum
        their gradients during the last backward pass, which is two thirds of that pass."""
        passes, computing_s = self.passes(self.computed(batch).tokens), self.computing_s(batch)
        sharding_s = shard_exchange_s(self.shape, self.gpu, self.tp, self.fsdp_ranks, passes, self.lora, self.expert)
        replicas_s = replica_exchange_s(self.shape, self.gpu, self.tp, self.fsdp_ranks, self.replicate, self.lora)
        step_s = (
            offloaded_step_s(self.shape, self.tp, self.fsdp_ranks, self.replicate, self.expert) if self.offload else 0.0
        )
        return max(computing_s, sharding_s) + max(0.0, replicas_s - computing_s / passes * 2 / 3) + step_s

    def waits_for_shards(self, batch: UpdateLoad) -> bool:
        """Whether FSDP's communication takes longer than everything that it overlaps with."""
        passes = self.passes(self.computed(batch).tokens)
        sharding_s = shard_exchange_s(self.shape, self.gpu, self.tp, self.fsdp_ranks, passes, self.lora, self.expert)
        return sharding_s > self.computing_s(batch)

    def computing_s(self, batch: UpdateLoad) -> float:
        """Time of an update without the communication of FSDP and of replicas."""
        return self._passes_s(self.computed(batch))

    def computed(self, batch: UpdateLoad) -> UpdateLoad:
        """What passes compute: of the trees that an update may be cut into, those that take the least time."""
        plain = batch.computed(self.tokens_per_pack)
        return min((plain, *batch.in_trees), key=self._passes_s) if batch.in_trees else plain

    def _passes_s(self, batch: UpdateLoad) -> float:
        passes = self.passes(batch.tokens)
        terms = train_terms(
            self.shape,
            self.gpu,
            self.precision,
            tokens=batch.tokens,
            answer_tokens=batch.answer_tokens,
            squares=batch.squares,
            joins=batch.joins,
            passes=passes,
            recompute=self.recompute,
            tp=self.tp,
            data=self.fsdp_ranks,
            replicate=self.replicate,
            lora=self.lora,
        )
        each = batch.tokens / self.batch_ranks
        tensor_s = tensor_exchange_s(self.shape, self.gpu, self.tp, each / self.context, passes, self.recompute)
        context_s = context_exchange_s(self.shape, self.gpu, self.tp, self.context, each, self.recompute)
        passes_s = total_s(self.gpu.train, terms)
        if self.recompute == "offload":
            passes_s = max(passes_s, offload_s(self.shape, each / self.context, self.tp))
        return passes_s + self._accumulate_s(passes) + tensor_s + context_s

    def _accumulate_s(self, passes: float) -> float:
        if passes == 1:
            return 0.0
        return (
            passes
            * ACCUMULATE_BYTES
            * num_trained(self.shape, self.lora)
            / (self.fsdp_ranks * self.tp)
            / self.gpu.bytes_per_s
        )

    @property
    def memory_bytes(self) -> float:
        """Memory of one rank."""
        return sum(self.memory_kinds.values()) + WORKSPACE_BYTES

    @property
    def memory_kinds(self) -> dict[str, float]:
        """Bytes of one rank's tensors, by kind."""
        ranks = self.replicate * self.fsdp_ranks
        passing = pass_bytes(
            self.shape,
            self.tokens_per_pack,
            self.recompute,
            self.tp,
            ranks,
            lora=self.lora,
            context=self.context,
            data=self.fsdp_ranks,
            expert=self.expert,
        )
        state = training_state(self.shape, self.tp, self.fsdp_ranks, self.replicate, self.lora, self.base, self.expert)
        if self.offload:
            visiting = visiting_state_bytes(self.shape, self.tp, self.fsdp_ranks, self.replicate)
            state["optimizer state"] = max(0.0, visiting - sum(passing.values()))  # it comes when activations are gone
        return {**state, **passing}

    @property
    def host_bytes(self) -> float:
        """Host memory of one rank's optimizer state and activations."""
        state = (
            offloaded_state_bytes(self.shape, self.tp, self.fsdp_ranks, self.replicate, self.expert)
            if self.offload
            else 0.0
        )
        away = self.recompute == "offload"
        return state + (offloaded_bytes(self.shape, self.tokens_per_pack / self.context, self.tp) if away else 0.0)
