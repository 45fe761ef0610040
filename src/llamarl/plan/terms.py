"""The terms of time and memory, each a short pure function of a model, a GPU and a layout.

Unless stated otherwise, a term is the hardware's best time (its roofline); our code needs that time multiplied by a factor
from the GPU's description (`gpus.py`). docs/theory.md lists every formula. `tp` is the number of tensor-parallel ranks,
`rows` the number of tokens that a product is applied to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import log, log2, sqrt

from msgspec.structs import replace

from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.families.adapters import active_adapter_parameters, num_adapter_parameters
from llamarl.families.family import COLUMNS, ROWS
from llamarl.families.parameters import (
    active_block_parameters,
    block_parameters,
    embedding_of,
    family_of,
    head_of,
    layer_parameters,
    num_parameters,
    parameters,
)
from llamarl.model_spec import ModelSpec
from llamarl.plan.gpus import Factors, Gpu
from llamarl.shape_buckets import padded_tokens

WIDTH = {"fp32": 4, "bf16": 2, "fp8": 1, "int8": 1}  # bytes per weight
CPU_PREFILL_ROWS = 16  # prompts read at once: always on a CPU, at most on a GPU (generate/device_runner.py)

Terms = Mapping[str, float]


def total_s(factors: Factors, terms: Terms) -> float:
    """Sum of the terms, each multiplied by its factor."""
    return float(sum(getattr(factors, name) * value for name, value in terms.items()))


def activation_width(precision: str) -> int:
    """Bytes per activation, key or value: bf16 where the weights are narrower."""
    return max(2, WIDTH[precision])


# Products


@lru_cache(maxsize=256)
def layer_products(shape: ModelSpec, tp: int) -> tuple[tuple[float, float], ...]:
    """(outputs, inputs) of a layer's products on one rank, without experts. Matrices that read the same input are one
    product."""
    outputs, inputs = dict[str, float](), dict[str, float]()
    for matrix in family_of(shape).layer(shape):
        if matrix.is_product:
            outputs[matrix.kind] = outputs.get(matrix.kind, 0.0) + matrix.local_size(ROWS, tp)
            inputs[matrix.kind] = matrix.local_size(COLUMNS, tp)
    return tuple((outputs[kind], inputs[kind]) for kind in outputs)


def product_s(gpu: Gpu, precision: str, rows: float, outputs: float, inputs: float, out_width: int = 2) -> float:
    """One product: max(2 * rows * outputs * inputs / FLOP rate, bytes of weights, input and output / memory rate)."""
    moved = outputs * inputs * WIDTH[precision]
    moved += rows * (inputs * activation_width(precision) + outputs * max(out_width, activation_width(precision)))
    rate = gpu.flops("bf16" if precision == "int8" else precision)  # int8 weights are multiplied with bf16 inputs
    return max(2 * rows * outputs * inputs / rate, moved / gpu.bytes_per_s)


def expert_products(shape: ModelSpec, tp: int, expert: int = 1) -> tuple[tuple[float, float], ...]:
    """(outputs, inputs) of the products of one expert on one rank, of which `expert` parts hold different experts."""
    inner = shape.expert_size * expert / tp
    return (2 * inner, shape.hidden_size), (shape.hidden_size, inner)


def busiest_share(copies: float, expert: int) -> float:
    """Share of so many pairs of a token and an expert that the busiest of `expert` parts has, about, if tokens choose evenly
    and apart from one another: the mean, and as many standard deviations as the largest of so many is above it."""
    spread = sqrt(2 * log(expert) * (1 - 1 / expert) / expert / copies) if expert > 1 and copies else 0.0
    return min(1.0, 1 / expert + spread)


def experts_s(
    shape: ModelSpec, gpu: Gpu, precision: str, rows: float, tp: int, used: float | None = None, expert: int = 1
) -> float:
    """Time of the experts of one layer: the operations of each token's experts, or the bytes of those that are used. All
    wait for the rank whose experts have most tokens. Narrow weights are made wide on the way."""
    used = shape.used_experts(rows) if used is None else used
    share = busiest_share(rows * shape.experts_per_token, expert)
    found, copies, used = 0.0, rows * shape.experts_per_token * share, min(used * share, shape.experts / expert)
    for outputs, inputs in expert_products(shape, tp, expert):
        moved = used * outputs * inputs * WIDTH[precision] + copies * (inputs + outputs) * activation_width(precision)
        found += max(2 * copies * outputs * inputs / gpu.flops(_products_in(precision)), moved / gpu.bytes_per_s)
    return found


def block_products_s(shape: ModelSpec, gpu: Gpu, precision: str, rows: float, tp: int, expert: int = 1) -> float:
    """Time of all products of all layers, forward."""

    def layer_s(of: ModelSpec) -> float:
        return sum(product_s(gpu, precision, rows, *sizes) for sizes in layer_products(of, tp))

    if not shape.experts:
        return shape.num_layers * layer_s(shape)
    mixed = len(shape.expert_layers)
    with_experts = mixed * (layer_s(shape) + experts_s(shape, gpu, precision, rows, tp, expert=expert))
    return with_experts + (shape.num_layers - mixed) * layer_s(replace(shape, experts=0))


def head_s(shape: ModelSpec, gpu: Gpu, precision: str, rows: float, tp: int) -> float:
    """The head's product, whose fp32 scores are written; the head stays bf16 where the rest is narrower."""
    outputs, inputs = head_of(shape).shape
    return product_s(gpu, _products_in(precision), rows, outputs / tp, inputs, out_width=4)


