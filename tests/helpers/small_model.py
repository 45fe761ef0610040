"""An untrained model of one narrow layer, for jobs whose bytes are compared: they need not learn, but must be quick."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from llamarl.config import Config
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model_spec import ModelSpec

SPEC = ModelSpec(
    vocab_size=17,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=256,
    tied_head=True,
)


@cache
def small_model() -> tuple[str, ...]:
    """Settings for a job with such a model. Answers end by chance, so rewards by length differ and every update trains."""
    folder = Path(tempfile.mkdtemp(prefix="llamarl-small-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_model(random_model(SPEC, seed=0), folder / "model", carry_from=Config().model_folder)
    return f"model.path={folder / 'model'}", "reward.scorer=length", "reward.max_chars=4", "generator.max_new_tokens=4"
