"""The trainer replays the experts that the generator recorded, measures how far it would choose others, and stops the job
if they are not those of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replaced
from typing import Any

import numpy as np
import pytest
import torch
from helpers.decoding import decode_all
from helpers.experts import FORMAT, choices, expert_model, with_routes
from helpers.groups import prompt_group
from helpers.training import cpu_learner, make_test_documents
from helpers.trees import make_branching_documents
from msgspec.structs import replace

from llamarl.algo.batch import IMITATION, Document, document_of
from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits
from llamarl.model.transformer import causal_attention
from llamarl.routes import RoutesDiffer
from llamarl.train.context import take_share
from llamarl.train.learner import Learner
from llamarl.train.mesh import LONE_RANK
from llamarl.train.packing import OWN_CHOICE, PADDING, Sharing, make_packs
from llamarl.train.reference import add_reference_column
from llamarl.train.routing import NARROW_ROUTES, RouteTolerance
from llamarl.train.trees import grow_trees
from llamarl.types import CompletionGroup, Rollout, RolloutGroup

DOCUMENTS = [with_routes(one) for one in make_test_documents(12)]


def learner_of(**computing: object) -> Learner:
    return cpu_learner(expert_model(), replay_routes=True, **computing)  # type: ignore[arg-type]


def plain_logprobs(document: Document) -> torch.Tensor:
    """Log-probs of an answer, from one pass over it alone."""
    model = expert_model()
    tokens_1T = torch.from_numpy(document.tokens.astype(np.int64))[None]
    own = torch.from_numpy(choices(model, document.tokens.tolist()))
    if document.routes is not None:
        own[:-1] = torch.from_numpy(FORMAT.ids(document.routes).astype(np.int64))
    with torch.no_grad():
        hidden = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], causal_attention, routes=own)
        scores = torch.log_softmax(model.logits(hidden[0, :-1]), -1)
    return scores.gather(1, tokens_1T[0, 1:, None])[document.places - 1, 0]


@pytest.mark.parametrize("tokens_per_pack", [16_384, 60])
@pytest.mark.parametrize("sharing", ["off", "on"])
def test_packs_replay_the_experts_of_each_token(sharing: str, tokens_per_pack: int) -> None:
    branching = [with_routes(one, seed) for seed, one in enumerate(make_branching_documents())]
    mixed = [*branching, *make_test_documents(3, seed=5)]  # of the last ones nothing was recorded
    policy = learner_of(share_prompts=sharing, tokens_per_pack=tokens_per_pack).policy
    for pack in policy.packs(mixed):
        found = policy.logprobs(pack)
        expected = torch.cat([plain_logprobs(mixed[number]) for number in dict.fromkeys(pack.sequence_N.tolist())])
        assert torch.allclose(found, expected, atol=2e-4)


def test_replayed_experts_change_what_is_computed() -> None:
    policy = learner_of().policy
    (pack,) = policy.packs(DOCUMENTS)
    assert pack.routes_RTLK is not None
    assert not torch.allclose(policy.logprobs(pack), policy.without_replay().logprobs(pack), atol=0.01)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_replay_the_same(recompute: str) -> None:
    plain, thrifty = learner_of(), learner_of(recompute=recompute)
    assert thrifty.accumulate(DOCUMENTS).loss() == plain.accumulate(DOCUMENTS).loss()
    gates = 0
    for name, grad in plain.optimizer.gradients().items():
        assert torch.equal(thrifty.optimizer.gradients()[name], grad)
        gates += name.endswith("mlp.gate.weight") and bool(grad.abs().max() > 0)
    assert gates == FORMAT.layers, "gradients reach the routers"


def test_documents_share_only_tokens_that_the_same_experts_computed() -> None:
    one = make_test_documents(1)[0]
    same, other = with_routes(one), with_routes(one)
    assert same.routes is not None and other.routes is not None
    changed = other.routes.copy()
    changed[1] = changed[1][::-1]
    (tree,) = grow_trees([same, other], least=1, join=0.0)
    assert tree.length == len(one.tokens)
    (tree,) = grow_trees([same, replaced(other, routes=changed)], least=1, join=0.0)
    assert tree.length == 1 and len(tree.children) == 2


def test_shares_of_a_pack_have_the_experts_of_their_tokens() -> None:
    (pack,) = make_packs(DOCUMENTS, 16_384, long_rows=True, multiple_of=16, sharing=Sharing("off"), routes=FORMAT)
    assert pack.routes_RTLK is not None
    for rank in range(2):
        share = take_share(pack, 2, rank)
        assert share.share is not None and share.routes_RTLK is not None
        assert torch.equal(share.routes_RTLK[0], pack.routes_RTLK[0, share.share.rows[rank]])


def test_last_tokens_and_padding_are_left_to_the_policy() -> None:
    (pack,) = make_packs(DOCUMENTS, 16_384, long_rows=True, routes=FORMAT)
    assert pack.routes_RTLK is not None
    own = (pack.routes_RTLK == OWN_CHOICE).flatten(2)
    assert torch.equal(own.all(-1), own.any(-1))
    padding = int((pack.nodes_RT == PADDING).sum())
    assert int(own.all(-1).sum()) == padding + len(DOCUMENTS)
    assert not own.all(-1).flatten()[pack.at_N].any()


# From a generator to an update


def sampled() -> CompletionGroup:
    limits = Limits(slots=4, max_prompt_tokens=8, max_new_tokens=12)
    decoder = ContinuousDecoder(expert_model(), limits, eos_ids=(), seed=3, record_routes=True)
    decoder.version = 0
    return decode_all(decoder, [prompt_group([3, 1, 4, 1, 5], samples=4, max_new_tokens=12)])[0]


def scored(group: CompletionGroup) -> RolloutGroup:
    return RolloutGroup(group.prompt, tuple(Rollout(one, float(n % 2)) for n, one in enumerate(group.completions)))


GROUP = sampled()


def test_an_update_tells_how_experts_are_used_and_how_many_it_would_choose_otherwise() -> None:
    metrics = learner_of().update(0, [scored(GROUP)], GROUP).metrics
    assert metrics["replayed_share"] == 1.0
    assert metrics["route_diff_share"] == metrics["probe_route_diff_share"] == 0.0
    assert metrics["route_shortfall_max"] == metrics["probe_route_shortfall_max"] == 0.0
    assert 1.0 < metrics["expert_load_max"] <= FORMAT.experts
    assert metrics["logprob_gap"] < 1e-5 and metrics["logprob_gap_own_routes"] < 1e-5
    stale = cpu_learner(expert_model(1), replay_routes=True)  # other weights than those that sampled
    metrics = stale.update(3, [scored(GROUP)]).metrics
    assert metrics["replayed_share"] == 1.0 and metrics["route_diff_share"] > 0.3
    assert "route_shortfall" not in metrics, "stale tokens differ for a reason"


def test_dense_models_and_policies_that_choose_themselves_tell_nothing_of_replay() -> None:
    plain = replace(GROUP, prompt=replace(GROUP.prompt, routes=b""))
    plain = replace(plain, completions=tuple(replace(one, routes=b"") for one in plain.completions))
    metrics = cpu_learner(expert_model()).update(0, [scored(plain)], plain).metrics
    assert "expert_load_max" in metrics
    assert not metrics.keys() & {"replayed_share", "route_diff_share", "logprob_gap_own_routes"}
    assert not any(
        "expert" in name or "route" in name for name in cpu_learner().update(0, [scored(plain)], plain).metrics
    )


def test_a_reference_chooses_its_own_experts() -> None:
    documents = [document_of(GROUP.prompt, one, version=0) for one in GROUP.completions]
    other = cpu_learner(expert_model(1)).policy
    (group,) = add_reference_column(other, [scored(GROUP)])
    (pack,) = other.packs(documents)
    assert pack.routes_RTLK is None
    column = np.frombuffer(group.rollouts[0].columns["reference_logprobs"], np.float32)
    assert np.allclose(column, other.logprobs(pack)[: len(column)].numpy(), atol=1e-5)


Plant = Callable[[CompletionGroup], CompletionGroup]


def planted(change: Callable[[bytes], bytes]) -> Plant:
    def plant(group: CompletionGroup) -> CompletionGroup:
        first, *others = group.completions
        return replace(group, completions=(replace(first, routes=change(first.routes)), *others))

    return plant


def wrong_id(routes: bytes) -> bytes:
    """The least likely expert in place of the best, of one token in one layer."""
    tokens = [3, 1, 4, 1, 5, *np.frombuffer(GROUP.completions[0].tokens, "<i4").tolist()]
    place = 4  # of the first state that predicts an answer token
    seen = choices(expert_model(), tokens)[place, 0].tolist()
    ids = bytearray(routes)
    assert [*ids[:2]] == seen
    logits = first_logits(tokens, place)
    ids[0] = int(logits.argmin())
    return bytes(ids)


def first_logits(tokens: list[int], place: int) -> torch.Tensor:
    model, found = expert_model(), list[torch.Tensor]()
    block: Any = model.model.layers[0]
    block.mlp.gate.register_forward_hook(lambda module, inputs, output: found.append(output.detach()))
    choices(model, tokens)
    return found[0][place]


FAULTS = {
    "a wrong expert": (planted(wrong_id), "would not take the experts"),
    "a shifted row": (planted(lambda rows: rows[FORMAT.row_bytes :] + rows[: FORMAT.row_bytes]), "would not take"),
    "a missing layer": (
        lambda group: replace(
            group,
            prompt=replace(group.prompt, routes=halved(group.prompt.routes)),
            completions=tuple(replace(one, routes=halved(one.routes)) for one in group.completions),
        ),
        "a layer is missing",
    ),
    "a missing row": (planted(lambda rows: rows[: -FORMAT.row_bytes]), "some are missing"),
    "an unknown expert": (planted(lambda rows: bytes([250]) + rows[1:]), "expert 250 is recorded"),
    "no rows": (planted(lambda rows: b""), "came without the experts"),
}


def halved(rows: bytes) -> bytes:
    half = FORMAT.row_bytes // 2
    return b"".join(rows[start : start + half] for start in range(0, len(rows), FORMAT.row_bytes))


@pytest.mark.parametrize("tolerance", [RouteTolerance(), NARROW_ROUTES], ids=["fp32", "narrow"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_stops_the_job_with_the_probe(fault: str, tolerance: RouteTolerance) -> None:
    plant, told = FAULTS[fault]
    policy = learner_of().policy
    learner = Learner(
        policy,
        aipo_loss,
        settings=TrainerConfig(lr=1e-3),
        algo=AlgoConfig(),
        updates=10,
        route_tolerance=tolerance,
    )
    with pytest.raises(RoutesDiffer, match=told):
        learner.update(0, [scored(GROUP)], plant(GROUP))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_stops_a_synchronous_job_without_a_probe(fault: str) -> None:
    plant, told = FAULTS[fault]
    with pytest.raises(RoutesDiffer, match=told):
        learner_of().update(0, [scored(plant(GROUP))])


def test_an_expert_that_is_there_twice_is_refused() -> None:
    twice = planted(lambda rows: rows[:1] * 2 + rows[2:])
    with pytest.raises(RoutesDiffer, match="recorded twice"):
        learner_of().update(0, [scored(GROUP)], twice(GROUP))


def test_data_needs_no_experts() -> None:
    seen = learner_of().accumulate([replaced(one, streams=IMITATION) for one in make_test_documents(2)])
    assert seen.routing is not None
    assert "replayed_share" not in seen.routing.totals(LONE_RANK).metrics()
