"""Our transformer computes what transformers' does, and each side reads the other's folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.model.checkpoint import load_model, save_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.transformer import Transformer, causal_attention

Greedy = Callable[[Transformer, list[int], int], list[int]]


def logits_of(model: Transformer, tokens_BT: Tensor) -> Tensor:
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    return model.logits(model(tokens_BT, positions_BT, causal_attention))


@pytest.fixture
def greedy(cached_logits: Callable[..., Tensor]) -> Greedy:
    """The `count` most likely next tokens, each after the ones before it."""

    def decode(model: Transformer, prompt: list[int], count: int) -> list[int]:
        logits_1TV = cached_logits(model, [prompt], lambda step, logits_BV: logits_BV.argmax(-1), count)
        chosen: list[int] = logits_1TV[0].argmax(-1).tolist()
        return chosen

    return decode


def hf_greedy(theirs: Any, tokens: list[int], count: int) -> list[int]:
    ids = torch.tensor([tokens])
    mask = torch.ones_like(ids)
    made = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    out: list[int] = made[0, len(tokens) :].tolist()
    return out


def gradients(model: torch.nn.Module, logits_BTV: Tensor, tokens_BT: Tensor) -> dict[str, Tensor]:
    """Of the next-token loss, by parameter."""
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def assert_gradients_equal(ours: Transformer, theirs: Any, tokens_BT: Tensor) -> None:
    # transformers withholds the padding token's gradient, which is wrong where padding and end are one token.
    theirs.model.embed_tokens.padding_idx = None
    expected = gradients(theirs, theirs(tokens_BT).logits, tokens_BT)
    found = gradients(ours, logits_of(ours, tokens_BT), tokens_BT)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-4, msg=name)


@pytest.fixture
def pair(hf_model: Any, tmp_path: Path) -> tuple[Any, Transformer]:
    hf_model.save_pretrained(tmp_path / "theirs")
    return hf_model, load_model(tmp_path / "theirs")


@pytest.fixture
def tokens_BT(pair: tuple[Any, Transformer]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, pair[1].shape.vocab_size, (3, 40), generator=generator)


def test_logits_equal_those_of_transformers(pair: tuple[Any, Transformer], tokens_BT: Tensor) -> None:
    theirs, ours = pair
    expected = theirs(tokens_BT).logits
    assert expected.abs().max() > 0.5, "logits near zero would pass whatever we compute"
    torch.testing.assert_close(logits_of(ours, tokens_BT), expected, rtol=0, atol=1e-4)


def test_gradients_equal_those_of_transformers(pair: tuple[Any, Transformer], tokens_BT: Tensor) -> None:
    theirs, ours = pair
    assert_gradients_equal(ours, theirs, tokens_BT)


def test_greedy_generation_equals_that_of_transformers(pair: tuple[Any, Transformer], greedy: Greedy) -> None:
    theirs, ours = pair
    assert greedy(ours, [1, 5, 9], 64) == hf_greedy(theirs, [1, 5, 9], 64)


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000])
def test_folders_cross_both_ways_bit_for_bit(
    hf: ModuleType, pair: tuple[Any, Transformer], tmp_path: Path, max_shard_bytes: int
) -> None:
    theirs, ours = pair
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    save_model(ours, tmp_path / "ours", max_shard_bytes=max_shard_bytes)
    back = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert back.config.tie_word_embeddings == theirs.config.tie_word_embeddings
    for name, parameter in theirs.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter), name
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    # Mistral comes back as Llama, which is the same maths: the config must say so too.
    assert torch.equal(back(tokens).logits, theirs(tokens).logits)


def test_smollm2_equals_transformers(hf: ModuleType, smollm2: Path, greedy: Greedy) -> None:
    theirs = hf.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ours = load_model(smollm2)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    tokens = Tokenizer.load(smollm2).chat([{"role": "user", "content": "Name three rivers of Europe."}])
    tokens_BT = torch.tensor([tokens])
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, tokens_BT), theirs(tokens_BT).logits, rtol=0, atol=1e-4)
    assert_gradients_equal(ours, theirs, tokens_BT)
    assert greedy(ours, tokens, 64) == hf_greedy(theirs, tokens, 64)