# Generating


def kv_bytes_per_token(shape: ModelSpec, precision: str, tp: int = 1, cache: str = "auto") -> float:
    """Bytes of cache per token on one rank. An fp8 cache has a 4-byte scale per vector."""
    heads = shape.num_kv_heads / min(tp, shape.num_kv_heads)
    each = shape.head_dim + 4 if cache == "fp8" else shape.head_dim * activation_width(precision)
    return 2 * shape.num_layers * heads * each


def decode_terms(
    shape: ModelSpec,
    gpu: Gpu,
    precision: str,
    rows: float,
    cached_tokens: float,
    tp: int = 1,
    lora: LoraConfig = NO_LORA,
    expert: int = 1,
) -> dict[str, float]:
    """Terms of a decode step of `rows` sequences with `cached_tokens` cached tokens in total. Adapters stand beside the
    products."""
    products = block_products_s(shape, gpu, precision, rows, tp, expert) + head_s(shape, gpu, precision, rows, tp)
    return {
        "products": products + adapter_products_s(shape, gpu, precision, rows, tp, lora),
        "cache": cached_tokens * kv_bytes_per_token(shape, precision, tp) / gpu.bytes_per_s,
        "traffic": rows * forward_traffic(shape, precision, tp) / gpu.bytes_per_s,
        "scores": rows * shape.vocab_size / tp * 4 / gpu.bytes_per_s,
        "layer_s": shape.num_layers,
        "narrow_s": shape.num_layers if precision == "fp8" else 0,
        "step_s": 1.0,
        "row_s": rows,
    }


def adapter_products_s(shape: ModelSpec, gpu: Gpu, precision: str, rows: float, tp: int, lora: LoraConfig) -> float:
    """Time of the products with all adapters, forward; they are bf16 where the weights are narrower."""
    rate, width = gpu.flops(_products_in(precision)), activation_width(precision)
    work = 2 * rows * active_adapter_parameters(shape, lora) / tp
    return max(work / rate, num_adapter_parameters(shape, lora) / tp * width / gpu.bytes_per_s)


def forward_traffic(shape: ModelSpec, precision: str, tp: int) -> float:
    """Bytes per token that norms, rotations, residuals and silu read and write in a forward pass."""
    each = (13 + 4 * shape.expert_copies) * shape.hidden_size + 4 * shape.inner_units / tp
    return shape.num_layers * each * activation_width(precision)


