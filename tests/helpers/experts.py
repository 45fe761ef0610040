"""A small mixture of experts, and what it chooses when it reads a whole answer at once."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from helpers.models import SHAPE as DENSE
from helpers.models import lively_model
from helpers.small_model import small_model
from llamarl.algo.batch import Document
from llamarl.config import Config
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.routes import RouteFormat, route_format, route_rows
from llamarl.types import CompletionGroup, bytes_to_tokens

SHAPE = replace(
    DENSE,
    num_layers=3,
    experts=6,
    experts_per_token=2,
    expert_size=16,
    dense_layers=(1,),
    normalize_routes=True,
    qk_norm=True,
    family="qwen3_moe",
)
FORMAT = RouteFormat(layers=2, per_token=2, experts=6)
assert route_format(SHAPE) == FORMAT


def expert_model(seed: int = 0) -> Transformer:
    return lively_model(seed, SHAPE)


def with_routes(document: Document, seed: int = 0, form: RouteFormat = FORMAT) -> Document:
    """The document with experts that no router would choose."""
    rng = np.random.default_rng([seed, *document.tokens.tolist()])
    shape = len(document.tokens) - 1, form.layers, form.experts
    ids = rng.random(shape).argsort(-1)[..., : form.per_token].astype(np.uint8)
    return dataclasses.replace(document, routes=ids.reshape(len(ids), -1))


@cache
def small_mixture() -> tuple[str, ...]:
    """Settings for a job with an untrained mixture; see `small_model`."""
    folder = Path(tempfile.mkdtemp(prefix="llamarl-small-mixture-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shape = replace(SHAPE, vocab_size=17, max_positions=256)
    save_model(random_model(shape, seed=0), folder / "model", carry_from=Config().model_folder)
    return f"model.path={folder / 'model'}", *small_model()[1:]


@torch.inference_mode()
def choices(model: Transformer, tokens: Sequence[int]) -> NDArray[np.int64]:
    """The experts that the model chooses for each token of a sequence."""
    chosen = torch.zeros(len(tokens), FORMAT.layers, FORMAT.per_token, dtype=torch.int64)
    inputs = torch.tensor([list(tokens)]), torch.arange(len(tokens))[None]
    model(*inputs, causal_attention, chosen=chosen)
    return chosen.numpy()


def recorded(group: CompletionGroup, sample: int) -> NDArray[np.int64]:
    """The experts that the generator recorded for all tokens of an answer but the last."""
    done = group.completions[sample]
    sizes = {"num_tokens": len(done.tokens) // 4, "num_prompt": len(group.prompt.prompt_tokens) // 4}
    rows = route_rows(done.routes, done.prompt_routes or group.prompt.routes, of="test", **sizes)
    return FORMAT.ids(rows).astype(np.int64)


def tokens_of(group: CompletionGroup, sample: int) -> list[int]:
    """Prompt and answer."""
    parts = group.prompt.prompt_tokens, group.completions[sample].tokens
    return [int(token) for part in parts for token in bytes_to_tokens(part)]
