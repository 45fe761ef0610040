"""One rank of a tensor-parallel generator, as `helpers.ranks.run_ranks` starts it: the folder, then cases.

Cases are quantized, beside, merged, expert=N, which gives parts of the ranks experts of their own, and off_by_one, where the
last rank takes its experts for those whose numbers are one higher.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.groups import prompt_group
from helpers.lora import LORA, put_adapters, random_adapters, save_both
from helpers.models import SHAPE
from helpers.ranks import DEVICE, join_in, leave_group, run_ranks
from llamarl.builders.generator import add_adapters
from llamarl.config.file import parse_config
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import AS_THE_MODEL, Limits, Precision
from llamarl.generate.parallel import TensorRank, split_over_ranks
from llamarl.model.adapter_folder import load_merged
from llamarl.model.checkpoint import load_model, save_model
from llamarl.model.experts import ExpertMLP
from llamarl.model_spec import ModelSpec
from llamarl.types import PromptGroup, bytes_to_floats, bytes_to_tokens

SLOTS, NEW = 8, 20
Sampled = dict[str, list[tuple[list[int], list[float]]]]  # ordinal -> tokens and log-probs of each completion


def groups() -> list[PromptGroup]:
    return [
        prompt_group(
            [1 + (3 * ordinal + i) % 22 for i in range(1 + 2 * ordinal)], ordinal=ordinal, samples=3, max_new_tokens=NEW
        )
        for ordinal in range(6)
    ]


def decode(
    folder: Path,
    part: TensorRank,
    precision: Precision = AS_THE_MODEL,
    device: torch.device = DEVICE,
    lora: str = "",
    shift: int = 0,
) -> Sampled:
    """With `lora` (beside or merged), the model has random adapters; with `shift`, other numbers for its experts."""
    model = load_model(folder, device=device, box_of=part.box)
    split_over_ranks(model, part)
    for block in model.model.layers if shift else ():
        if isinstance(block.mlp, ExpertMLP):
            block.mlp.experts.first += shift
    limits = Limits(slots=SLOTS, max_prompt_tokens=16, max_new_tokens=NEW, page_tokens=4, num_pages=24)
    config = parse_config(
        {"model": {"lora": {"rank": LORA.rank, "alpha": LORA.alpha}}, "generator": {"lora": lora or "beside"}}
    )
    decoder = ContinuousDecoder(
        model,
        limits,
        eos_ids=(0,),
        seed=3,
        tensor_ranks=part.count,
        precision=precision,
        add_adapters=partial(add_adapters, config=config, part=part) if lora else None,
    )
    if lora:
        put_adapters(model, random_adapters(shape=model.shape), part.box)
    decoder.version = 0
    for group in groups():
        decoder.add(group)
    found = {}
    while not decoder.idle:
        for done in decoder.step():
            found[str(done.ordinal)] = [
                (bytes_to_tokens(one.tokens).tolist(), bytes_to_floats(one.behavior_logprobs).tolist())
                for one in done.completions
            ]
    return found


def check_same_tokens(folder: Path, count: int, device: torch.device = DEVICE, atol: float = 1e-5) -> Sampled:
    """Compare what `count` ranks have written to the folder with what one samples, which is returned."""
    alone = decode(folder / "model", TensorRank(), device=device)
    for rank in range(count):
        found = json.loads((folder / f"found-{rank}.json").read_text())
        assert found.keys() == alone.keys()
        for ordinal, completions in alone.items():
            for (tokens, logprobs), (my_tokens, my_logprobs) in zip(completions, found[ordinal], strict=True):
                assert my_tokens == tokens
                assert my_logprobs == pytest.approx(logprobs, abs=atol)
    return alone


def check_adapted_ranks(folder: Path, lora: str, count: int, *, shape: ModelSpec = SHAPE, expert: int = 1) -> None:
    """Compare what `count` ranks sample with adapters with what one samples from the merged model."""
    adapter = save_both(folder, shape=shape)
    run_ranks("helpers.tensor_rank", count, str(folder), lora, f"expert={expert}")
    save_model(load_merged(adapter, dtype=torch.float32), folder / "whole")
    whole, base = decode(folder / "whole", TensorRank()), decode(folder / "model", TensorRank())
    for rank in range(count):
        found = json.loads((folder / f"{lora}-{rank}.json").read_text())
        for ordinal, completions in whole.items():
            for (tokens, logprobs), (my_tokens, my_logprobs) in zip(completions, found[ordinal], strict=True):
                assert my_tokens == tokens and my_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert whole != base


def main(rank: int, count: int, into: str, *more: str) -> None:
    folder = Path(into)
    join_in(folder, rank, count)
    experts = [int(name.removeprefix("expert=")) for name in more if name.startswith("expert=")]
    part = TensorRank(rank, count, *experts)
    for name in ["found", *(one for one in more if "=" not in one)]:
        precision = Precision(weights="fp8", kv_cache="fp8") if name == "quantized" else AS_THE_MODEL
        lora = name if name in ("beside", "merged") else ""
        shift = int(name == "off_by_one" and rank == count - 1)
        found = decode(folder / "model", part, precision, lora=lora, shift=shift)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    leave_group()