def decode_exchange_s(shape: ModelSpec, gpu: Gpu, rows: float, tp: int, width: int = 2) -> float:
    """Time of a step's all-reduces: two per layer, one for the embedding, and one for the maxima of the logits."""
    if tp == 1:
        return 0.0
    return (2 * shape.num_layers + 2) * all_reduce_s(gpu, rows * shape.hidden_size * width, tp)


def prefill_s(
    shape: ModelSpec, gpu: Gpu, precision: str, prompts: int, tokens: float, tp: int = 1, expert: int = 1
) -> float:
    """Time to read prompts of `tokens` tokens: products, causal attention, launches. No head: nothing is sampled yet."""
    rows = prompts * tokens
    pairs = prompts * seen_square(tokens, shape.windows)
    attention_s = 2 * shape.num_layers * shape.q_size / tp * pairs / gpu.flops(_products_in(precision))
    exchange_s = 0.0 if tp == 1 else 2 * shape.num_layers * all_reduce_s(gpu, rows * shape.hidden_size * 2, tp)
    return gpu.decode.prefill * (
        gpu.decode.products * block_products_s(shape, gpu, precision, rows, tp, expert)
        + gpu.train.attention * attention_s
        + gpu.decode.traffic * rows * forward_traffic(shape, precision, tp) / gpu.bytes_per_s
        + gpu.decode.layer_s * shape.num_layers
        + exchange_s
    )


def seen_square(length: float, windows: Sequence[int]) -> float:
    """Twice the pairs of tokens in a document that see each other, so the squared length without windows; mean over the
    layers, of which each has one of these windows (0: none)."""
    if not windows:
        return length * length
    layers = (length * length if not w or length <= w else w * (2 * length - w) for w in windows)
    return sum(layers) / len(windows)


def _products_in(precision: str) -> str:
    """Precision of attention and head: bf16 where the weights are narrower."""
    return "bf16" if WIDTH[precision] == 1 else precision


# Training


@lru_cache(maxsize=256)
def recomputed_parameters(shape: ModelSpec, recompute: str) -> int:
    """Number of weights whose product is computed again in the backward pass: of none, of the MLPs, or of all layers."""
    if recompute in ("selective", "offload"):
        return sum(_mlp_parameters(shape, layer) for layer in range(shape.num_layers))
    return active_block_parameters(shape) if recompute == "full" else 0


def _mlp_parameters(shape: ModelSpec, layer: int) -> int:
    """Number of weights of a layer's MLP that each token is multiplied with."""
    if shape.has_experts(layer):
        return 3 * shape.experts_per_token * shape.expert_size * shape.hidden_size
    return sum(one.size for one in layer_parameters(shape, layer) if one.kind in ("mlp_in", "mlp_out"))


def train_terms(
    shape: ModelSpec,
    gpu: Gpu,
    precision: str,
    *,
    tokens: float,
    answer_tokens: float,
    squares: float,
    joins: float = 0.0,
    passes: float,
    recompute: str = "none",
    tp: int = 1,
    data: int = 1,
    replicate: int = 1,
    lora: LoraConfig = NO_LORA,
) -> dict[str, float]:
    """Terms of an update on one of replicate * data * tp ranks. `tokens`, `answer_tokens` and `squares` (the sum of the
    documents' squared lengths) are of the whole update, and so are `joins`, the tokens whose attention is joined from two
    parts; `passes` is the number of passes of one rank."""
    ranks, rate = tp * data * replicate, gpu.flops(precision)
    each = 4 if lora else 6  # products per weight and token: a frozen one has no gradient
    blocks = (each * active_block_parameters(shape) + 2 * recomputed_parameters(shape, recompute)) * tokens
    blocks += 6 * active_adapter_parameters(shape, lora) * tokens
    head = each * head_of(shape).size * answer_tokens
    attention = 6 * shape.num_layers * shape.q_size * squares * (1 + (recompute == "full") / 3)
    traffic = activation_traffic(shape, precision) * tokens + 3 * 4 * shape.vocab_size * answer_tokens
    traffic += join_traffic(shape, precision) * joins + adapter_traffic(shape, precision, lora, recompute) * tokens
    return {
        "products": (blocks + head) / ranks / rate,
        "attention": attention / ranks / rate,
        "traffic": traffic / ranks / gpu.bytes_per_s,
        "optimizer": 26 * num_trained(shape, lora) / (tp * data) / gpu.bytes_per_s,
        "layer_s": shape.num_layers * passes,
        "update_s": 1.0,
    }


