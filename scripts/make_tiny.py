"""Makes the shipped tiny models: a character tokenizer and a small Llama that can add, but hardly in the form of the task.

Pretraining first shows only sums with a period before the result, `37+45.82`, for the operand pairs that the default task
trains on, until the model knows them. Then it mixes in the same pairs in the form of the task, `37+45=82`, until two fifths
of the greedy answers in that form are right. All sums are correct, and no held-out pair is shown in either form or order. So
the model adds well in the form it knows and mostly fails in the form of the task; RL closes that gap.

    python scripts/make_tiny.py FOLDER      (a few minutes on two cores; the same bytes for the same torch and CPU)
    python scripts/make_tiny.py FOLDER --experts

With `--experts`, the model is a mixture of experts (a Granite-MoE) with as many weights in use for a token, taught the same
way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F

from llamarl.config import Config
from llamarl.families.parameters import num_parameters
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.model_spec import ModelSpec
from llamarl.tasks.registry import make_single_task
from llamarl.types import Problem

SEED = 1
BATCH = 256
STEPS = 800  # steps in the known form
WARMUP = 50
LR = 1e-3
MIXED_LR = 5e-5  # low, so that mixed training can stop close to GOOD_ENOUGH
TASK_FORM_SHARE = 0.05
GOOD_ENOUGH = 0.4  # greedy accuracy in the task's form, on training pairs
CHECK_EVERY = 2
ALPHABET = "0123456789+-*=. "
EOS = "<eos>"

SHAPE = ModelSpec(
    vocab_size=len(ALPHABET) + 1,
    hidden_size=128,
    intermediate_size=416,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=256,
    tied_head=True,
)
EXPERTS = replace(
    SHAPE,
    family="granitemoe",
    attention_scale=SHAPE.head_dim**-0.5,
    intermediate_size=SHAPE.intermediate_size // 2,
    experts=4,
    experts_per_token=2,
    expert_size=SHAPE.intermediate_size // 2,
    normalize_routes=True,
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


def known_form(problem: Problem) -> Problem:
    """Turn `37+45=` into `37+45.`, the form that pretraining teaches first."""
    return Problem(problem.prompt[:-1] + ".", problem.answer)


def encode(problems: Sequence[Problem], width: int) -> tuple[Tensor, Tensor]:
    """Padded tokens of prompts and answers, and the mask of the tokens to learn (the answer and its end)."""
    index = {character: number for number, character in enumerate(ALPHABET, start=1)}
    tokens = torch.zeros(len(problems), width, dtype=torch.int64)
    learn = torch.zeros(len(problems), width, dtype=torch.bool)
    for row, problem in enumerate(problems):
        text = problem.prompt + problem.answer
        tokens[row, : len(text)] = torch.tensor([index[character] for character in text])
        learn[row, len(problem.prompt) : len(text) + 1] = True
    return tokens, learn


class Pretraining:
    def __init__(self, model: Transformer, problems: Sequence[Problem]) -> None:
        width = max(len(problem.prompt + problem.answer) for problem in problems) + 1
        self._model = model
        self._task_form = encode(problems, width)
        self._known_form = encode([known_form(problem) for problem in problems], width)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
        self._generator = torch.Generator().manual_seed(SEED)

    def run(self) -> None:
        for step in range(STEPS):
            loss = self._step(LR * min(1.0, (step + 1) / WARMUP) * (1 - 0.95 * step / STEPS), task_form_share=0.0)
            if step % 50 == 0 or step == STEPS - 1:
                print(
                    f"known form, step {step}: loss {loss:.3f}, {self._accuracy(self._known_form):.3f} right",
                    flush=True,
                )
        step = 0
        while (accuracy := self._accuracy(self._task_form)) < GOOD_ENOUGH:
            print(f"mixed, step {step}: {accuracy:.3f} right in the task's form", flush=True)
            for _ in range(CHECK_EVERY):
                self._step(MIXED_LR, TASK_FORM_SHARE)
            step += CHECK_EVERY
        print(f"mixed, step {step}: {accuracy:.3f} right, enough", flush=True)

    def _step(self, lr: float, task_form_share: float) -> float:
        rows = torch.randint(len(self._task_form[0]), (BATCH,), generator=self._generator)
        in_task_form = (torch.rand(BATCH, generator=self._generator) < task_form_share)[:, None]
        tokens, learn = (
            torch.where(in_task_form, task[rows], known[rows])
            for task, known in zip(self._task_form, self._known_form, strict=True)
        )
        loss = F.cross_entropy(self._logits(tokens)[learn[:, 1:]], tokens[:, 1:][learn[:, 1:]])
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()

    @torch.no_grad()
    def _accuracy(self, form: tuple[Tensor, Tensor]) -> float:
        """Share of pairs whose whole answer the model gives greedily."""
        tokens, learn = form[0][::8], form[1][::8]
        right = (self._logits(tokens).argmax(-1) == tokens[:, 1:]) | ~learn[:, 1:]
        return right.all(dim=1).float().mean().item()

    def _logits(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        return self._model.logits(self._model(tokens, positions, causal_attention)[:, :-1])


def main() -> None:
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["--experts"]):
        sys.exit("usage: python scripts/make_tiny.py FOLDER [--experts]   (a folder that does not exist yet)")
    folder = Path(sys.argv[1])
    torch.set_num_threads(2)
    model = random_model(EXPERTS if sys.argv[2:] else SHAPE, seed=SEED)
    Pretraining(model, make_single_task(Config().task, seed=0).train).run()
    print(f"{num_parameters(model.shape):,} parameters")
    save_model(model, folder, dtype=torch.bfloat16 if model.shape.experts else None)
    write_tokenizer(folder)
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
