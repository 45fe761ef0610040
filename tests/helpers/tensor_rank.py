"""One rank of a tensor-parallel generator, as a program: `python -m helpers.tensor_rank RANK COUNT FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from helpers.groups import prompt_group
from helpers.ranks import DEVICE, join_in, leave_group
from llamarl.generate.decoder import AS_THE_MODEL, ContinuousDecoder, Limits, Precision
from llamarl.generate.parallel import TensorRank, split_over_ranks
from llamarl.model.checkpoint import load_model
from llamarl.types import PromptGroup, bytes_to_floats, bytes_to_tokens

SLOTS, NEW = 8, 20


def groups() -> list[PromptGroup]:
    return [
        prompt_group(
            [1 + (3 * ordinal + i) % 22 for i in range(1 + 2 * ordinal)], ordinal=ordinal, samples=3, max_new_tokens=NEW
        )
        for ordinal in range(6)
    ]


def decode(
    folder: Path, part: TensorRank, precision: Precision = AS_THE_MODEL, device: torch.device = DEVICE
) -> dict[str, list[tuple[list[int], list[float]]]]:
    model = load_model(folder, device=device, box_of=part.box)
    split_over_ranks(model, part)
    limits = Limits(slots=SLOTS, max_prompt_tokens=16, max_new_tokens=NEW, page_tokens=4, num_pages=24)
    decoder = ContinuousDecoder(model, limits, eos_ids=(0,), seed=3, tensor_ranks=part.count, precision=precision)
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


def main() -> None:
    rank, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    join_in(folder, rank, count)
    quantized = Precision(weights="fp8", kv_cache="fp8")
    for name, precision in (("found", AS_THE_MODEL), ("quantized", quantized)):
        found = decode(folder / "model", TensorRank(rank, count), precision)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    leave_group()


if __name__ == "__main__":
    main()