def activation_traffic(shape: ModelSpec, precision: str) -> float:
    """Bytes per token that norms, rotations, residuals and silu read and write, forward and backward. For each expert of a
    token, its state, its gradient and its state again are gathered (read and written), and the experts' results and the
    gradients of their inputs are read to be summed. silu reads 2 and writes 1 number for each inner unit; backward it reads 3
    and writes 2, with experts 3."""
    each = (40 + 8 * shape.expert_copies) * shape.hidden_size + 8 * shape.inner_units + shape.expert_rows()
    return shape.num_layers * each * activation_width(precision)


def adapter_traffic(shape: ModelSpec, precision: str, lora: LoraConfig, recompute: str) -> float:
    """Bytes per token that products with adapters read and write beside those of the base; they are too thin for anything
    else to limit them. Forward, each reads the input of its layer, and writes a result that is read again to be added.
    Backward, its gradient is read twice and the input once; the input's gradient is written, and read to be added."""
    if not lora:
        return 0.0
    inputs_and_outputs = active_adapter_parameters(shape, lora) / lora.rank
    return inputs_and_outputs * (5.5 if recompute == "full" else 4) * activation_width(precision)


def join_traffic(shape: ModelSpec, precision: str) -> float:
    """Bytes per token that joining the outputs of two parts of attention, and their gradients, reads and writes."""
    return shape.num_layers * 6 * shape.q_size * activation_width(precision)


def num_trained(shape: ModelSpec, lora: LoraConfig) -> int:
    """Number of weights that are trained: all, or those of the adapters."""
    return num_adapter_parameters(shape, lora) if lora else num_parameters(shape)


def shard_exchange_s(
    shape: ModelSpec, gpu: Gpu, tp: int, data: int, passes: float, lora: LoraConfig = NO_LORA, expert: int = 1
) -> float:
    """FSDP's communication: each pass gathers the weights twice in bf16 (forward, backward) and reduces the gradients once in
    fp32."""
    if data == 1:
        return 0.0
    held = num_parameters(shape) + num_adapter_parameters(shape, lora)
    each_bytes = ((2 + 2) * held + 4 * num_trained(shape, lora)) / tp * (data - 1) / data
    each_bytes *= fullest_share(shape, data, expert)
    return passes * each_bytes / (link_gb_s(gpu, tp * data) * 1e9)


def replica_exchange_s(
    shape: ModelSpec, gpu: Gpu, tp: int, data: int, replicate: int, lora: LoraConfig = NO_LORA
) -> float:
    """HSDP's communication: an all-reduce of a rank's gradients over the replicas, once per update, in fp32."""
    if replicate == 1:
        return 0.0
    each = num_trained(shape, lora) / (tp * data) * 4 * 2 * (replicate - 1) / replicate
    return each / (link_gb_s(gpu, tp * data * replicate) * 1e9)


def tensor_exchange_s(
    shape: ModelSpec, gpu: Gpu, tp: int, tokens_per_rank: float, passes: float, recompute: str = "none"
) -> float:
    """Tensor parallelism's communication: four all-reduces per layer, two forward and two backward. Blocks that are computed
    again have two more, and first gather their fp32 input, of which each rank has kept a part (train/recompute.py)."""
    if tp == 1 or not passes:
        return 0.0
    each = tokens_per_rank / passes * shape.hidden_size
    reduces, gather_s = (6, all_gather_s(gpu, 4 * each, tp)) if recompute == "full" else (4, 0.0)
    return passes * shape.num_layers * (reduces * all_reduce_s(gpu, 2 * each, tp) + gather_s)


