"""Mixtures of experts: the choice, its weights, products by expert, and routes that are given instead of chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.errors import InputError
from llamarl.model import expert_products
from llamarl.model.checkpoint import random_model
from llamarl.model.expert_products import AdapterPair, ExpertAdapters, Scales, expert_mlp, sort_by_expert
from llamarl.model.experts import Experts, choose, route_weights
from llamarl.model.ops import ACTIVATIONS
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.model_spec import Activation, ModelSpec

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
            parts.append(expert_mlp(x, gate_up[first:end], down[first:end], local_TK, weights))
        total = torch.stack(parts).sum(0)
        found = torch.autograd.grad(total, leaves, whole.detach().cos())
    torch.testing.assert_close(total, whole)
    assert not parts[1].any()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def make_leaves(inner: int, rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, matrices and weights, and A and B of both if there are adapters."""
    generator = torch.Generator().manual_seed(1)
    sizes: list[tuple[int, ...]] = [(9, 8), (6, 2, inner, 8), (6, 8, inner), (9, 3)]
    if rank:
        sizes += [(6, rank, 8), (6, 2, inner, rank), (6, rank, inner), (6, 8, rank)]
    made = [torch.randn(size, generator=generator).to(torch.float32 if size == (9, 3) else dtype) for size in sizes]
    return [one.requires_grad_() for one in made]


def adapters_of(leaves: list[Tensor], held: slice = slice(None)) -> ExpertAdapters | None:
    if len(leaves) == 4:
        return None
    a_in, b_in, a_out, b_out = (one[held] for one in leaves[4:])
    return ExpertAdapters(AdapterPair(a_in, b_in), AdapterPair(a_out, b_out), 0.7)


def step_by_step(leaves: list[Tensor], ids_TK: Tensor, activation: Activation) -> Tensor:
    """The same by operations that autograd differentiates, each product of each expert by itself."""
    x_TC, gate_up, down, weights_TK, *pairs = leaves
    pairs = [one.flatten(1, -2) for one in pairs]

    def rows_of(x_PC: Tensor, weight: Tensor, pair: list[Tensor]) -> Tensor:
        parts = torch.tensor_split(x_PC, ends.cpu().long())[:-1]
        out = torch.cat([part @ one.t() for part, one in zip(parts, weight, strict=True)])
        if not pair:
            return out
        thin = torch.cat([part @ one.t() for part, one in zip(parts, pair[0], strict=True)]) * 0.7
        parts = torch.tensor_split(thin, ends.cpu().long())[:-1]
        return out + torch.cat([part @ one.t() for part, one in zip(parts, pair[1], strict=True)])

    order, places, ends = sort_by_expert(ids_TK, len(gate_up))
    outer_PN = rows_of(x_TC[order // 3], gate_up.flatten(1, 2), pairs[:2])
    y_PC = rows_of(ACTIVATIONS[activation][1](outer_PN), down, pairs[2:])
    return (y_PC[places].view(-1, 3, 8).float() * weights_TK[..., None]).sum(1)


def some_ids(experts: int = 6) -> Tensor:
    return torch.rand(9, experts, generator=torch.Generator().manual_seed(3)).argsort(-1)[:, :3]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [0, 8, 3])
@pytest.mark.parametrize("inner", [8, 3], ids=["grouped", "one by one"])
def test_the_result_is_that_of_single_steps_bit_for_bit_and_gradients_are_near(
    inner: int, rank: int, dtype: torch.dtype, activation: Activation
) -> None:
    """Nobody chooses expert 5."""
    leaves, ids_TK = make_leaves(inner, rank, dtype), some_ids(5)
    x, gate_up, down, weights = leaves[:4]
    found = expert_mlp(x, gate_up, down, ids_TK, weights, activation, adapters=adapters_of(leaves))
    expected = step_by_step(leaves, ids_TK, activation)
    assert torch.equal(found, expected)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad(out, leaves, upstream) for out in (found, expected))
    near = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert (mine - other).float().norm() <= near * other.float().norm()
    assert not any(one[5].any() for number, one in enumerate(ours) if number not in (0, 3))


