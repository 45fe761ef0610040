"""On a GPU, packs of trees mean what plain packs mean: attention, losses, gradients; compiled or not, however recomputed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.groups import completion, rollout_group
from helpers.lora import LORA
from helpers.trees import make_branching_documents
from torch import Tensor
from torch._dynamo.utils import counters

from llamarl.algo.batch import Document
from llamarl.algo.losses import LOSSES
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec
from llamarl.train.attention import FlashDocuments, MaskedDocuments
from llamarl.train.learner import Learner
from llamarl.train.packing import PADDING, Pack, Sharing, make_packs
from llamarl.train.policy import ComputeSettings, Policy, load_policy, parallelize_for
from llamarl.train.tree_attention import FlashTrees

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
    max_positions=1024,
    tied_head=True,
)
DOCUMENTS = make_branching_documents(8, 6, longest=40)
ON = Sharing("on")


def calm_model() -> Transformer:
    """Lively enough to show a wrong mask, not so much that bf16's rounding grows from layer to layer."""
    model = random_model(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def make_learner(device: torch.device, dtype: torch.dtype, loss: str = "aipo", **how: object) -> Learner:
    computing = ComputeSettings(device, dtype, **how)  # type: ignore[arg-type]
    model = calm_model().to(device, computing.weight_dtype)
    parallelize_for(model, computing)
    algo = AlgoConfig(loss=loss, entropy=0.05, reference_kl=0.1, gspo_low=0.5, gspo_high=0.5)
    settings = TrainerConfig(lr=1e-3, warmup_updates=0)
    return Learner(Policy(model, computing), LOSSES[loss], settings=settings, algo=algo, updates=10)


def exact(loss: str = "aipo") -> tuple[float, dict[str, Tensor]]:
    """Plain packs in fp32 on a CPU."""
    learner = make_learner(torch.device("cpu"), torch.float32, loss)
    value = learner.accumulate(DOCUMENTS).loss()
    return value, dict(learner.optimizer.gradients())


@pytest.fixture(scope="module")
def expected() -> tuple[float, dict[str, Tensor]]:
    return exact()


def assert_near(learner: Learner, expected: tuple[float, dict[str, Tensor]]) -> None:
    seen = learner.accumulate(DOCUMENTS)
    work = seen.totals(DOCUMENTS, 4.0).work
    assert work.tokens < 0.8 * sum(len(document.tokens) for document in DOCUMENTS), "nothing was shared"
    assert seen.loss() == pytest.approx(expected[0], rel=0.05, abs=0.02)
    for name, grad in learner.optimizer.gradients().items():
        mine, wanted = grad.float().flatten().cpu(), expected[1][name].flatten()
        assert torch.nn.functional.cosine_similarity(mine, wanted, dim=0) > 0.99, name
        assert (mine - wanted).norm() / wanted.norm() < 0.1, name


def tree_pack(documents: list[Document]) -> Pack:
    (pack,) = make_packs(documents, 100_000, long_rows=True, sharing=ON)
    assert pack.is_shared
    return pack.to(GPU)


def attend(
    pack: Pack, how: MaskedDocuments | FlashTrees | FlashDocuments, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Output of sharp attention, and gradients of what goes in."""
    torch.manual_seed(0)
    shapes = [(*pack.tokens_RT.shape, heads, head_dim) for heads in (8, 2, 2)]
    given = [
        (torch.randn(shape, device=GPU) * scale).bfloat16() for shape, scale in zip(shapes, (3, 1, 1), strict=True)
    ]
    given = [one.to(dtype).requires_grad_() for one in given]
    real = (pack.nodes_RT != PADDING)[..., None, None]
    q, k, v = given
    out = how(0, q, k, v)
    (out.float() * torch.randn(out.shape, device=GPU) * real).sum().backward()  # type: ignore[no-untyped-call]
    found = [out * real]
    for one in given:
        assert one.grad is not None
        found.append(one.grad)
    return [one.detach().float() for one in found]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("opening", [0, 150], ids=["two levels", "three levels"])
def test_attention_in_parts_equals_one_mask_in_fp32(head_dim: int, opening: int) -> None:
    """Also where a level has nodes without children, which are keys for no query."""
    pack = tree_pack(make_branching_documents(7, 5, longest=300, opening=opening))
    found = attend(pack, FlashTrees(pack), head_dim, torch.bfloat16)
    wanted = attend(pack, MaskedDocuments(pack), head_dim, torch.float32)
    for name, mine, exact in zip(("out", "q", "k", "v"), found, wanted, strict=True):
        assert mine.isfinite().all(), name
        assert (mine - exact).norm() / exact.norm() < 0.012, name


def test_parts_are_as_exact_as_plain_documents() -> None:
    """The same documents, apart and as trees, against fp32: joining adds no error worth speaking of."""
    documents, errors = make_branching_documents(6, 6, longest=300), []
    for sharing in (Sharing(), ON):
        (pack,) = make_packs(documents, 100_000, long_rows=True, sharing=sharing)
        pack = pack.to(GPU)
        how = FlashTrees(pack) if pack.is_shared else FlashDocuments(pack)
        found, wanted = attend(pack, how, 64, torch.bfloat16), attend(pack, MaskedDocuments(pack), 64, torch.float32)
        errors.append([float((mine - one).norm() / one.norm()) for mine, one in zip(found, wanted, strict=True)])
    assert all(tree < 2 * plain for plain, tree in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tokens_per_pack", [16_384, 300])
def test_narrow_trees_agree_with_plain_packs_in_fp32(
    expected: tuple[float, dict[str, Tensor]], compiled: bool, recompute: str, tokens_per_pack: int
) -> None:
    how = {"compiled": compiled, "recompute": recompute, "tokens_per_pack": tokens_per_pack}
    assert_near(make_learner(GPU, torch.bfloat16, "aipo", share_prompts="on", **how), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_half_operands_too(expected: tuple[float, dict[str, Tensor]], compiled: bool) -> None:
    assert_near(make_learner(GPU, torch.float16, share_prompts="on", compiled=compiled), expected)


@pytest.mark.parametrize("loss", ["gspo", "grpo", "cispo"])
def test_other_losses_too(loss: str) -> None:
    assert_near(make_learner(GPU, torch.bfloat16, loss, share_prompts="on"), exact(loss))


def test_fp32_trees_equal_plain_packs_in_fp32(expected: tuple[float, dict[str, Tensor]]) -> None:
    learner = make_learner(GPU, torch.float32, share_prompts="on")
    assert learner.accumulate(DOCUMENTS).loss() == pytest.approx(expected[0], abs=1e-4)
    for name, grad in learner.optimizer.gradients().items():
        assert torch.allclose(grad.cpu(), expected[1][name], rtol=1e-3, atol=1e-3), name


def test_adapters_on_trees_compiled(tmp_path: Path) -> None:
    """Gradients of adapters on trees are those on plain packs, and log-probs without adapters too."""
    save_model(calm_model(), tmp_path / "model")
    found = []
    for mode in ("off", "on"):
        computing = ComputeSettings(GPU, torch.bfloat16, lora=LORA, compiled=True, share_prompts=mode)
        policy = load_policy(tmp_path / "model", computing)
        learner = Learner(policy, LOSSES["aipo"], settings=TrainerConfig(), algo=AlgoConfig(), updates=10)
        learner.accumulate(DOCUMENTS)
        assert policy.model.adapters is not None
        values: dict[int, list[float]] = {}
        with policy.model.adapters.off():
            for pack in policy.packs(DOCUMENTS):
                for number, value in zip(pack.sequence_N.tolist(), policy.logprobs(pack).tolist(), strict=True):
                    values.setdefault(number, []).append(value)
        found.append(
            (dict(learner.optimizer.gradients()), [value for number in sorted(values) for value in values[number]])
        )
    (plain, plain_values), (trees, tree_values) = found
    assert np.mean(np.abs(np.array(plain_values) - np.array(tree_values))) < 0.02
    for name, grad in plain.items():
        if grad.abs().max() > 0:  # at the start, one matrix of each adapter has no gradient
            gap = (trees[name] - grad).float().norm() / grad.float().norm()
            assert gap < 0.1, name


def groups(count: int, samples: int, answer: int) -> list[Document]:
    """Prompts of 50 tokens; every answer goes its own way at once."""
    rng, found = np.random.default_rng(count), []
    for group in range(count):
        prompt = [group % 23, *rng.integers(0, 23, 49).tolist()]
        for sample in range(samples):
            size = int(rng.integers(2, answer))
            tokens = np.array([*prompt, sample % 23, *rng.integers(0, 23, size - 1).tolist()], np.int32)
            zeros = np.zeros(size, np.float32)
            found.append(Document(tokens, 50, zeros - 3, zeros.astype(np.int64), zeros + 1))
    return found


def test_trees_of_all_sizes_share_the_graphs_of_the_first_update() -> None:
    """A graph made anew in the middle of a run costs seconds."""
    torch._dynamo.reset()
    computing = ComputeSettings(GPU, torch.bfloat16, compiled=True, tokens_per_pack=2000, share_prompts="on")
    model = calm_model().to(GPU, torch.bfloat16)
    parallelize_for(model, computing)
    policy = Policy(model, computing)
    learner = Learner(policy, LOSSES["aipo"], settings=TrainerConfig(), algo=AlgoConfig(), updates=10)
    learner.accumulate(groups(7, 8, 60))
    made = counters["stats"]["unique_graphs"]
    for count, samples, answer in ((3, 8, 60), (12, 4, 90), (5, 16, 30), (2, 3, 200)):
        documents = groups(count, samples, answer)
        assert all(pack.is_shared for pack in policy.packs(documents))
        learner.accumulate(documents)
    assert counters["stats"]["unique_graphs"] == made


def test_an_update_says_what_it_shared() -> None:
    rng = np.random.default_rng(0)
    answers = [(completion(rng.integers(1, 23, 20).tolist()), float(number % 2)) for number in range(8)]
    group = rollout_group(rng.integers(1, 23, 100).tolist(), answers)
    computing = ComputeSettings(GPU, torch.bfloat16, share_prompts="auto")
    model = calm_model().to(GPU, torch.bfloat16)
    learner = Learner(Policy(model, computing), LOSSES["aipo"], settings=TrainerConfig(), algo=AlgoConfig(), updates=10)
    assert learner.update(0, [group]).timings["shared_tokens"] == 700.0


@pytest.mark.parametrize("compiled", [False, True])
def test_the_attention_of_cudnn_is_that_of_flash(compiled: bool) -> None:
    """On one long document with padding, and on equal ones without."""
    rng = np.random.default_rng(0)
    for count, size in ((1, 700), (4, 256)):
        documents, zeros = list[Document](), np.zeros(size - 1, np.float32)
        for _ in range(count):
            tokens = rng.integers(0, 23, size).astype(np.int32)
            documents.append(Document(tokens, 1, zeros - 3, zeros.astype(np.int64), zeros + 1))
        found = []
        for cudnn_from in (0, 1):
            learner = make_plain(compiled, cudnn_from)
            learner.accumulate(documents)
            found.append(dict(learner.optimizer.gradients()))
        for name, grad in found[0].items():
            assert (found[1][name].float() - grad.float()).norm() / grad.float().norm() < 0.05, name


def make_plain(compiled: bool, cudnn_from: int) -> Learner:
    computing = ComputeSettings(GPU, torch.bfloat16, compiled=compiled, cudnn_from=cudnn_from)
    model = calm_model().to(GPU, torch.bfloat16)
    parallelize_for(model, computing)
    return Learner(Policy(model, computing), LOSSES["aipo"], settings=TrainerConfig(), algo=AlgoConfig(), updates=10)
