"""Decoding with a KV cache is the full forward pass, only cheaper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llamarl.model.checkpoint import load_model
from llamarl.model.transformer import causal_attention


@pytest.mark.parametrize("lengths", [[5, 1, 17, 9], [3], [12, 12, 2]], ids=str)
def test_prefill_and_decode_equal_the_full_forward(
    hf_model: Any, cached_logits: Callable[..., Tensor], lengths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    hf_model.save_pretrained(folder)
    model = load_model(folder)
    count = 12
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, model.shape.vocab_size, (n + count,), generator=generator) for n in lengths]
    following_BT = torch.stack([row[n:] for row, n in zip(rows, lengths, strict=True)])
    prompts = [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]
    found_BTV = cached_logits(model, prompts, lambda step, _: following_BT[:, step], count)
    for row, length, found_TV in zip(rows, lengths, found_BTV, strict=True):
        with torch.no_grad():
            hidden_1TC = model(row[None], torch.arange(len(row))[None], causal_attention)
            expected_TV = model.logits(hidden_1TC)[0, length - 1 : -1]
        torch.testing.assert_close(found_TV, expected_TV, rtol=0, atol=1e-5)
