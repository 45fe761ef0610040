"""How fast does the trainer train? The cases of one GPU, each in a process of its own; or the default job on a CPU.

python benchmarks/train.py            # needs a CUDA device
python benchmarks/train.py --cpu      # the default job's update: packed, against one padded row for each answer
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from llamarl.algo.batch import Document
from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.config.file import load_config
from llamarl.model.checkpoint import load_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.transformer import causal_attention
from llamarl.tasks.registry import make_task
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, Policy

VARIED = ["--model", "llama-3.2-1b", "--tokens", "65536", "--tokens-per-pack", "16384", "--lognormal"]
CASES = {
    "1B, 16 x 1024": ["--model", "llama-3.2-1b"],
    "8B, 16 x 1024, selective recompute": ["--model", "llama-3.1-8b", "--recompute", "selective", "--updates", "6"],
    "1B, log-normal 64-2048, packed": VARIED,
    "1B, the same padded": [*VARIED, "--padded", "--updates", "3"],
}
ROUNDS = 15


def run_case(options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "llamarl.cli", "bench", "train", "--json", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def on_gpu() -> list[dict[str, Any]]:
    print("| case | update, ms | tokens/s | TFLOP/s | MFU, measured peak | MFU, datasheet | allocated, GiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    results = []
    for name, options in CASES.items():
        found = run_case(options)
        results.append({"case": name, **found})
        print(
            f"| {name} | {found['update_s'] * 1e3:,.0f} | {found['tokens_per_s']:,.0f} | {found['tflops']:.0f} "
            f"| {found['mfu_measured']:.1%} of {found['peak_tflops']:.0f} | {found['mfu_datasheet']:.1%} "
            f"| {found['memory_gib']:.1f} |",
            flush=True,
        )
    return results


def usual_documents() -> list[Document]:
    """An update of the default job: 96 problems, 8 answers each, most of them right."""
    config = load_config(None, [])
    tokenizer, task, rng = Tokenizer.load(config.model_folder), make_task(config.task, 0), np.random.default_rng(0)
    documents = []
    for ordinal in range(config.schedule.groups_per_update):
        problem = task.problem(ordinal)
        prompt, right = tokenizer.encode(problem.prompt), [*tokenizer.encode(problem.answer), tokenizer.eos_ids[0]]
        for _ in range(config.schedule.samples_per_group):
            answer = right if rng.random() < 0.7 else rng.integers(0, 16, 8).tolist()
            documents.append(
                Document(
                    tokens=np.array(prompt + answer, dtype=np.int32),
                    num_prompt_tokens=len(prompt),
                    behavior_logprobs=rng.normal(-1, 0.3, len(answer)).astype(np.float32),
                    staleness=np.zeros(len(answer), dtype=np.int64),
                    advantages=np.full(len(answer), rng.normal(), dtype=np.float32),
                )
            )
    return documents


def padded_update(documents: list[Document]) -> Callable[[], None]:
    """One row each, filled up on the right: what the trainer did before it packed."""
    model = load_model(load_config(None, []).model_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    counts = [document.num_answer_tokens for document in documents]

    def update() -> None:
        tokens = np.zeros((len(documents), max(len(document.tokens) for document in documents)), dtype=np.int64)
        for row, document in enumerate(documents):
            tokens[row, : len(document.tokens)] = document.tokens
        columns = [np.arange(one.num_prompt_tokens - 1, len(one.tokens) - 1) for one in documents]
        at = torch.from_numpy(np.repeat(np.arange(len(documents)), counts)), torch.from_numpy(np.concatenate(columns))
        targets = torch.from_numpy(np.concatenate([one.answer for one in documents]).astype(np.int64))
        behavior = torch.from_numpy(np.concatenate([one.behavior_logprobs for one in documents]))
        advantages = torch.from_numpy(np.concatenate([one.advantages for one in documents]))
        hidden = model(torch.from_numpy(tokens), torch.arange(tokens.shape[1]).expand(tokens.shape), causal_attention)
        logprobs = torch.log_softmax(model.logits(hidden[at]), -1).gather(1, targets[:, None])[:, 0]
        ratio = (logprobs - behavior).detach().exp()
        loss = -(ratio.clamp(max=4.0) * advantages * logprobs).sum() / len(targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def packed_update(documents: list[Document]) -> Callable[[], None]:
    policy = Policy(load_model(load_config(None, []).model_folder), ComputeSettings(torch.device("cpu"), torch.float32))
    learner = Learner(policy, aipo_loss, settings=TrainerConfig(lr=1e-6), algo=AlgoConfig(), updates=1000)

    def update() -> None:
        seen = learner.accumulate(documents)
        seen.metrics(documents, 4.0)
        learner.step(0, seen.loss())

    return update


def on_cpu() -> list[dict[str, Any]]:
    documents = usual_documents()
    ways = {"padded": padded_update(documents), "packed": packed_update(documents)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 2):
        for name, update in ways.items():
            start_s = time.perf_counter()
            update()
            times[name].append(time.perf_counter() - start_s)
    ratio = median(packed / padded for packed, padded in zip(times["packed"][2:], times["padded"][2:], strict=True))
    tokens = sum(len(document.tokens) for document in documents)
    print(f"{len(documents)} documents, {tokens} tokens; median of {ROUNDS} rounds")
    for name, found in times.items():
        print(f"  {name}: {median(found[2:]) * 1e3:.0f} ms")
    print(f"  packed / padded, round by round: {ratio:.2f}")
    return [{"ratio": ratio, **{name: median(found[2:]) for name, found in times.items()}}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cpu", action="store_true", help="the default job's update on a CPU")
    parser.add_argument("--json", action="store_true", help="also print the figures as JSON")
    arguments = parser.parse_args()
    results = on_cpu() if arguments.cpu else on_gpu()
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