@pytest.mark.parametrize("rank", [0, 8, 3])
def test_gradients_that_nobody_wants_are_not_computed(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are wanted are the same, whichever they are."""
    ids_TK, made = some_ids(), []
    plain = expert_products.outer_products

    def counted(*args: Tensor) -> Tensor:
        made.append(args)
        return plain(*args)

    monkeypatch.setattr(expert_products, "outer_products", counted)
    leaves = make_leaves(8, rank)
    every = torch.autograd.grad(_sum_of(leaves, ids_TK), leaves)
    for wanted in ([0], [3], [1], [2], [0, 3, *range(4, len(leaves))], [len(leaves) - 1], [0, 2]):
        some = [one.detach().requires_grad_(number in wanted) for number, one in enumerate(leaves)]
        made.clear()
        found = torch.autograd.grad(_sum_of(some, ids_TK), [some[number] for number in wanted])
        assert len(made) == len(set(wanted) - {0, 3})
        assert all(torch.equal(one, every[number]) for number, one in zip(wanted, found, strict=True))


def _sum_of(leaves: list[Tensor], ids_TK: Tensor) -> Tensor:
    x, gate_up, down, weights = leaves[:4]
    return expert_mlp(x, gate_up, down, ids_TK, weights, adapters=adapters_of(leaves)).sin().sum()


@pytest.mark.parametrize("rank", [0, 8])
def test_only_tokens_and_the_first_products_results_are_kept(rank: int) -> None:
    """And small things: the weights of experts, and who has which row."""
    leaves, kept = make_leaves(8, rank), dict[int, int]()
    memory = {one.untyped_storage().data_ptr() for one in leaves}

    def keep(saved: Tensor) -> Tensor:
        if (place := saved.untyped_storage().data_ptr()) not in memory:
            kept[place] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        x, gate_up, down, weights = leaves[:4]
        expert_mlp(x, gate_up, down, some_ids(), weights, adapters=adapters_of(leaves))
    pairs = 9 * 3
    assert sorted(kept.values()) == sorted([pairs * 2 * 8 * 4, pairs * 8, pairs * 8, 6 * 4])


def test_quantized_experts_have_no_gradients() -> None:
    x, gate_up, down, weights = make_leaves(8, 0)
    scales = Scales(torch.ones(6, 2, 8), torch.ones(6, 8))
    out = expert_mlp(
        x, gate_up.detach().to(torch.int8), down.detach().to(torch.int8), some_ids(), weights, scales=scales
    )
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("inner", [8, 3], ids=["grouped", "one by one"])
def test_adapters_of_other_ranks_experts_add_nothing(inner: int) -> None:
    leaves, ids_TK = make_leaves(inner, 8), some_ids()
    whole = step_by_step(leaves, ids_TK, "silu")
    expected = torch.autograd.grad(whole, leaves, whole.detach().cos())
    with poisoned_memory():
        parts = []
        for held in (slice(0, 2), slice(2, 6)):
            is_here = (ids_TK >= held.start) & (ids_TK < held.stop)
            local_TK = torch.where(is_here, ids_TK - held.start, held.stop - held.start)
            x, gate_up, down, weights = leaves[:4]
            beside = adapters_of(leaves, held)
            parts.append(expert_mlp(x, gate_up[held], down[held], local_TK, weights, adapters=beside))
        total = torch.stack(parts).sum(0)
        found = torch.autograd.grad(total, leaves, whole.detach().cos())
    torch.testing.assert_close(total, whole)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


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


@pytest.mark.parametrize("inner", [16, 15], ids=["grouped", "one by one"])
def test_in_inference_a_token_does_not_depend_on_what_others_chose(inner: int) -> None:
    """To the last bit: a generator in a deterministic job has other answers beside one when it is asked again."""
    generator = torch.Generator().manual_seed(3)
    gate_up, down = torch.randn(4, 2, inner, 48, generator=generator), torch.randn(4, 48, inner, generator=generator)
    x_TC, weights_TK = torch.randn(4, 48, generator=generator), torch.rand(4, 2, generator=generator)
    ids_TK = torch.rand(4, 4, generator=generator).argsort(-1)[:, :2]
    with torch.inference_mode():
        expected = expert_mlp(x_TC, gate_up, down, ids_TK, weights_TK)
        for _ in range(10):
            others = torch.rand(4, 4, generator=generator).argsort(-1)[:, :2]
            others[:2] = ids_TK[:2]
            assert torch.equal(expert_mlp(x_TC, gate_up, down, others, weights_TK)[:2], expected[:2])
    torch.testing.assert_close(expected, expert_mlp(x_TC, gate_up, down, ids_TK, weights_TK), rtol=1e-4, atol=1e-4)


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
