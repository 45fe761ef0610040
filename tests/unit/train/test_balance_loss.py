"""The balancing loss is that of transformers, with its gradient, however tokens are packed and recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.experts import FORMAT, SHAPE, expert_model, with_routes
from helpers.odd_models import EXPERTS, odd_model
from helpers.training import assert_same_gradients, cpu_learner, make_test_documents
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from llamarl.algo.batch import Document
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.train.balance_loss import balance_loss
from llamarl.train.learner import Learner
from llamarl.train.mesh import LONE_RANK

DOCUMENTS = make_test_documents(7)
WEIGHT = 0.3


def learner_of(model: Transformer | None = None, weight: float = WEIGHT, **computing: object) -> Learner:
    return cpu_learner(model or expert_model(), balance_loss=weight, **computing)  # type: ignore[arg-type]


def gradients(learner: Learner, documents: Sequence[Document]) -> dict[str, Tensor]:
    learner.accumulate(documents)
    return {name: grad.clone() for name, grad in learner.optimizer.gradients().items()}


def of_balance_alone(documents: Sequence[Document], **computing: object) -> dict[str, Tensor]:
    """The gradients that the balancing loss adds."""
    model = computing.pop("model", None)
    made = [gradients(learner_of(model, weight, **computing), documents) for weight in (WEIGHT, 0.0)]  # type: ignore[arg-type]
    return {name: grad - made[1][name] for name, grad in made[0].items()}


def router_logits(model: Transformer, documents: Sequence[Document]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Logits of all layers with experts, for documents padded to one length, and the mask of padding."""
    found: list[Tensor] = []
    longest = max(len(one.tokens) for one in documents)
    tokens = torch.zeros(len(documents), longest, dtype=torch.int64)
    mask = torch.zeros(len(documents), longest)
    for row, one in enumerate(documents):
        tokens[row, : len(one.tokens)] = torch.from_numpy(one.tokens.astype(np.int64))
        mask[row, : len(one.tokens)] = 1
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: found.append(output))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    model(tokens, torch.arange(longest).expand(len(documents), -1), causal_attention)
    for hook in hooks:
        hook.remove()
    return tuple(found), mask


