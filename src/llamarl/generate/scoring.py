"""How likely a model finds given tokens: one pass over them, without the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from llamarl.model.rope import rope_table
from llamarl.model.transformer import Transformer, causal_attention

_CHUNK = 256  # places whose scores are in memory at once


class TokenScores(NamedTuple):
    """Of each token but the first: its log-prob at temperature 1, its rank (1: the likeliest), and the likeliest tokens there
    with their log-probs."""

    logprobs: list[float]
    ranks: list[int]
    top: list[list[tuple[int, float]]]


@torch.inference_mode()
def score_tokens(model: Transformer, tokens: Sequence[int], top: int) -> TokenScores:
    """Scores of the tokens of one sequence, each after all before it."""
    device = model.lm_head.weight.device
    tokens_1T = torch.tensor([list(tokens)], device=device)
    positions_1T = torch.arange(len(tokens), device=device)[None]
    hidden_TC = model(tokens_1T, positions_1T, causal_attention, rope_table(model.shape, positions_1T))[0]
    found = TokenScores([], [], [])
    for start in range(0, len(tokens) - 1, _CHUNK):
        end = min(start + _CHUNK, len(tokens) - 1)
        logprobs_NV = torch.log_softmax(model.logits(hidden_TC[start:end]).float(), dim=-1)
        chosen_N1 = logprobs_NV.gather(1, tokens_1T[0, start + 1 : end + 1, None])
        found.logprobs.extend(chosen_N1[:, 0].tolist())
        found.ranks.extend(((logprobs_NV > chosen_N1).sum(dim=-1) + 1).tolist())
        values_NK, ids_NK = logprobs_NV.topk(min(top, logprobs_NV.shape[1]))
        pairs = zip(ids_NK.tolist(), values_NK.tolist(), strict=True)
        found.top.extend(list(zip(ids, values, strict=True)) for ids, values in pairs)
    return found
