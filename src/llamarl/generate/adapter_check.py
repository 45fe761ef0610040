"""What a generator can say of its adapters: their hash, and what the base alone would have said of an answer.

The trainer compares the effect of the adapters on both sides, log-probs with minus without them: a hash alone would not
notice adapters that arrive and are not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from llamarl.families.adapters import adapter_names, adapter_parameters
from llamarl.families.parameters import parameters
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.parallel import TensorRank
from llamarl.model.adapter_digest import AdapterHash, HashedPart, hash_text
from llamarl.model.lora import Adapters
from llamarl.model.quantize import FP8, quantize_rows
from llamarl.model.transformer import causal_attention
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions
from llamarl.types import (
    Completion,
    CompletionGroup,
    bytes_to_floats,
    bytes_to_tokens,
    floats_to_bytes,
    sampled_places,
)

_MAX_MEASURED = 4  # completions of a group
_CHUNK = 256  # tokens whose scores are held at once


class AdapterCheck:
    """Measures the adapters of one generator rank; all ranks of a replica measure together. `measures(group)` tells which
    groups are measured."""

    def __init__(
        self, decoder: ContinuousDecoder, part: TensorRank, measures: Callable[[CompletionGroup], bool]
    ) -> None:
        assert decoder.model.adapters is not None
        self._decoder, self._model, self._part, self._measures = decoder, decoder.model, part, measures
        self._adapters: Adapters = decoder.model.adapters
        self._hash = AdapterHash(decoder.model.lm_head.weight.device)
        self._attend = _narrow_attention if decoder.narrow_cache else causal_attention

    @cached_property
    def _parts(self) -> list[HashedPart]:
        """What the products read, which stays where it is: graphs have been captured over it."""
        specs = adapter_parameters(self._model.shape, self._adapters.lora)
        weights, parts = parameters(self._model.shape), list[HashedPart]()
        for one in self._adapters.applied():
            for name, tensor in zip(adapter_names(weights[one.weight]), (one.a, one.b), strict=True):
                if self._part.counts(spec := specs[name]):
                    parts.append(HashedPart(name, tensor, self._part.box(spec), spec.shape, one.scale))
        return parts

    def digest(self) -> str:
        """Hash of the adapters as the products read them."""
        total = self._hash.total(self._parts).cpu()
        if self._part.count > 1:
            dist.all_reduce(total)
        return hash_text(total)

    def measured(self, group: CompletionGroup) -> CompletionGroup:
        """The group with the base's log-probs in its first completions, if it is one to be measured and this version sampled
        it."""
        if not self._measures(group):
            return group
        version, done = self._decoder.version, list(group.completions)
        for number, one in enumerate(done[:_MAX_MEASURED]):
            if one.num_tokens and all(run.version == version for run in one.versions):
                done[number] = self._with_base(group, one)
        return replace(group, completions=tuple(done))

    def _with_base(self, group: CompletionGroup, one: Completion) -> Completion:
        temperature = group.prompt.sampling.temperature or 1.0
        with self._adapters.off():
            base = self._logprobs(group, one, temperature)
        if group.prompt.sampling.filtered:  # behavior log-probs are then of another distribution than the trainer's
            served = self._logprobs(group, one, temperature)
        else:
            served = torch.from_numpy(bytes_to_floats(one.behavior_logprobs).copy())
        effect = floats_to_bytes((served - base).tolist())
        return replace(one, base_logprobs=floats_to_bytes(base.tolist()), adapter_effect=effect)

    @torch.inference_mode()
    def _logprobs(self, group: CompletionGroup, one: Completion, temperature: float) -> Tensor:
        """Log-probs of the sampled tokens, from one pass over the whole answer."""
        prompt, answer = bytes_to_tokens(group.prompt.prompt_tokens), bytes_to_tokens(one.tokens)
        device = self._model.lm_head.weight.device
        tokens_1T = torch.tensor([[*prompt.tolist(), *answer.tolist()]], device=device)
        positions_1T = torch.arange(tokens_1T.shape[1], device=device)[None]
        hidden_TC = self._model(tokens_1T, positions_1T, self._attend)[0]
        targets_n = torch.from_numpy(len(prompt) + sampled_places(len(answer), one.given)).to(device)
        found = []
        for part_n in torch.split(targets_n, _CHUNK):
            scores_nV = self._model.logits(hidden_TC[part_n - 1]) / temperature
            found.append(torch.log_softmax(scores_nV, -1).gather(1, tokens_1T[0, part_n][:, None])[:, 0])
        return torch.cat(found).float().cpu()


def _narrow_attention(
    layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions = PLAIN_ATTENTION
) -> Tensor:
    """To keys and values as an fp8 cache holds them."""
    return causal_attention(layer, q_BTHD, _through_fp8(k_BTKD), _through_fp8(v_BTKD), options)


def _through_fp8(x: Tensor) -> Tensor:
    values, scales = quantize_rows(x.contiguous(), FP8)
    return (values.float() * scales.view(*x.shape[:-1], 1)).to(x.dtype)