def of_transformers(model: Transformer, documents: Sequence[Document]) -> tuple[float, dict[str, Tensor]]:
    """Their loss of all documents, and its gradients."""
    model.requires_grad_(True)
    logits, mask = router_logits(model, documents)
    loss = load_balancing_loss_func(logits, model.shape.experts, model.shape.experts_per_token, mask)  # type: ignore[arg-type]
    assert isinstance(loss, Tensor)
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss.item(), {
        name: WEIGHT * (torch.zeros_like(parameter) if grad is None else grad)
        for (name, parameter), grad in zip(zip(names, model.parameters(), strict=True), grads, strict=True)
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= 2e-5, name
    gates = [name for name in expected if name.endswith("mlp.gate.weight")]
    assert gates and all(expected[name].abs().max() > 1e-3 for name in gates)


@pytest.mark.parametrize("name", list(EXPERTS))
def test_loss_and_gradient_are_those_of_transformers(name: str) -> None:
    loss, expected = of_transformers(odd_model(name), DOCUMENTS)
    learner = learner_of(odd_model(name))
    seen = learner.accumulate(DOCUMENTS)
    assert seen.routing is not None
    assert seen.routing.totals(LONE_RANK).metrics()["balance_loss"] == pytest.approx(loss, abs=1e-5)
    plain = learner_of(odd_model(name), 0.0).accumulate(DOCUMENTS).loss()
    assert seen.loss() == pytest.approx(plain + WEIGHT * loss, abs=1e-5)
    found = gradients(learner_of(odd_model(name)), DOCUMENTS)
    without = gradients(learner_of(odd_model(name), 0.0), DOCUMENTS)
    assert_close({key: grad - without[key] for key, grad in found.items()}, expected)


@pytest.mark.parametrize("recompute", ["selective", "full", "offload"])
def test_recomputed_activations_have_the_same_gradients(recompute: str) -> None:
    plain, thrifty = (gradients(learner_of(recompute=how), DOCUMENTS) for how in ("none", recompute))
    assert all(torch.equal(thrifty[name], grad) for name, grad in plain.items())


@pytest.mark.usefixtures("traced_only")
def test_compiled_blocks_that_are_computed_again_have_the_same_gradients() -> None:
    plain, compiled = (
        gradients(learner_of(compiled=compiled, recompute="full"), DOCUMENTS) for compiled in (False, True)
    )
    assert_same_gradients(compiled, plain)


def test_several_packs_weigh_by_their_tokens() -> None:
    """Each pack has the loss of its own tokens."""
    learner = learner_of(tokens_per_pack=60)
    packs = learner.policy.packs(DOCUMENTS)
    assert len(packs) > 1
    total, expected = sum(len(one.tokens) for one in DOCUMENTS), dict[str, Tensor]()
    mean = 0.0
    for pack in packs:
        own = [DOCUMENTS[number] for number in dict.fromkeys(pack.sequence_N.tolist())]
        share = sum(len(one.tokens) for one in own) / total
        loss, grads = of_transformers(expert_model(), own)
        mean += share * loss
        expected = {name: expected.get(name, 0.0) + share * grad for name, grad in grads.items()}
    seen = learner.accumulate(DOCUMENTS)
    assert seen.routing is not None
    assert seen.routing.totals(LONE_RANK).metrics()["balance_loss"] == pytest.approx(mean, abs=1e-5)
    assert_close(of_balance_alone(DOCUMENTS, tokens_per_pack=60), expected)


def test_replayed_experts_are_the_ones_that_count() -> None:
    documents = [with_routes(one) for one in DOCUMENTS]
    learner = learner_of(replay_routes=True)
    (pack,) = learner.policy.packs(documents)
    assert pack.routes_RTLK is not None
    seen = learner.accumulate(documents)
    assert seen.routing is not None
    found = seen.routing.totals(LONE_RANK).metrics()["balance_loss"]
    loads = seen.routing.loads_LE.sum(0)
    assert not torch.equal(loads, own_loads(documents)), "nobody would choose these"
    tokens = sum(len(one.tokens) for one in documents)
    assert loads.sum() == tokens * FORMAT.layers * FORMAT.per_token
    probs = learner.policy.model.shape.experts * loads / (tokens * FORMAT.layers) ** 2
    assert found == pytest.approx(float((probs * replayed_probs(documents)).sum()), abs=1e-5)


def own_loads(documents: Sequence[Document]) -> Tensor:
    seen = learner_of().accumulate(documents)
    assert seen.routing is not None
    return seen.routing.loads_LE.sum(0)


def replayed_probs(documents: Sequence[Document]) -> Tensor:
    """Sums of probabilities where tokens take the given experts, one document at a time."""
    model, total = expert_model(), torch.zeros(FORMAT.experts, dtype=torch.float64)
    for one in documents:
        assert one.routes is not None
        length = len(one.tokens)
        routes = torch.full((length, FORMAT.layers, FORMAT.per_token), -1)
        routes[:-1] = torch.from_numpy(FORMAT.ids(one.routes).astype(np.int64))
        probs, counted = torch.zeros(FORMAT.layers, FORMAT.experts), torch.ones(1, length)
        chosen = torch.zeros_like(routes)
        tokens = torch.from_numpy(one.tokens.astype(np.int64))[None]
        with torch.no_grad():
            model(
                tokens,
                torch.arange(length)[None],
                causal_attention,
                routes=routes,
                chosen=chosen,
                counted=counted,
                probs=probs,
            )
        total += probs.double().sum(0)
    return total


def test_even_routers_have_the_smallest_loss() -> None:
    even = torch.full((FORMAT.layers, FORMAT.experts), 4.0)
    used = (torch.arange(12)[:, None, None] * 2 + torch.arange(2)).expand(-1, FORMAT.layers, -1) % FORMAT.experts
    loss = balance_loss(even * 12 / 24, used, torch.ones(12), LONE_RANK)
    assert loss.sum.item() / 12 == pytest.approx(FORMAT.per_token)
    assert loss.num_tokens == 12


def test_passes_without_gradients_and_dense_models_have_none() -> None:
    learner = learner_of()
    routing = learner.policy.route_sums()
    assert routing is not None
    (pack,) = learner.policy.packs(DOCUMENTS)
    learner.policy.logprobs(pack, routing)
    assert "balance_loss" not in routing.totals(LONE_RANK).metrics()
    assert "balance_loss" not in learner_of(weight=0.0).accumulate(DOCUMENTS).routing.totals(LONE_RANK).metrics()  # type: ignore[union-attr]
    assert SHAPE.experts == FORMAT.experts
