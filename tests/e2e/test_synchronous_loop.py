"""S = 0 is synchronous and on-policy: the whole machinery gives, bit for bit, what a loop of one page gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.builders import HASH_FILE, hashing_trainer, weights_sha256

from llamarl import Job
from llamarl.algo.batch import TokenBatch
from llamarl.algo.losses import aipo_loss
from llamarl.config import Config
from llamarl.configfile import load_config
from llamarl.generate.cache import KVCache
from llamarl.generate.sampling import uniform_draws
from llamarl.generate.step import decode_step, prefill
from llamarl.model.checkpoint import load_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.tasks.registry import make_scorer, make_task

UPDATES = 20
OVERRIDES = [
    f"schedule.updates={UPDATES}",
    "schedule.groups_per_update=8",
    "schedule.samples_per_group=4",
    "schedule.max_staleness=0",
    "generator.slots=32",
    "generator.device=cpu",
    "trainer.device=cpu",
    "generator.threads=1",
    "trainer.threads=1",
    "trainer.lr=1e-4",
    "trainer.warmup_updates=5",
    "algo.zero_variance=keep",
    "trainer.final_lr_share=1",
    "evaluate.prompts=0",
    "placement=colocated",
]


def test_inline_equals_a_loop_written_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: list[str]
) -> None:
    assert run_job("inline", tmp_path, monkeypatch) == by_hand


def test_local_equals_a_loop_written_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: list[str]
) -> None:
    assert run_job("local", tmp_path, monkeypatch) == by_hand


def run_job(engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv(HASH_FILE, str(folder / "hashes"))
    job = Job(load_config(None, [*OVERRIDES, f"engine={engine}"]), builders={"trainer": hashing_trainer})
    summary = job.run(folder / "run")
    assert summary.staleness_max == 0
    return (folder / "hashes").read_text().split()


@pytest.fixture(scope="module")
def by_hand() -> list[str]:
    torch.set_num_threads(1)
    config = load_config(None, OVERRIDES)
    model = load_model(config.model_folder)
    tokenizer = Tokenizer.load(config.model_folder)
    task, score = make_task(config.task, config.seed), make_scorer(config.reward)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors}], lr=0.0, betas=config.trainer.betas, weight_decay=0.0
    )
    hashes, groups, samples = [], config.schedule.groups_per_update, config.schedule.samples_per_group
    for update in range(UPDATES):
        ordinals = range(update * groups, (update + 1) * groups)
        problems = [task.problem(ordinal) for ordinal in ordinals]
        prompts = [tokenizer.encode(problem.prompt) for problem in problems for _ in range(samples)]
        completions, logprobs = generate(model, config, prompts, list(ordinals), tokenizer.eos_ids[0])
        texts = [tokenizer.decode(completion) for completion in completions]
        rewards = [
            [score(texts[g * samples + s], problem.answer, problem.prompt) for s in range(samples)]
            for g, problem in enumerate(problems)
        ]
        advantages = [reward - sum(group) / samples for group in rewards for reward in group]
        loss = aipo(model, config, prompts, completions, logprobs, advantages)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.trainer.lr * min(1, (update + 1) / config.trainer.warmup_updates)
        optimizer.step()
        hashes.append(weights_sha256(dict(model.named_parameters())))
    return hashes


@torch.inference_mode()
def generate(
    model: Transformer, config: Config, prompts: list[list[int]], ordinals: list[int], eos: int
) -> tuple[list[list[int]], list[list[float]]]:
    """All completions of an update side by side, one token at a time, until the last has ended."""
    samples, limit = config.schedule.samples_per_group, config.generator.max_new_tokens
    completions: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    length = config.generator.max_prompt_tokens + limit
    cache = KVCache(model.shape, len(prompts), length, dtype=torch.float32, device="cpu")
    slots = [[group * samples + sample for sample in range(samples)] for group in range(len(ordinals))]
    prefill(model, cache, prompts[::samples], slots)
    ordinals_B = torch.tensor([ordinal for ordinal in ordinals for _ in range(samples)])
    samples_B = torch.arange(samples).repeat(len(ordinals))
    temperatures_B = torch.full((len(prompts),), config.generator.temperature)
    tokens_B = torch.tensor([prompt[-1] for prompt in prompts])
    for position in range(limit):
        positions_B = torch.tensor([len(prompt) - 1 + position for prompt in prompts])
        draws_B = uniform_draws(config.seed, ordinals_B, samples_B, torch.full_like(samples_B, position))
        tokens_B, logprobs_B = decode_step(model, cache, tokens_B, positions_B, draws_B, temperatures_B)
        for row, completion in enumerate(completions):
            if eos not in completion:
                completion.append(int(tokens_B[row]))
                logprobs[row].append(float(logprobs_B[row]))
    return completions, logprobs


def aipo(
    model: Transformer,
    config: Config,
    prompts: list[list[int]],
    completions: list[list[int]],
    logprobs: list[list[float]],
    advantages: list[float],
) -> torch.Tensor:
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    tokens_BT = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    hidden_BTC = model(tokens_BT, torch.arange(width).expand(len(rows), -1), causal_attention)
    at = [(r, len(prompts[r]) - 1 + i) for r in range(len(rows)) for i in range(len(completions[r]))]
    rows_N, columns_N = torch.tensor(at).T
    logits_NV = model.logits(hidden_BTC[rows_N, columns_N]) / config.generator.temperature
    targets_N = torch.tensor([token for completion in completions for token in completion])
    tokens = TokenBatch(
        policy_logprobs_N=torch.log_softmax(logits_NV, -1).gather(1, targets_N[:, None])[:, 0],
        behavior_logprobs_N=torch.tensor([value for row in logprobs for value in row]),
        advantages_N=torch.tensor([advantages[row] for row, _ in at]),
        sequence_N=rows_N,
        num_tokens=len(at),
    )
    return aipo_loss(tokens, config.algo)[0]
