"""Mixtures of experts: the choice, its weights, products by expert, and routes that are given instead of chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.errors import InputError
from llamarl.model.checkpoint import random_model
from llamarl.model.experts import Experts, choose, expert_mlp, route_weights
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.model_spec import ModelSpec

SHAPE = ModelSpec(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
    qk_norm=True,
    experts=5,
    experts_per_token=2,
    expert_size=12,
    normalize_routes=True,
    dense_layers=(1,),
    family="qwen3_moe",
)


def model_of(shape: ModelSpec = SHAPE) -> Transformer:
    model = random_model(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return model


def tokens_of(model: Transformer) -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(0, model.shape.vocab_size, (2, 7), generator=torch.Generator().manual_seed(0))
    return tokens_BT, torch.arange(7).expand(2, 7)


def one_by_one(x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    rows = []
    for x, ids, weights in zip(x_TC, ids_TK, weights_TK, strict=True):
        row = torch.zeros_like(x)
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            gate, up = gate_up[expert] @ x
            row = row + weight * (down[expert] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def test_products_by_expert_equal_those_of_each_token_and_so_do_their_gradients() -> None:
    """One expert has no token at all."""
    generator = torch.Generator().manual_seed(1)
    parts = [(6, 8), (5, 2, 4, 8), (5, 8, 4), (6, 3)]
    x, gate_up, down, weights = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in parts
    )
    ids_TK = torch.tensor([[0, 1, 3], [3, 0, 1], [1, 3, 0], [0, 3, 4], [4, 1, 0], [1, 0, 3]])
    found = expert_mlp(x.float(), gate_up.float(), down.float(), ids_TK, weights.float())
    expected = one_by_one(x, gate_up, down, ids_TK, weights)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    leaves = [x, gate_up, down, weights]
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((out * upstream).sum(), leaves) for out in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert not ours[1][2].any(), "no token came to expert 2"


@pytest.mark.parametrize("inner", [4, 3], ids=["grouped", "one by one"])
def test_parts_of_the_experts_add_up_to_all_of_them(inner: int) -> None:
    """Also the gradients; an expert of another rank adds nothing, whatever lies in the rows that nobody computes."""
    generator = torch.Generator().manual_seed(1)
    x, gate_up, down, weights = (
        torch.randn(size, generator=generator, requires_grad=True)
        for size in [(6, 8), (6, 2, inner, 8), (6, 8, inner), (6, 3)]
    )
    ids_TK = torch.tensor([[0, 1, 3], [3, 0, 1], [1, 3, 0], [0, 3, 4], [4, 1, 0], [1, 0, 3]])
    leaves = [x, gate_up, down, weights]
    whole = expert_mlp(x, gate_up, down, ids_TK, weights)
    expected = torch.autograd.grad(whole.sin().sum(), leaves, retain_graph=True)
    with poisoned_memory():
        parts = []
        for first, end in ((0, 2), (2, 3), (3, 6)):  # nobody chooses expert 2
            local_TK = torch.where((ids_TK >= first) & (ids_TK < end), ids_TK - first, end - first)
            parts.append(expert_mlp(x, gate_up[first:end], down[first:end], local_TK, weights, some_foreign=True))
        total = torch.stack(parts).sum(0)
        found = torch.autograd.grad(total, leaves, whole.detach().cos())
    torch.testing.assert_close(total, whole)
    assert not parts[1].any()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory of tensors is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_rank_that_holds_the_wrong_experts_computes_something_else() -> None:
    experts, held = Experts(SHAPE), 2
    ids_TK = torch.arange(5)[:, None]
    assert experts.local_ids(ids_TK, 5) is ids_TK, "one that has all of them"
    experts.first = 2
    assert experts.local_ids(ids_TK, held).flatten().tolist() == [2, 2, 0, 1, 2]
    experts.first = 3
    assert experts.local_ids(ids_TK, held).flatten().tolist() == [2, 2, 2, 0, 1]


def test_equal_logits_choose_the_lower_id() -> None:
    logits_TE = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert choose(logits_TE, 3).tolist() == [[1, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_shares_of_the_softmax(normalize: bool) -> None:
    logits_TE = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    ids_TK = choose(logits_TE, 2)
    expected = logits_TE.softmax(-1).gather(-1, ids_TK)
    expected = expected / expected.sum(-1, keepdim=True) if normalize else expected
    torch.testing.assert_close(route_weights(logits_TE, ids_TK, normalize), expected)


def test_a_model_that_replays_its_own_choice_computes_the_same() -> None:
    model = model_of()
    tokens, positions = tokens_of(model)
    chosen = torch.full((14, 2, 2), 99, dtype=torch.uint8)
    plain = model(tokens, positions, causal_attention)
    assert torch.equal(model(tokens, positions, causal_attention, chosen=chosen), plain)
    assert int(chosen.max()) < 5
    assert torch.equal(model(tokens, positions, causal_attention, routes=chosen), plain)


def test_given_routes_change_what_is_computed_and_the_own_choice_is_still_told() -> None:
    model = model_of()
    tokens, positions = tokens_of(model)
    own, told = (torch.empty(14, 2, 2, dtype=torch.int64) for _ in range(2))
    plain = model(tokens, positions, causal_attention, chosen=own)
    others = own.clone()
    others[3, 1] = (own[3, 1] + 1) % 5  # the last layer of the fourth token of the first text
    replayed = model(tokens, positions, causal_attention, routes=others, chosen=told)
    assert torch.equal(told, own), "layers before see the same states, and the last one's router too"
    changed = (replayed - plain).abs().amax(-1) > 1e-6
    assert changed.flatten().nonzero().flatten().tolist() == [3]


def test_gradients_reach_the_router_through_given_routes() -> None:
    model = model_of()
    tokens, positions = tokens_of(model)
    routes = torch.tensor([2, 4]).expand(14, 2, 2)
    model(tokens, positions, causal_attention, routes=routes).sin().sum().backward()
    grad = model.model.layers[0].mlp.gate.weight.grad  # type: ignore[union-attr]
    used = grad.abs().sum(-1) > 0  # type: ignore[union-attr, operator]
    assert used.tolist() == [False, False, True, False, True]  # normalized weights depend on these only


def test_impossible_numbers_of_experts_are_refused() -> None:
    from msgspec.structs import replace

    with pytest.raises(InputError, match="each token needs 1 to 5 experts"):
        replace(SHAPE, experts_per_token=6)
