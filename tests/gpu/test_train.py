"""On a GPU the trainer computes in bf16, compiled, with variable-length attention, and means the same as fp32 on a CPU."""

from __future__ import annotations

import traceback
from functools import partial

import pytest
import torch
from helpers.training import make_test_documents, naive_gradients
from torch import Tensor, nn
from torch._dynamo.utils import counters

from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.model.checkpoint import random_model
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec
from llamarl.train.learner import Learner
from llamarl.train.lm_head import Head, fused_loss
from llamarl.train.optimizer import AdamW
from llamarl.train.policy import ComputeSettings, Policy, parallelize_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda")
SHAPE = ModelSpec(
    vocab_size=23,
    hidden_size=128,
    intermediate_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=64,
    tied_head=True,
)
DOCUMENTS = make_test_documents(60)


def calm_model() -> Transformer:
    """Lively enough to show a wrong mask, not so much that bf16's rounding grows from layer to layer."""
    model = random_model(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def gpu_learner(dtype: torch.dtype = torch.bfloat16, *, offload: bool = False, **how: object) -> Learner:
    computing = ComputeSettings(GPU, dtype, **how)  # type: ignore[arg-type]
    model = calm_model().to(GPU, computing.weight_dtype)
    parallelize_for(model, computing)
    settings = TrainerConfig(lr=1e-3, warmup_updates=0, offload=offload)
    return Learner(Policy(model, computing), aipo_loss, settings=settings, algo=AlgoConfig(), updates=10)


@pytest.fixture(scope="module")
def expected() -> tuple[float, dict[str, Tensor]]:
    return naive_gradients(calm_model(), DOCUMENTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tokens_per_pack", [16_384, 200])
def test_packed_narrow_passes_agree_with_one_document_at_a_time_in_fp32(
    expected: tuple[float, dict[str, Tensor]], compiled: bool, recompute: str, tokens_per_pack: int, dtype: torch.dtype
) -> None:
    learner = gpu_learner(dtype, compiled=compiled, recompute=recompute, tokens_per_pack=tokens_per_pack)
    seen = learner.accumulate(DOCUMENTS)
    assert seen.loss() == pytest.approx(expected[0], rel=0.05, abs=0.02)
    for name, grad in learner.optimizer.gradients().items():
        mine, wanted = grad.float().flatten().cpu(), expected[1][name].flatten()
        assert torch.nn.functional.cosine_similarity(mine, wanted, dim=0) > 0.99, name
        assert (mine - wanted).norm() / wanted.norm() < 0.1, name


def test_packs_of_all_sizes_share_the_graphs_of_the_first_update() -> None:
    """A graph made anew in the middle of a run costs seconds."""
    torch._dynamo.reset()
    learner = gpu_learner(compiled=True, tokens_per_pack=500)
    learner.accumulate(DOCUMENTS)
    made = counters["stats"]["unique_graphs"]
    for count in (2, 19, 47, 200):
        learner.accumulate(make_test_documents(count))
    assert counters["stats"]["unique_graphs"] == made


def test_fp32_on_a_gpu_equals_fp32_on_a_cpu(expected: tuple[float, dict[str, Tensor]]) -> None:
    learner = gpu_learner(torch.float32)
    assert learner.accumulate(DOCUMENTS).loss() == pytest.approx(expected[0], abs=1e-4)
    for name, grad in learner.optimizer.gradients().items():
        assert torch.allclose(grad.cpu(), expected[1][name], rtol=1e-3, atol=1e-3), name


def test_the_host_launches_a_whole_update_without_waiting_for_the_device() -> None:
    """Otherwise the device has nothing to do until the host has launched the rest. Only reading the metrics waits."""
    learner = gpu_learner(compiled=False)
    for number in range(2):
        seen = learner.accumulate(DOCUMENTS)
        learner.step(number, seen.total_loss())
    waited = list[str]()
    torch.cuda.set_sync_debug_mode("error")
    try:
        seen = learner.accumulate(DOCUMENTS)
        seen.totals(DOCUMENTS, 4.0)
        loss = seen.total_loss()
        learner.optimizer.step = partial(_launched, learner.optimizer, waited)  # type: ignore[method-assign]
        with pytest.raises(StopIteration):
            learner.step(2, loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waited == ["bool"], waited


def _launched(optimizer: AdamW, waited: list[str], *arguments: object) -> bool:
    """Takes the step, and notes that it waits to learn whether it was sound, once all was launched."""
    try:
        AdamW.step(optimizer, *arguments)  # type: ignore[arg-type]
    except RuntimeError as error:
        assert "synchroniz" in str(error)
        frames = traceback.extract_tb(error.__traceback__)
        waited.append("bool" if "bool(go)" in (frames[-1].line or "") else str(frames[-1]))
    raise StopIteration


@pytest.mark.parametrize("compiled", [False, True])
def test_the_fused_head_on_narrow_operands(compiled: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1000, 256, device=GPU).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(5003, 256, device=GPU)).bfloat16().requires_grad_()
    targets = torch.randint(5003, (1000,), device=GPU)
    wide_hidden, wide_weight = (one.detach().double().requires_grad_() for one in (hidden, weight))
    logprobs = torch.log_softmax(wide_hidden @ wide_weight.t(), -1)
    (logprobs.gather(1, targets[:, None]).mean() - 0.1 * (logprobs.exp() * logprobs).sum(-1).mean()).backward()  # type: ignore[no-untyped-call]

    def part_loss(part: slice, logprobs_n: Tensor, entropy_n: Tensor) -> Tensor:
        return (logprobs_n.sum() + 0.1 * entropy_n.sum()) / 1000

    loss, found, _ = fused_loss(hidden, weight, targets, part_loss, Head(chunk=300, compiled=compiled))
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(found.double(), logprobs.gather(1, targets[:, None])[:, 0], atol=1e-4)
    for narrow, wide in ((hidden, wide_hidden), (weight, wide_weight)):
        assert narrow.grad is not None and wide.grad is not None
        assert (narrow.grad.double() - wide.grad).norm() / wide.grad.norm() < 1e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_training_keeps_the_masters_of_fp32_training(compiled: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(300, 70, device=GPU)
    wide, narrow = nn.Parameter(start.clone()), nn.Parameter(start.bfloat16())
    expected = torch.optim.AdamW([wide], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = AdamW({"matrix": narrow}, TrainerConfig(weight_decay=0.1), compiled=compiled)
    optimizer.set_master("matrix", start)
    for _ in range(50):
        narrow.grad = torch.randn_like(narrow)
        wide.grad = narrow.grad.float() * 0.5
        optimizer.step(1e-4, 0.5)
        expected.step()
    master = dict(optimizer.masters())["matrix"]
    # After these 50 steps fp32 AdamW itself is 8e-6 from fp64; a kernel that rounds elsewhere is as far from it.
    assert (master - wide).abs().max() < 3e-5
    assert (master - start).abs().mean() > 2e-4


def test_state_in_host_memory_changes_no_bit() -> None:
    resident, offloaded = gpu_learner(), gpu_learner(offload=True)
    for learner in (resident, offloaded):
        for number in range(3):
            learner.step(number, learner.accumulate(make_test_documents(20, seed=number)).loss())
    assert all(not tensor.is_cuda for tensor in offloaded.optimizer.state_tensors().values())
    theirs = dict(offloaded.optimizer.masters())
    for name, master in resident.optimizer.masters():
        assert torch.equal(master, theirs[name]), name


def test_scores_of_all_tokens_never_exist_at_once() -> None:
    tokens, vocabulary = 8192, 128_256
    hidden = torch.randn(tokens, 64, device=GPU, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, 64, device=GPU, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=GPU)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, *_ = fused_loss(hidden, weight, targets, lambda part, logprobs, entropy: logprobs.sum(), Head(compiled=True))
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.cuda.max_memory_allocated() - before < tokens * vocabulary * 4
