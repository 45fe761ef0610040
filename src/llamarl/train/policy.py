"""The policy (or the critic) on this rank: its shards of the model, the precision of its passes, and log-probs of packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.algo.batch import Document
from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.families.parameters import active_block_parameters, parameters
from llamarl.model.adapter_folder import check_base_of
from llamarl.model.base import Base
from llamarl.model.checkpoint import Checkpoint, empty_model, meta_model, open_checkpoint, random_model
from llamarl.model.classifier import open_value_model
from llamarl.model.spread import is_spread
from llamarl.model.transformer import Attend, Transformer
from llamarl.model_spec import ModelSpec
from llamarl.plan.trainer import LEAST_SHARED
from llamarl.routes import route_format
from llamarl.train.attention import CudnnDocuments, document_attention, not_by_cudnn, uses_long_rows
from llamarl.train.balance_loss import balance_loss
from llamarl.train.context import take_share
from llamarl.train.context_attention import context_attention
from llamarl.train.fp16 import take_half_operands
from llamarl.train.lm_head import Head, Vocabulary, chunked_logprobs
from llamarl.train.lora import load_adapters, start_adapters
from llamarl.train.mesh import LONE_RANK, TrainerMesh
from llamarl.train.narrow_base import take_narrow_base
from llamarl.train.packing import PADDING, TILE, Pack, Sharing, make_packs
from llamarl.train.parallel import parallelize, tie_head
from llamarl.train.routing import RouteReport, RouteSums
from llamarl.train.shards import owned_shards

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_LENGTHS = (
    32  # most lengths of rows, where each is compiled apart; torch stops compiling at twice as many (`parallel.py`)
)
_CPU_TILE = 8  # tokens; where attention is masked, padding costs more than ragged products


@dataclass(frozen=True)
class ComputeSettings:
    """How this rank computes its passes."""

    device: torch.device
    dtype: torch.dtype  # of the operands of products; with float16, weights and gradients are bfloat16 (see `half.py`)
    mesh: TrainerMesh = LONE_RANK
    recompute: str = "none"
    compiled: bool = False
    tokens_per_pack: int = 16_384
    temperature: float = 1.0
    lora: LoraConfig = NO_LORA
    share_prompts: str = "off"  # off, on or auto: whether packs compute once what documents begin with
    cudnn_from: int = (
        0  # tokens; documents of at least this length have cuDNN's attention, where it can take them; 0: none
    )
    replay_routes: bool = False  # whether tokens take the experts that were recorded when they were sampled
    balance_loss: float = 0.0  # weight of the loss that asks routers to use all experts equally

    def of_another_model(self) -> ComputeSettings:
        """The same without what is the policy's alone, for a reference, a teacher or a critic: adapters, recorded experts and
        the balancing loss."""
        return replace(self, lora=NO_LORA, replay_routes=False, balance_loss=0.0)

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == torch.float16 else self.dtype

    @property
    def long_rows(self) -> bool:
        return uses_long_rows(self.device, self.dtype)

    @property
    def rows_multiple_of(self) -> int:
        """Number of tokens that long rows are padded to a multiple of. Blocks of tensor ranks are compiled for every length
        of rows apart, so these have few lengths. Where ranks share a row, each has whole tiles of it."""
        tile = (TILE if self.long_rows else _CPU_TILE) * self.mesh.context
        each_length = self.compiled and self.mesh.tensor > 1
        return -(-self.tokens_per_pack // (_LENGTHS * tile)) * tile if each_length else tile


class Policy:
    def __init__(self, model: Transformer, computing: ComputeSettings) -> None:
        self.model, self.computing = model, computing
        self.head = Head(
            computing.temperature,
            _vocabulary_of(model, computing.mesh),
            compiled=computing.compiled,
            divisor=model.shape.logit_divisor,
            softcap=model.shape.logit_softcap,
        )
        self._sharing = sharing_of(model.shape, computing)
        self.route_format = route_format(model.shape) if computing.replay_routes else None
        self.cudnn_tokens = 0  # that passes of this rank gave to cuDNN's attention so far

    def without_replay(self) -> Policy:
        """The same model, which chooses the experts of all tokens itself."""
        return Policy(self.model, replace(self.computing, replay_routes=False)) if self.route_format else self

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head; valid right after a pass, when FSDP has gathered it."""
        weight = self.model.lm_head.weight
        return weight.to_local() if is_spread(weight) else weight

    @property
    def long_rows(self) -> bool:
        """Whether packs are one long row. No FlashAttention bounds its scores, so models that do have rows and masks."""
        return self.computing.long_rows and not self.model.shape.attention_softcap

    def packs(self, documents: Sequence[Document], *, same_everywhere: bool = False) -> list[Pack]:
        """This rank's share of the documents, or all of them on every rank; of packs that ranks share, this rank's share."""
        how, mesh = self.computing, self.computing.mesh
        rank, num_ranks = (0, 1) if same_everywhere else (mesh.batch_rank, mesh.batch_ranks)
        if self.route_format is not None:
            for one in documents:
                if one.routes is not None:
                    self.route_format.check(one.routes, f"group {one.source[0]}")
        packs = make_packs(
            documents,
            how.tokens_per_pack,
            rank=rank,
            num_ranks=num_ranks,
            long_rows=self.long_rows or mesh.context > 1,
            multiple_of=how.rows_multiple_of,
            sharing=self._sharing,
            routes=self.route_format,
        )
        return packs if mesh.context == 1 else [take_share(pack, mesh.context, mesh.context_rank) for pack in packs]

    def hidden(self, pack: Pack, routing: RouteSums | None = None, *, all_fresh: bool = False) -> Tensor:
        """The states [N, C] that predict the pack's answer tokens. Of a model with experts, `routing` counts the pass;
        `all_fresh`: the version being trained has sampled all of it."""
        inputs = pack.tokens_RT, pack.positions_RT, self._attention(pack)
        if not self.model.shape.experts:
            hidden_RTC: Tensor = self.model(*inputs)
        else:
            hidden_RTC = self._through_experts(pack, inputs, routing, all_fresh)
        return hidden_RTC.flatten(0, 1).index_select(0, pack.at_N)

    def _through_experts(
        self, pack: Pack, inputs: tuple[Tensor, Tensor, Attend], routing: RouteSums | None, all_fresh: bool
    ) -> Tensor:
        routes_RTLK = pack.routes_RTLK if self.route_format else None
        routes_NLK = None if routes_RTLK is None else routes_RTLK.flatten(0, 1)
        if routing is None:
            return cast(Tensor, self.model(*inputs, routes=routes_NLK))
        report = RouteReport.empty(self.model.shape, pack.tokens_RT.numel(), pack.tokens_RT.device)
        probs_LE = counted_RT = None
        if routing.balances and torch.is_grad_enabled():
            probs_LE = report.shortfall_NL.new_zeros(routing.loads_LE.shape)
            counted_RT = (pack.nodes_RT != PADDING).float() * pack.is_work
        hidden_RTC: Tensor = self.model(
            *inputs,
            routes=routes_NLK,
            chosen=report.chosen_NLK,
            shortfall=report.shortfall_NL,
            counted=counted_RT,
            probs=probs_LE,
        )
        with torch.no_grad():
            used_NLK = routing.add(pack, report, all_fresh=all_fresh)
        if probs_LE is not None and counted_RT is not None:
            routing.add_balance(balance_loss(probs_LE, used_NLK, counted_RT.flatten(), self.computing.mesh))
        return hidden_RTC

    def route_sums(self) -> RouteSums | None:
        """What counts the routing of passes; None: the model has no experts."""
        if not self.model.shape.experts:
            return None
        return RouteSums(self.model.shape, self.computing.device, balances=self.computing.balance_loss > 0)

    def _attention(self, pack: Pack) -> Attend:
        how = self.computing
        if pack.share is not None:
            return context_attention(pack, how.mesh, long_rows=self.long_rows)
        is_suited = how.dtype == torch.bfloat16 and not not_by_cudnn(self.model.shape)
        cudnn_from, window = how.cudnn_from if is_suited else 0, max(self.model.shape.windows, default=0)
        attend = document_attention(pack, long_rows=self.long_rows, cudnn_from=cudnn_from, window=window)
        self.cudnn_tokens += sum(pack.lengths) if isinstance(attend, CudnnDocuments) else 0
        return attend

    def logprobs(self, pack: Pack, routing: RouteSums | None = None) -> Tensor:
        """Log-probs of the pack's answer tokens. `routing` counts the pass, of tokens that this version has sampled."""
        return self.states_and_logprobs(pack, routing)[1]

    @torch.no_grad()
    def states_and_logprobs(self, pack: Pack, routing: RouteSums | None = None) -> tuple[Tensor, Tensor]:
        """The same, with the states [N, C] that predict these tokens."""
        pack = pack.to(self.computing.device)
        hidden_NC = self.hidden(pack, routing, all_fresh=True)
        logprobs_N = chunked_logprobs(hidden_NC, self.head_weight, pack.targets_N, self.head)[0]
        self.reshard()
        return hidden_NC, logprobs_N

    def values_of(self, hidden_NC: Tensor) -> Tensor:
        """The fp32 values of states, where the head has one row; right after a pass, as `head_weight`."""
        return F.linear(hidden_NC.float(), self.head_weight.float())[:, 0]

    @torch.no_grad()
    def values(self, pack: Pack) -> Tensor:
        """The value of the state before each answer token, where the head has one row."""
        values_N = self.values_of(self.hidden(pack.to(self.computing.device)))
        self.reshard()
        return values_N

    def reshard(self) -> None:
        """Frees what a forward pass has gathered; otherwise only a backward pass would, and snapshots need shards."""
        if self.computing.mesh.token_ranks > 1:
            cast("FSDPModule", self.model).reshard()