HOST_GB_S = 45.0  # copies between a GPU and pinned host memory, in each direction (PCIe 5, 16 lanes)


def offload_s(shape: ModelSpec, tokens_per_rank: float, tp: int, width: int = 2) -> float:
    """Time to copy what layers keep to host memory and back; the last layer's stays. It overlaps with the passes."""
    return 2 * offloaded_bytes(shape, tokens_per_rank, tp, width) / (HOST_GB_S * 1e9)


def context_exchange_s(
    shape: ModelSpec, gpu: Gpu, tp: int, context: int, tokens: float, recompute: str = "none"
) -> float:
    """Context parallelism's communication for `tokens` tokens of a group of ranks: each layer gathers keys and values in bf16
    in the forward and in the backward pass, and once more where whole blocks are computed again, and sums their gradients in
    fp32. It does not overlap with anything."""
    if context == 1:
        return 0.0
    gathers = 3 if recompute == "full" else 2
    each_bytes = 2 * shape.kv_size / tp * (2 * gathers + 4) * tokens * (context - 1) / context
    return shape.num_layers * each_bytes / (link_gb_s(gpu, tp * context) * 1e9)


# Links

HOP_S = 4e-6  # one step of a collective between GPUs of a host
HOST_HOP_S = 12e-6  # one step of a collective between hosts
COLLECTIVE_S = 8e-6  # fixed cost of a collective


def link_gb_s(gpu: Gpu, ranks: int) -> float:
    """Bandwidth of the slowest link in a group of `ranks` neighboring ranks."""
    return gpu.links.nvlink_gb_s if ranks <= gpu.gpus_per_host else gpu.nic_gb_s


