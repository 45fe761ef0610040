"""Experts on a GPU: grouped products, their gradients, compiled packed training, and decoding inside graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.decoding import decode_all
from helpers.experts import with_routes
from helpers.groups import prompt_group
from helpers.odd_models import EXPERTS, odd_model
from helpers.training import cpu_learner, make_test_documents
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits, Precision
from llamarl.model.expert_products import AdapterPair, ExpertAdapters, expert_mlp
from llamarl.model.quantize import Quantization
from llamarl.model.transformer import causal_attention
from llamarl.model_spec import Activation
from llamarl.routes import route_format
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, Policy, parallelize_for
from llamarl.types import bytes_to_floats, bytes_to_tokens

expert_kernels: Any = pytest.importorskip("helpers.expert_kernels", reason="needs Triton")
pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
EXPERTS_HERE, CHOSEN, INNER, HIDDEN, FACTOR = 16, 4, 64, 128, 0.7
PROMPT = [5, 6, 7, 2, 9, 1, 4]
# Sizes that a GPU multiplies in groups are multiples of 8.
SHAPES = {name: replace(spec, intermediate_size=16, expert_size=16) for name, spec in EXPERTS.items()}


def exact(leaves: Sequence[Tensor], ids: Tensor, activation: Activation = "silu") -> Tensor:
    """Every expert for every token, in fp32. Leaves are x, matrices and weights, and with adapters A and B of both."""
    x, gate_up, down, weights, *pairs = leaves
    if pairs:
        a_in, b_in, a_out, b_out = pairs
        gate_up = gate_up + FACTOR * torch.einsum("ejir,erc->ejic", b_in, a_in)
        down = down + FACTOR * torch.einsum("ecr,eri->eci", b_out, a_out)
    gate, up = torch.einsum("tc,ejic->jtei", x, gate_up)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    every = torch.einsum("tei,eci->tec", act * up, down)
    return (every.gather(1, ids[..., None].expand(-1, -1, every.shape[-1])) * weights[..., None]).sum(1)


def make_leaves(tokens: int, rank: int) -> list[Tensor]:
    """Numbers that bf16 represents, in fp32."""
    torch.manual_seed(0)
    sizes: list[tuple[int, ...]] = [(tokens, HIDDEN), (EXPERTS_HERE, 2, INNER, HIDDEN), (EXPERTS_HERE, HIDDEN, INNER)]
    sizes += [(tokens, CHOSEN)]
    if rank:
        sizes += [(EXPERTS_HERE, rank, HIDDEN), (EXPERTS_HERE, 2, INNER, rank)]
        sizes += [(EXPERTS_HERE, rank, INNER), (EXPERTS_HERE, HIDDEN, rank)]
    return [torch.randn(size, device=GPU).mul_(0.3).bfloat16().float().requires_grad_() for size in sizes]


def ours(leaves: Sequence[Tensor], ids: Tensor, held: slice = slice(None), activation: Activation = "silu") -> Tensor:
    """`expert_mlp` in bf16 of the experts that a rank holds."""
    x, gate_up, down, weights, *pairs = (one if number == 3 else one.bfloat16() for number, one in enumerate(leaves))
    adapters = None
    if pairs:
        a_in, b_in, a_out, b_out = (one[held] for one in pairs)
        adapters = ExpertAdapters(AdapterPair(a_in, b_in), AdapterPair(a_out, b_out), FACTOR)
    return expert_mlp(x, gate_up[held], down[held], ids, weights, activation, adapters=adapters)


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert mine.isfinite().all(), number
        assert (mine - other).norm() <= 0.03 * other.norm(), number


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("tokens", [1, 7, 256, 5000])
def test_products_by_expert_and_their_gradients(tokens: int, rank: int, activation: Activation) -> None:
    """Groups of any size, and an expert without tokens; with adapters and without."""
    leaves = make_leaves(tokens, rank)
    ids = torch.rand(tokens, EXPERTS_HERE - 1, device=GPU).argsort(-1)[:, :CHOSEN]  # the last expert has no tokens
    found, wanted = ours(leaves, ids, activation=activation), exact(leaves, ids, activation)
    upstream = wanted.detach().cos()
    mine, theirs = (torch.autograd.grad(one, leaves, upstream) for one in (found, wanted))
    assert (found - wanted).norm() / wanted.norm() < 0.01
    assert_near(mine, theirs)
    assert not any(one[-1].any() for number, one in enumerate(mine) if number not in (0, 3))


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("tokens", [1, 256, 5000])
def test_parts_of_the_experts_add_up_to_all_of_them(tokens: int, rank: int) -> None:
    """As ranks that hold whole experts compute them; rows that nobody computes are full of NaN."""
    leaves = make_leaves(tokens, rank)
    ids = torch.rand(tokens, EXPERTS_HERE, device=GPU).argsort(-1)[:, :CHOSEN]
    wanted = exact(leaves, ids)
    upstream = wanted.detach().cos()
    expected = torch.autograd.grad(wanted, leaves, upstream)
    torch.use_deterministic_algorithms(True)
    try:
        parts = []
        for first, end in ((0, 4), (4, EXPERTS_HERE)):
            local = torch.where((ids >= first) & (ids < end), ids - first, end - first)
            parts.append(ours(leaves, local, slice(first, end)))
        total = torch.stack(parts).sum(0)
        found = torch.autograd.grad(total, leaves, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (total - wanted).norm() / wanted.norm() < 0.01
    assert_near(found, expected)


@pytest.mark.parametrize("sizes", [(1, 64, 8, 64, 128), (256, 64, 8, 96, 200), (900, 20, 3, 1100, 2056)])
def test_kernels_of_training_compute_what_plain_pytorch_computes(sizes: tuple[int, int, int, int, int]) -> None:
    expert_kernels.check_training(*sizes, device="cuda")


def test_gradients_of_experts_without_tokens_are_zero() -> None:
    expert_kernels.check_unused(device="cuda")


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("sizes", [(1, 64, 8, 64, 128), (256, 64, 8, 96, 200), (900, 20, 3, 32, 64)])
def test_kernels_of_inference_compute_what_plain_pytorch_computes(
    sizes: tuple[int, int, int, int, int], skewed: bool
) -> None:
    expert_kernels.check(*sizes, device="cuda", skewed=skewed)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SHAPES)
def test_compiled_packed_training_equals_plain_passes_in_fp32(name: str, recompute: str) -> None:
    """Experts are given, since a token whose bf16 logits chose others would change all gradients."""
    form = route_format(SHAPES[name])
    assert form is not None
    documents = [with_routes(one, form=form) for one in make_test_documents(12)]
    plain = cpu_learner(odd_model(SHAPES[name]), replay_routes=True)
    plain.accumulate(documents)
    expected = plain.optimizer.gradients()
    how = ComputeSettings(GPU, torch.bfloat16, recompute=recompute, compiled=True, replay_routes=True)
    policy = Policy(odd_model(SHAPES[name]).to(GPU, torch.bfloat16), how)
    parallelize_for(policy.model, how)
    learner = Learner(policy, aipo_loss, settings=TrainerConfig(), algo=AlgoConfig(), updates=10)
    learner.accumulate(documents)
    near = {}
    for key, grad in learner.optimizer.gradients().items():
        mine, wanted = grad.float().flatten().cpu(), expected[key].flatten()
        assert mine.isfinite().all(), key
        if wanted.numel() > 64:
            near[key] = F.cosine_similarity(mine, wanted, dim=0).item()
    assert min(near.values()) > 0.95, near


@pytest.mark.parametrize("weights", ["none", "int8", "fp8"])
@pytest.mark.parametrize("name", SHAPES)
def test_sampled_logprobs_are_those_of_one_pass(name: str, weights: Quantization) -> None:
    """Steps are captured in graphs; the pass is not. A near tie of logits may choose otherwise, so not all need be near."""
    model = odd_model(SHAPES[name]).to(GPU, torch.bfloat16)
    limits = Limits(slots=8, max_prompt_tokens=12, max_new_tokens=14, page_tokens=16)
    decoder = ContinuousDecoder(model, limits, eos_ids=(), seed=3, precision=Precision(weights=weights))
    decoder.version = 0
    done = decode_all(decoder, [prompt_group(PROMPT, samples=6, max_new_tokens=14)])[0]
    found = []
    for one in done.completions:
        answer = bytes_to_tokens(one.tokens).tolist()
        tokens_1T = torch.tensor([PROMPT + answer], device=GPU)
        with torch.inference_mode():
            hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1], device=GPU)[None], causal_attention)
            scores_TV = torch.log_softmax(model.logits(hidden_1TC[0, len(PROMPT) - 1 : -1]), -1).cpu()
        logprobs = scores_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append((torch.tensor(bytes_to_floats(one.behavior_logprobs)) - logprobs).abs())
    gaps = torch.cat(found)
    assert gaps.isfinite().all()
    assert gaps.median() < 0.03
