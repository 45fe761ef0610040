"""Experts on a GPU: grouped products, their gradients, compiled packed training, and decoding inside graphs."""

from __future__ import annotations

import pytest
import torch
from helpers import expert_kernels
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
from llamarl.generate.decoder import ContinuousDecoder, Limits, Precision
from llamarl.model.experts import expert_mlp
from llamarl.model.quantize import Quantization
from llamarl.model.transformer import causal_attention
from llamarl.routes import route_format
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, Policy, parallelize_for
from llamarl.types import bytes_to_floats, bytes_to_tokens

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
PROMPT = [5, 6, 7, 2, 9, 1, 4]
# Sizes that a GPU multiplies in groups are multiples of 8.
SHAPES = {name: replace(spec, intermediate_size=16, expert_size=16) for name, spec in EXPERTS.items()}


def exact(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every expert for every token, in fp32."""
    gate, up = torch.einsum("tc,ejic->jtei", x, gate_up)
    every = torch.einsum("tei,eci->tec", F.silu(gate) * up, down)
    return (every.gather(1, ids[..., None].expand(-1, -1, every.shape[-1])) * weights[..., None]).sum(1)


@pytest.mark.parametrize("tokens", [1, 7, 256, 5000])
def test_products_by_expert_and_their_gradients(tokens: int) -> None:
    """Groups of any size, and an expert without tokens."""
    torch.manual_seed(0)
    experts, k, inner, hidden = 16, 4, 64, 128
    sizes = [(tokens, hidden), (experts, 2, inner, hidden), (experts, hidden, inner), (tokens, k)]
    wide = [torch.randn(size, device=GPU).mul_(0.3).bfloat16().float().requires_grad_() for size in sizes]
    ids = torch.rand(tokens, experts - 1, device=GPU).argsort(-1)[:, :k]  # the last expert has no tokens
    x, gate_up, down, weights = wide
    found = expert_mlp(x.bfloat16(), gate_up.bfloat16(), down.bfloat16(), ids, weights)
    wanted = exact(x, gate_up, down, ids, weights)
    ours = torch.autograd.grad(found.sin().sum(), wide)
    theirs = torch.autograd.grad(wanted.sin().sum(), wide)
    assert (found - wanted).norm() / wanted.norm() < 0.01
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        assert (mine - other).norm() / other.norm() < 0.03
    assert not ours[1][-1].any()
    assert not ours[2][-1].any()


@pytest.mark.parametrize("tokens", [1, 256, 5000])
def test_parts_of_the_experts_add_up_to_all_of_them(tokens: int) -> None:
    """As ranks that hold whole experts compute them; rows that nobody computes are full of NaN."""
    torch.manual_seed(0)
    experts, k, inner, hidden = 16, 4, 64, 128
    sizes = [(tokens, hidden), (experts, 2, inner, hidden), (experts, hidden, inner), (tokens, k)]
    leaves = [torch.randn(size, device=GPU).mul_(0.3).bfloat16().requires_grad_() for size in sizes]
    ids = torch.rand(tokens, experts, device=GPU).argsort(-1)[:, :k]
    x, gate_up, down, weights = leaves
    whole = expert_mlp(x, gate_up, down, ids, weights.float())
    expected = torch.autograd.grad(whole.sum(), leaves, retain_graph=True)
    torch.use_deterministic_algorithms(True)
    try:
        parts = []
        for first, end in ((0, 4), (4, 16)):
            local = torch.where((ids >= first) & (ids < end), ids - first, end - first)
            held = gate_up[first:end], down[first:end]
            parts.append(expert_mlp(x, *held, local, weights.float(), some_foreign=True))
        total = torch.stack(parts).sum(0)
        found = torch.autograd.grad(total.sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (total - whole).norm() / whole.norm() < 0.01
    for mine, other in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        assert (mine - other).float().norm() <= 0.03 * other.float().norm()


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
