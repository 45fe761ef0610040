"""Windows, softcaps, odd norms and biases on a GPU: FlashAttention, decoding and training against plain passes."""

from __future__ import annotations

import pytest
import torch
from helpers.decoding import decode_all
from helpers.groups import prompt_group
from helpers.odd_models import ODD, odd_model
from helpers.training import make_test_documents, naive_gradients
from helpers.trees import make_branching_documents
from torch import Tensor

from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits, Precision
from llamarl.model.quantize import Quantization
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.model_spec import AttentionOptions
from llamarl.train.attention import FlashDocuments, MaskedDocuments, document_attention
from llamarl.train.learner import Learner
from llamarl.train.packing import PADDING, Pack, Sharing, make_packs
from llamarl.train.policy import ComputeSettings, Policy, parallelize_for
from llamarl.train.tree_attention import FlashTrees
from llamarl.types import CompletionGroup, bytes_to_floats, bytes_to_tokens

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
PROMPT = [5, 6, 7, 2, 9, 1, 4]


def attend(
    pack: Pack,
    how: MaskedDocuments | FlashTrees | FlashDocuments,
    dtype: torch.dtype,
    options: AttentionOptions,
    head_dim: int,
) -> list[Tensor]:
    """Output of attention, and gradients of what goes in, all of bf16 numbers."""
    torch.manual_seed(0)
    shapes = [(*pack.tokens_RT.shape, heads, head_dim) for heads in (8, 2, 2)]
    given = [torch.randn(shape, device=GPU).bfloat16().to(dtype).requires_grad_() for shape in shapes]
    real = (pack.nodes_RT != PADDING)[..., None, None]
    q, k, v = given
    out = how(0, q, k, v, options)
    grads = torch.autograd.grad((out.float() * torch.randn(out.shape, device=GPU) * real).sum(), given)
    return [one.detach().float() for one in (out * real, *grads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp16 operands"])
@pytest.mark.parametrize("window", [0, 1, 3, 64, 200])
@pytest.mark.parametrize("shared", [False, True], ids=["documents", "trees"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_one_long_row_with_a_window_equals_a_mask_in_fp32(
    head_dim: int, shared: bool, window: int, dtype: torch.dtype
) -> None:
    documents = make_branching_documents(7, 5, longest=300, opening=150)
    (pack,) = make_packs(documents, 100_000, long_rows=True, sharing=Sharing("on" if shared else "off"))
    pack, options = pack.to(GPU), AttentionOptions(window=window, scale=0.2)
    how = document_attention(pack, long_rows=True, window=window)
    assert isinstance(how, FlashTrees if shared else FlashDocuments)
    found = attend(pack, how, dtype, options, head_dim)
    wanted = attend(pack, MaskedDocuments(pack), torch.float32, options, head_dim)
    for name, mine, exact in zip(("out", "q", "k", "v"), found, wanted, strict=True):
        assert mine.isfinite().all(), name
        if window == 1 and name in ("q", "k"):  # one key has a weight of 1, whatever the query
            assert mine.abs().max() < 0.05
        else:
            assert (mine - exact).norm() / exact.norm() < 0.015, name


@torch.inference_mode()
def gaps(done: CompletionGroup, model: Transformer) -> Tensor:
    """Differences of sampled log-probs from those of one pass of the decoder's own model."""
    found = []
    for one in done.completions:
        answer = bytes_to_tokens(one.tokens).tolist()
        tokens_1T = torch.tensor([PROMPT + answer], device=GPU)
        hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1], device=GPU)[None], causal_attention)
        logprobs_TV = torch.log_softmax(model.logits(hidden_1TC[0, len(PROMPT) - 1 : -1]), -1).cpu()
        chosen = logprobs_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append((torch.tensor(bytes_to_floats(one.behavior_logprobs)) - chosen).abs())
    return torch.cat(found)


@pytest.mark.parametrize("weights", ["none", "int8", "fp8"])
@pytest.mark.parametrize("name", ODD)
def test_sampled_logprobs_are_those_of_one_pass(name: str, weights: Quantization) -> None:
    """Through captured graphs and kernels, over windows and pages."""
    model = odd_model(name).to(GPU, torch.bfloat16)
    limits = Limits(slots=16, max_prompt_tokens=12, max_new_tokens=40, page_tokens=16)
    decoder = ContinuousDecoder(model, limits, eos_ids=(), seed=3, precision=Precision(weights=weights))
    decoder.version = 0
    done = decode_all(decoder, [prompt_group(PROMPT, samples=12, max_new_tokens=40)])[0]
    gap = gaps(done, model)
    assert gap.median() < 0.05, "bf16 rounds differently in one pass, but a missing window or norm changes everything"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_gradients_in_bf16_are_near_those_of_fp32(name: str, compiled: bool) -> None:
    documents = make_test_documents(12)
    computing = ComputeSettings(GPU, torch.bfloat16, compiled=compiled)
    model = odd_model(name).to(GPU, torch.bfloat16)
    policy = Policy(model, computing)
    parallelize_for(model, computing)
    learner = Learner(policy, aipo_loss, settings=TrainerConfig(lr=1e-3), algo=AlgoConfig(), updates=10)
    loss = learner.accumulate(documents).loss()
    expected_loss, expected = naive_gradients(odd_model(name), documents)
    assert loss == pytest.approx(expected_loss, rel=0.05, abs=0.05)
    for parameter, grad in learner.optimizer.gradients().items():
        if expected[parameter].numel() > 64:
            mine, wanted = grad.float().flatten().cpu(), expected[parameter].flatten()
            assert torch.nn.functional.cosine_similarity(mine, wanted, dim=0) > 0.95, parameter