def all_reduce_s(gpu: Gpu, num_bytes: float, ranks: int) -> float:
    """Time of an all-reduce: within the hosts, then between them (each GPU with its share of the bytes), and back. Each kind
    of link carries 2 (n-1)/n of the bytes; the number of steps grows with the logarithm of the ranks."""
    local = min(ranks, gpu.gpus_per_host)
    hosts = -(-ranks // gpu.gpus_per_host)
    inside_s = 2 * (local - 1) / local * num_bytes / (gpu.links.nvlink_gb_s * 1e9)
    between_s = 2 * (hosts - 1) / hosts * num_bytes / local / (gpu.nic_gb_s * 1e9)
    hops_s = 2 * (log2(local) * HOP_S + log2(hosts) * HOST_HOP_S * gpu.host_hops)
    return COLLECTIVE_S + inside_s + between_s + hops_s if ranks > 1 else 0.0


def all_gather_s(gpu: Gpu, num_bytes: float, ranks: int) -> float:
    """Time until each rank has all `num_bytes`, of which it has its part: half of an all-reduce."""
    return (all_reduce_s(gpu, num_bytes, ranks) + COLLECTIVE_S) / 2 if ranks > 1 else 0.0


def sync_s(
    shape: ModelSpec, gpu: Gpu, precision: str, sources: int, targets: int, tp: int, lora: LoraConfig = NO_LORA
) -> float:
    """Time to send the weights from `sources` ranks to `targets` ranks, each of which takes 1/tp of them, over the slower
    end's links. A TransferPlan gives it more exactly."""
    wanted = published_bytes(shape, precision, lora) / tp
    return max(wanted, wanted * targets / sources) / (gpu.nic_gb_s * 1e9)


def copy_s(gpu: Gpu, num_bytes: float) -> float:
    """Time to publish or load `num_bytes` within one device's memory: read and written once."""
    return gpu.engine.copy * 2 * num_bytes / gpu.bytes_per_s + gpu.engine.copy_s


# Memory, per rank

SCORE_BYTES = 1 << 30  # fp32 scores of a chunk of tokens, at most (train/lm_head.py)
WORKSPACE_BYTES = 3 << 30  # CUDA's context, graphs, fragmentation
MEMORY_SHARE = 0.94  # share of a GPU's memory that a plan may use


def weight_bytes(shape: ModelSpec, precision: str) -> float:
    """Bytes of all weights in this precision; embedding, head and norms are at least bf16."""
    blocks = block_parameters(shape)
    return blocks * WIDTH[precision] + (num_parameters(shape) - blocks) * activation_width(precision)


def published_bytes(shape: ModelSpec, precision: str, lora: LoraConfig = NO_LORA) -> float:
    """Bytes of a version on its way to a generator: all weights, or the adapters, which are never narrower than bf16."""
    if lora:
        return num_adapter_parameters(shape, lora) * activation_width(precision)
    return weight_bytes(shape, precision)


@lru_cache(maxsize=256)
def fullest_share(shape: ModelSpec, data: int, expert: int = 1) -> float:
    """Factor by which the fullest of `data` FSDP ranks holds more weights than an even share: FSDP deals out whole experts,
    of which a tensor rank has 1 / `expert`."""
    if not shape.experts:
        return 1.0
    held = -(-shape.experts // expert)
    uneven = -(-held // data) * data / held - 1
    mixed = sum(one.size for one in parameters(shape).values() if one.is_expert)
    return 1 + uneven * mixed / num_parameters(shape)


def training_state(
    shape: ModelSpec,
    tp: int,
    data: int,
    replicate: int = 1,
    lora: LoraConfig = NO_LORA,
    base: str = "bf16",
    expert: int = 1,
) -> dict[str, float]:
    """Bytes per rank by kind, 16 per parameter, sharded over the ranks of a replica. Without FSDP the weights are half of
    their masters. Gradients are summed in fp32. With adapters, the frozen weights take what their precision `base` takes,
    and nothing else."""
    if lora:
        adapters = num_adapter_parameters(shape, lora) / (tp * data)
        frozen = weight_bytes(shape, base) / (tp * data) * fullest_share(shape, data, expert)
        return {"weights": frozen + 4 * adapters, "optimizer state": 8 * adapters, "gradients": 4 * adapters}
    each = num_parameters(shape) / (tp * data) * fullest_share(shape, data, expert)
    weights = 2 if data * replicate == 1 else 4
    return {"weights": weights * each, "optimizer state": (12 - weights) * each, "gradients": 4 * each}


def training_state_bytes(
    shape: ModelSpec,
    tp: int,
    data: int,
    replicate: int = 1,
    lora: LoraConfig = NO_LORA,
    base: str = "bf16",
    expert: int = 1,
) -> float:
    """Bytes per rank of masters, moments and gradients, and of frozen weights."""
    return sum(training_state(shape, tp, data, replicate, lora, base, expert).values())


def offloaded_state_bytes(shape: ModelSpec, tp: int, data: int, replicate: int = 1, expert: int = 1) -> float:
    """Bytes of host memory per rank with `trainer.offload`: moments, and without FSDP the low halves of the masters."""
    return training_state(shape, tp, data, replicate, expert=expert)["optimizer state"]


def offloaded_step_s(shape: ModelSpec, tp: int, data: int, replicate: int = 1, expert: int = 1) -> float:
    """Time that an update's step takes longer with `trainer.offload`: all of the state comes and goes, both ways at once."""
    return offloaded_state_bytes(shape, tp, data, replicate, expert) / (HOST_GB_S * 1e9)


def visiting_state_bytes(shape: ModelSpec, tp: int, data: int, replicate: int = 1) -> float:
    """Bytes per rank of the state that is on the device at once with `trainer.offload`: of the three largest matrices
    (train/optimizer.py)."""
    largest = sum(sorted(one.size for one in parameters(shape).values())[-3:]) / (tp * data)
    return largest * (10 if data * replicate == 1 else 8)


OFFLOADED_LAYERS = 3  # whose activations are on the device with recompute=offload: one computes, others come and go


def offloaded_bytes(shape: ModelSpec, tokens: float, tp: int, width: int = 2) -> float:
    """Bytes of host memory per rank that the activations of a pass of `tokens` tokens take with recompute=offload."""
    return tokens * (shape.num_layers - 1) * _kept_bytes(shape, "selective", tp, width)


def pass_bytes(
    shape: ModelSpec,
    tokens: float,
    recompute: str,
    tp: int,
    batch_ranks: int,
    width: int = 2,
    lora: LoraConfig = NO_LORA,
    context: int = 1,
    data: int = 1,
    expert: int = 1,
) -> dict[str, float]:
    """Most bytes per rank that a pass of `tokens` tokens takes, with `width` bytes per number, by kind: what FSDP gathers and
    reduces, if several ranks share a batch, and activations. It is the fullest of four moments: in the head, in the backward
    pass of the last layer, when the embedding's gradient is there, and when FSDP reduces it with the head's. With adapters,
    head, embedding and layers have no gradients. `context` ranks share the tokens,
    and `data` ranks the weights."""
    seen, tokens = tokens, tokens / context
    ends, layer = (
        (num_parameters(shape) - block_parameters(shape)) / tp,
        block_parameters(shape) / shape.num_layers / tp * fullest_share(shape, data, expert),
    )
    embedding, head = embedding_of(shape).size, head_of(shape).size / tp
    layers = min(shape.num_layers, OFFLOADED_LAYERS) if recompute == "offload" else shape.num_layers
    kept = tokens * layers * _kept_bytes(shape, recompute, tp, width, expert)
    if lora:
        in_head = kept + _frozen_head_bytes(shape, tokens, tp)
        in_layer = (
            kept
            + _layer_bytes(shape, tokens, recompute, tp, width, expert)
            + _context_bytes(shape, seen, tp, context, width)
        )
        gathered, activations = max((0.0, in_head), (2 * width * layer * (batch_ranks > 1), in_layer), key=sum)
        return {"gathered": gathered + width * ends * (batch_ranks > 1), "activations": activations}
    moments = {
        "head": (0.0, kept + _head_bytes(shape, tokens, tp, width)),
        "layer": (
            2 * width * layer + 4 * layer,
            kept
            + _layer_bytes(shape, tokens, recompute, tp, width, expert)
            + _context_bytes(shape, seen, tp, context, width)
            + width * head,
        ),
        "embedding": (4 * layer, width * (embedding + head)),  # every tensor rank makes the gradient of all of it
        "reduced": (4 * ends, width * embedding / tp),
    }
    if batch_ranks == 1:
        return {"activations": max(activations for _, activations in moments.values())}
    gathered, activations = max(moments.values(), key=sum)
    return {"gathered": width * ends + gathered, "activations": activations}


def _head_bytes(shape: ModelSpec, tokens: float, tp: int, width: int) -> float:
    """The head's gradient is summed in fp32 and then narrowed, beside the scores of the last chunk. With tensor parallelism,
    four tensors of a chunk's size are alive at once; otherwise the scores and their narrow gradient."""
    head, scores = head_of(shape).size / tp, min(SCORE_BYTES, 4 * tokens * shape.vocab_size / tp)
    return 4 * head + max(scores * (1.5 if tp == 1 else 4), scores + width * head) + tokens * 10 * shape.hidden_size


def _frozen_head_bytes(shape: ModelSpec, tokens: float, tp: int) -> float:
    """As `_head_bytes`, without the gradient of the head. Of several chunks, scores of the last one are alive while the next
    one's are made."""
    whole = 4 * tokens * shape.vocab_size / tp
    at_once = (2 if whole > SCORE_BYTES else 1.5) if tp == 1 else 4
    return min(SCORE_BYTES, whole) * at_once + tokens * 10 * shape.hidden_size


def _layer_bytes(shape: ModelSpec, tokens: float, recompute: str, tp: int, width: int, expert: int) -> float:
    """A layer's backward pass: what was not kept of it, or gradients of its MLP. For each pair of a token and an expert there
    are also the gradient of its result, and of each inner unit four numbers (gradients before and behind the activation, and
    what it made); or two numbers of the input's size (adapters add to its gradient) beside the first of these gradients."""
    whole, attention = (_kept_bytes(shape, how, tp, width, expert) for how in ("none", "selective"))
    state, inner = shape.expert_copies * shape.hidden_size, shape.expert_rows(expert) / tp
    passing = width * max(state + 4 * inner, 2 * state + 2 * inner)
    return tokens * ((whole if recompute == "full" else whole - attention + 4 * shape.hidden_size) + passing)


def _context_bytes(shape: ModelSpec, tokens: float, tp: int, context: int, width: int) -> float:
    """Keys and values of all ranks in a layer's backward pass: gathered, put in order for each run of queries, and their
    gradients, whose sum is fp32."""
    return 0.0 if context == 1 else tokens * 2 * shape.kv_size / tp * (2 * width + 2 * 4)


def _kept_bytes(shape: ModelSpec, recompute: str, tp: int, width: int, expert: int = 1) -> float:
    """Bytes per token that a layer keeps: the stream before it and between its halves, which is fp32, and inputs and results
    of its products, of which experts keep the result of the first one only. With tensor parallelism one of the two norms is
    computed again, but not where experts read it, and a block that is computed again keeps its part of the stream. Routers
    keep their input in fp32. Ranks with different experts have rows for those of others, too."""
    norms, mixed = 2 if tp == 1 else 1, shape.expert_share
    attention = (2 * 4 + norms * width) * shape.hidden_size + width * (2 * shape.q_size + 2 * shape.kv_size) / tp
    mlp = width * (3 * shape.inner_rows(expert) - shape.expert_rows(expert)) / tp
    mlp += mixed * (4 + (2 - norms) * width) * shape.hidden_size
    some = {"none": attention + mlp, "selective": attention, "offload": attention, "full": 4 * shape.hidden_size / tp}
    return some[recompute]


def wire(precision: str, shape: ModelSpec) -> str:
    """Precision in which weights are sent: that of the generator, but bf16 for those that are quantized on arrival: int8, and
    fp8 of models with experts."""
    return "bf16" if precision == "int8" or (precision == "fp8" and shape.experts) else precision


def held_bytes(shape: ModelSpec, precision: str, lora: LoraConfig = NO_LORA, *, merged: bool = False) -> float:
    """Bytes of a generator's weights, with the copies quantized on arrival beside the originals (model/quantize.py). A frozen
    base is quantized once, so only the copies stay; beside it are the adapters, or a copy that they are merged into."""
    if lora:
        copy = block_parameters(shape) * WIDTH[precision] if merged else 0
        return weight_bytes(shape, precision) + num_adapter_parameters(shape, lora) * activation_width(precision) + copy
    narrow = block_parameters(shape) * WIDTH[precision] if wire(precision, shape) != precision else 0
    return weight_bytes(shape, wire(precision, shape)) + narrow


def passing_bytes(shape: ModelSpec, tp: int, slots: int, prompt_tokens: int, expert: int = 1) -> float:
    """Bytes per rank that a generator takes for a moment: reading as many prompts as it reads at once, or the scores of all
    slots (with tensor parallelism: those of every rank, joined). Experts have their results, what the activation made and
    what it read, which kernels do not store."""
    reading = CPU_PREFILL_ROWS * padded_tokens(prompt_tokens - 1)
    inner = (2 * shape.inner_rows(expert) + 4 * shape.expert_rows(expert)) / tp
    states = reading * ((14 + 2 * shape.expert_copies) * shape.hidden_size + inner)
    scores = 4 * slots * shape.vocab_size * (1 if tp == 1 else 2 + 1 / tp)
    return max(states, scores)
