"""Make the shipped tiny model: a character tokenizer and a small Llama that can add, but hardly in the form it is asked.

What pre-training saw: sums `37 45+82`, operator last, of the operand pairs that the default task trains on; and, once in
about 170 samples, the same pairs in the form of the task, `37+45=82`. Every sum was the true one. It never saw a held-out
pair, in either form or order. So it adds well in the form it knows and mostly fails in the form the task uses; that gap is
what reinforcement learning then closes.

    python scripts/make_tiny.py FOLDER      (some minutes on two cores; the same bytes for the same torch and CPU)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F

from llamarl.config import Config
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.shapes import ModelShape
from llamarl.tasks.registry import make_task
from llamarl.types import Problem

SEED = 1
BATCH = 256
STEPS = 500
WARMUP = 50
LR = 1e-3
TASK_FORM_SHARE = 0.006
ALPHABET = "0123456789+-*=. "
EOS = "<eos>"

SHAPE = ModelShape(
    vocab_size=len(ALPHABET) + 1,
    hidden_size=128,
    intermediate_size=384,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=256,
    tied_head=True,
)


def write_tokenizer(folder: Path) -> None:
    vocab = {EOS: 0} | {character: index for index, character in enumerate(ALPHABET, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}, indent=2) + "\n")


def operator_last(problem: Problem) -> Problem:
    """`37+45=` as `37 45+`: the form that pre-training teaches."""
    return Problem(problem.prompt[:-1].replace("+", " ") + "+", problem.answer)


def encode(problems: Sequence[Problem], width: int) -> tuple[Tensor, Tensor]:
    """Prompts with their answers, padded; and the mask of the tokens to learn (the answer and its end)."""
    index = {character: number for number, character in enumerate(ALPHABET, start=1)}
    tokens = torch.zeros(len(problems), width, dtype=torch.int64)
    learn = torch.zeros(len(problems), width, dtype=torch.bool)
    for row, problem in enumerate(problems):
        text = problem.prompt + problem.answer
        tokens[row, : len(text)] = torch.tensor([index[character] for character in text])
        learn[row, len(problem.prompt) : len(text) + 1] = True
    return tokens, learn


def pretrain(model: Transformer, problems: Sequence[Problem]) -> None:
    width = max(len(problem.prompt + problem.answer) for problem in problems) + 1
    task_form = encode(problems, width)
    known_form = encode([operator_last(problem) for problem in problems], width)
    positions = torch.arange(width).expand(BATCH, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(SEED)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP) * (1 - 0.95 * step / STEPS)
        rows = torch.randint(len(problems), (BATCH,), generator=generator)
        in_task_form = (torch.rand(BATCH, generator=generator) < TASK_FORM_SHARE)[:, None]
        tokens = torch.where(in_task_form, task_form[0][rows], known_form[0][rows])
        learn = torch.where(in_task_form, task_form[1][rows], known_form[1][rows])[:, 1:]
        logits = model.logits(model(tokens, positions, causal_attention)[:, :-1])
        loss = F.cross_entropy(logits[learn], tokens[:, 1:][learn])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step} of {STEPS}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/make_tiny.py FOLDER   (a folder that does not exist yet)")
    folder = Path(sys.argv[1])
    torch.set_num_threads(2)
    model = random_model(SHAPE, seed=SEED)
    print(f"{SHAPE.num_parameters:,} parameters")
    pretrain(model, make_task(Config().task, seed=0).train)
    save_model(model, folder)
    write_tokenizer(folder)
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
