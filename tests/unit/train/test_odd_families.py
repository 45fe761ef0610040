"""Windows, norms, biases, softcaps and multipliers in the trainer: gradients are those of one document at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.odd_models import ALL, EXPERTS, ODD, odd_model
from helpers.trainer_rank import make_learner
from helpers.training import assert_same_gradients, cpu_learner, make_test_documents, naive_gradients
from helpers.trees import flash_on_cpu, make_branching_documents
from safetensors.torch import load_file
from torch import Tensor

from llamarl.config import LoraConfig
from llamarl.errors import ConfigError
from llamarl.families.adapters import active_adapter_parameters, adapter_parameters
from llamarl.model.checkpoint import save_model
from llamarl.model_spec import AttentionOptions
from llamarl.train.attention import FlashDocuments, MaskedDocuments, document_attention
from llamarl.train.fp16 import flash_options
from llamarl.train.mesh import LONE_RANK
from llamarl.train.packing import PADDING, Pack, Sharing, make_packs
from llamarl.train.tree_attention import FlashTrees

DOCUMENTS = make_test_documents(12)
BRANCHING = make_branching_documents()


@pytest.mark.parametrize("name", ALL)
def test_packed_and_recomputed_equals_one_by_one(name: str) -> None:
    learner = cpu_learner(odd_model(name), tokens_per_pack=60, recompute="full", temperature=1.0)
    seen = learner.accumulate(DOCUMENTS)
    loss, expected = naive_gradients(odd_model(name), DOCUMENTS)
    assert seen.loss() == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(learner.optimizer.gradients(), expected)
    assert all(gradient.abs().max() > 0 for gradient in expected.values()), "a parameter without use would hide a fault"


@pytest.mark.parametrize("name", ALL)
def test_what_documents_begin_with_is_computed_once(name: str) -> None:
    learner, plain = (cpu_learner(odd_model(name), tokens_per_pack=100, share_prompts=how) for how in ("on", "off"))
    assert any(pack.is_shared for pack in learner.policy.packs(BRANCHING))
    assert learner.accumulate(BRANCHING).loss() == pytest.approx(plain.accumulate(BRANCHING).loss(), abs=1e-5)
    assert_same_gradients(learner.optimizer.gradients(), plain.optimizer.gradients())


def attend(pack: Pack, how: MaskedDocuments | FlashTrees | FlashDocuments, options: AttentionOptions) -> list[Tensor]:
    """Output of attention, and gradients of what goes in."""
    torch.manual_seed(0)
    shapes = [(*pack.tokens_RT.shape, heads, 8) for heads in (4, 2, 2)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    real = (pack.nodes_RT != PADDING)[..., None, None]
    q, k, v = given
    out = how(0, q, k, v, options) * real
    return [out.detach(), *torch.autograd.grad((out * torch.randn(out.shape)).sum(), given)]


@pytest.mark.parametrize("window", [0, 1, 2, 3, 7, 50])
@pytest.mark.parametrize("shared", [False, True])
def test_one_long_row_with_a_window_equals_a_mask(window: int, shared: bool) -> None:
    """Also where a window ends inside a prompt that several answers share, or reaches beyond two levels."""
    options = AttentionOptions(window=window, scale=0.4)
    sharing = Sharing("on" if shared else "off")
    (pack,) = make_packs(BRANCHING, 10_000, long_rows=True, sharing=sharing, multiple_of=16)
    with flash_on_cpu():
        how = document_attention(pack, long_rows=True, window=window)
        assert isinstance(how, FlashTrees if shared else FlashDocuments)
        found = attend(pack, how, options)
    for mine, expected in zip(found, attend(pack, MaskedDocuments(pack), options), strict=True):
        torch.testing.assert_close(mine, expected)


def test_flash_attention_counts_a_window_without_the_token_itself() -> None:
    """It takes the number of tokens to the left; ours has the token itself in it."""
    assert flash_options(None, 5) == {"window_size_left": 4, "window_size_right": 0}
    assert (flash_options(0.5, 0), flash_options(None, 0)) == ({"scale": 0.5}, {})


def test_a_window_leaves_out_what_is_older() -> None:
    """By the definition of transformers: `window` tokens, the token itself among them."""
    (pack,) = make_packs(DOCUMENTS[:1], 10_000, long_rows=False, multiple_of=1)
    length = pack.lengths[0]
    values_RTKD = torch.eye(pack.tokens_RT.shape[1])[None, :, None]
    zeros = torch.zeros_like(values_RTKD)
    weights = MaskedDocuments(pack)(0, zeros, zeros, values_RTKD, AttentionOptions(window=3))[0, :length, 0, :length]
    expected = torch.ones(length, length).tril().triu(-2)
    assert torch.equal(weights > 0, expected > 0)


def test_layers_for_adapters_are_those_of_the_table() -> None:
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for name, spec in ODD.items():
        targets = ("o_proj", "down_proj") if name == "phi3" else "all"
        found = adapter_parameters(spec, LoraConfig(rank=2, targets=targets))
        assert {one.split(".")[-3] for one in found} == (set(targets) if name == "phi3" else every)


def test_adapters_of_layers_that_files_hold_joined_are_refused() -> None:
    """One adapter of Phi-3's qkv_proj has one A; three of its parts have three, and PEFT could not load them."""
    for targets in ("all", "attention", "mlp", ("q_proj",)):
        with pytest.raises(ConfigError, match="choose among: o_proj, down_proj"):
            adapter_parameters(ODD["phi3"], LoraConfig(rank=2, targets=targets))


def test_masters_are_read_from_joined_tensors(tmp_path: Path) -> None:
    """As a resumed job reads them from the policy of its snapshot."""
    model = odd_model("phi3")
    save_model(model, tmp_path / "model")
    assert "model.layers.1.self_attn.qkv_proj.weight" in load_file(tmp_path / "model" / "model.safetensors")
    learner = make_learner(tmp_path / "model", LONE_RANK)
    wanted = dict(model.named_parameters())
    for name, master in learner.optimizer.masters():
        assert torch.equal(master.view_as(wanted[name]), wanted[name]), name


@pytest.mark.parametrize("name", EXPERTS)
def test_every_expert_has_adapters_of_its_own(name: str) -> None:
    spec = EXPERTS[name]
    found = adapter_parameters(spec, LoraConfig(rank=2, targets="attention"))
    assert len(found) == 2 * 2 * 4
    of_experts = adapter_parameters(spec, LoraConfig(rank=2, targets=("experts",)))
    mixed = len(spec.expert_layers)
    each = 2 * (spec.hidden_size + 2 * spec.expert_size) + 2 * (spec.expert_size + spec.hidden_size)
    assert sum(one.size for one in of_experts.values()) == mixed * spec.experts * each
    assert adapter_parameters(spec, LoraConfig(rank=2)).keys() >= found.keys() | of_experts.keys()
    active = active_adapter_parameters(spec, LoraConfig(rank=2, targets=("experts",)))
    assert active == pytest.approx(mixed * spec.experts_per_token * each)
