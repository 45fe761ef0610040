"""Which passes have cuDNN's attention, where a job asks for it. What it computes: `tests/gpu/test_trees.py`."""

from __future__ import annotations

import pytest
import torch
from helpers.training import make_test_documents
from msgspec.structs import replace

from llamarl.builders import compute
from llamarl.config.file import load_config
from llamarl.errors import ConfigError
from llamarl.model_spec import SHAPES
from llamarl.train.attention import CudnnDocuments, FlashDocuments, document_attention, not_by_cudnn
from llamarl.train.packing import make_packs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.context=2"], "trainer.cudnn_from: ranks that share a pass"),
        (["trainer.dtype=float16"], "trainer.cudnn_from: cuDNN's attention is for bf16, not float16"),
        (["trainer.dtype=float32"], "for bf16, not float32"),
        (["trainer.device=cpu"], "trainer.cudnn_from: cuDNN's attention needs a GPU"),
    ],
)
def test_what_would_not_be_applied_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compute.check_training(load_config(None, ["trainer.cudnn_from=64", *settings]))
    assert message in str(caught.value)


def test_models_that_it_cannot_compute_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "device_of", lambda key, name: torch.device("cuda"))
    monkeypatch.setattr(compute, "check_ranks", lambda *_: None)
    job = load_config(None, ["trainer.cudnn_from=64"])
    compute.check_training(job)
    shape = SHAPES["llama-3.2-1b"]
    for other in (replace(shape, head_dim=256), replace(shape, attention_softcap=50.0), SHAPES["gemma-3-1b"]):
        assert not_by_cudnn(other) and not not_by_cudnn(shape)
        monkeypatch.setattr(compute, "read_shape", lambda folder, other=other: other)
        with pytest.raises(ConfigError, match=r"trainer.cudnn_from: cuDNN's attention has no"):
            compute.check_training(job)


def test_it_takes_a_long_sequence_alone_and_equal_ones_together() -> None:
    documents = make_test_documents(12)
    (pack, *_) = make_packs(documents, 10_000, long_rows=True)
    assert isinstance(document_attention(pack, long_rows=True, cudnn_from=1), FlashDocuments), "lengths differ"
    (alone,) = make_packs(documents[:1], 10_000, long_rows=True)
    size = alone.lengths[0]
    assert isinstance(document_attention(alone, long_rows=True, cudnn_from=size), CudnnDocuments)
    assert isinstance(document_attention(alone, long_rows=True, cudnn_from=size + 1), FlashDocuments)
    assert isinstance(document_attention(alone, long_rows=True), FlashDocuments), "unless asked for"
