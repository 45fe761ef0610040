"""Make the shipped tiny model: a character tokenizer and a small Llama that has just begun to learn addition.

What pre-training saw: problems `a+b=` with their true sums, drawn from the operand pairs that the default task trains on.
It never saw a held-out pair in either order, never a wrong sum, and nothing else. It is stopped early, on purpose, while
most answers are still wrong: what is missing is what reinforcement learning then has to find by itself.

    python scripts/make_tiny.py [FOLDER]      (about a minute on two cores; the same bytes for the same torch and CPU)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F

from llamarl.config import Config
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.shapes import ModelShape
from llamarl.tasks.registry import make_task
from llamarl.tasks.task import Task

SEED = 1
BATCH = 256
STEPS = 700
LR = 1e-3
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


def encode_sums(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """All training problems with their answers, padded; and the mask of the tokens to learn (answer and end)."""
    index = {character: number for number, character in enumerate(ALPHABET, start=1)}
    texts = [(problem.prompt, problem.answer) for problem in task.train]
    width = max(len(prompt) + len(answer) for prompt, answer in texts) + 1
    tokens = torch.zeros(len(texts), width, dtype=torch.int64)
    learn = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(texts):
        text = prompt + answer
        tokens[row, : len(text)] = torch.tensor([index[character] for character in text])
        learn[row, len(prompt) : len(text) + 1] = True
    return tokens, learn


def pretrain(model: Transformer, task: Task, steps: int = STEPS) -> None:
    tokens, learn = encode_sums(task)
    positions = torch.arange(tokens.shape[1]).expand(BATCH, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(SEED)
    for step in range(steps):
        rows = torch.randint(len(tokens), (BATCH,), generator=generator)
        batch, mask = tokens[rows], learn[rows]
        logits = model.logits(model(batch, positions, causal_attention)[:, :-1])
        loss = F.cross_entropy(logits[mask[:, 1:]], batch[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    config = Config()
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else config.model_folder
    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    model = random_model(SHAPE, seed=SEED)
    print(f"{SHAPE.num_parameters:,} parameters")
    pretrain(model, make_task(config.task, seed=SEED))
    save_model(model, folder)
    write_tokenizer(folder)
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