_ATTENTION = 4.0  # times as long as a product takes for the same operations, on a GPU and on a CPU
_PART_OPERATIONS = 6e10  # operations per layer that products make while one more part is joined; estimated, 0.1 ms
_JOIN_OPERATIONS = 2000.0  # operations per layer and query feature that a product makes while attention is joined once


def sharing_of(shape: ModelSpec, computing: ComputeSettings) -> Sharing:
    """With `auto`, the prices of attention and of its joins against the products of one token; `on` asks for no price."""
    if computing.share_prompts != "auto":
        return Sharing(computing.share_prompts)
    products, features = 6.0 * active_block_parameters(shape), shape.num_layers * shape.q_size
    in_parts = computing.long_rows and not shape.attention_softcap
    return Sharing(
        "auto",
        LEAST_SHARED if in_parts else 1,
        square=6.0 * _ATTENTION * features / products,
        join=_JOIN_OPERATIONS * features / products if in_parts else 0.0,
        part=_PART_OPERATIONS * shape.num_layers / products if in_parts else 0.0,
    )


def _vocabulary_of(model: Transformer, mesh: TrainerMesh) -> Vocabulary:
    if mesh.tensor == 1:
        return Vocabulary()
    rows = -(-model.shape.vocab_size // mesh.tensor)  # as DTensor cuts: equal parts, the last ones shorter or empty
    return Vocabulary(rows * mesh.tensor_rank, mesh.tensor_group)


def load_policy(
    folder: Path,
    computing: ComputeSettings,
    *,
    adapter: Path | None = None,
    seed: int = 0,
    base: Base | None = None,
) -> Policy:
    """The folder's model. With several ranks, each reads only its own shards. With `computing.lora`, the model is frozen, and
    its adapters are those of the folder `adapter`, or new ones that depend on the seed. A model whose `base` is in memory
    already is not read again; it cannot be shared by ranks."""
    if base is not None:
        assert computing.mesh.size == 1
        model = base.model()
        take_narrow_base(model)
        parallelize_for(model, computing)
    else:
        model = _read_model(open_checkpoint(folder), computing)
    if computing.lora and adapter is not None:
        check_base_of(adapter, folder)
        load_adapters(model, computing.lora, adapter)
    elif computing.lora:
        start_adapters(model, computing.lora, seed)
    return Policy(model, computing)


def load_value_policy(folder: Path, computing: ComputeSettings) -> Policy:
    """The folder's model with a head of one row, which begins at zero where the folder has a language model."""
    return Policy(_read_model(open_value_model(folder), computing), computing)


def _read_model(checkpoint: Checkpoint, computing: ComputeSettings) -> Transformer:
    """The model, parallelized. With several ranks, each reads only its own shards."""
    if computing.mesh.size == 1:
        model = empty_model(checkpoint.shape, dtype=computing.weight_dtype, device=computing.device)
        checkpoint.fill(dict(model.named_parameters()))
        parallelize_for(model, computing)
        return model
    model = sharded_model(checkpoint.shape, computing)
    frozen = parameters(model.shape)
    shards = {name: one for name, one in owned_shards(model).items() if name in frozen and one.tensor.numel()}
    checkpoint.fill({name: one.tensor for name, one in shards.items()}, lambda spec: shards[spec.name].box)
    return model


def random_policy(shape: ModelSpec, computing: ComputeSettings, *, seed: int = 0) -> Policy:
    """A policy with untrained weights, made on its device."""
    model = random_model(shape, seed=seed, dtype=parameter_dtype(computing), device=computing.device)
    parallelize_for(model, computing)
    if computing.lora:
        start_adapters(model, computing.lora, seed)
    return Policy(model, computing)


def sharded_model(shape: ModelSpec, computing: ComputeSettings) -> Transformer:
    """The model with uninitialized memory for this rank's shards."""
    model = meta_shards(shape, computing)
    model.to_empty(device=computing.device)
    tie_head(model)
    return model


def meta_shards(shape: ModelSpec, computing: ComputeSettings) -> Transformer:
    """The model, parallelized, with this rank's shards on the meta device, without memory."""
    model = meta_model(shape).to(parameter_dtype(computing))
    parallelize_for(model, computing)
    return model


def parameter_dtype(computing: ComputeSettings) -> torch.dtype:
    """Type of the model's parameters. With FSDP they are fp32 masters, which it casts when it gathers them. A frozen model
    needs no masters."""
    masters = computing.mesh.token_ranks > 1 and not computing.lora
    return torch.float32 if masters else computing.weight_dtype


def parallelize_for(model: Transformer, computing: ComputeSettings) -> None:
    if computing.dtype == torch.float16:
        take_half_operands(model)
    parallelize(
        model,
        computing.mesh,
        recompute=computing.recompute,
        compiled=computing.compiled,
        compute_dtype=computing.weight_dtype,
        lora=computing.lora,
    )
