"""S = 0 is synchronous and on-policy: the whole machinery gives, bit for bit, what a loop of one page gives."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.builders import HASH_FILE, hashing_trainer, weights_sha256

from llamarl import Job
from llamarl.algo.batch import Document
from llamarl.algo.losses import aipo_loss
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.generate.attention import DecodeAttention, PrefillAttention
from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.sampling import sample_tokens, uniform_draws
from llamarl.model.checkpoint import load_model
from llamarl.model.rope import rope_up_to
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.transformer import Transformer, causal_attention, fuse
from llamarl.tasks.registry import make_task
from llamarl.tasks.scorers import exact
from llamarl.train.attention import MaskedDocuments
from llamarl.train.lm_head import Head, fused_loss
from llamarl.train.packing import make_packs

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
    "trainer.share_prompts=off",
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
    task, score = make_task(config.task, config.seed), exact
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
    model = deepcopy(model)
    fuse(model)  # as the generator computes: one product for what reads the same input
    samples, limit = config.schedule.samples_per_group, config.generator.max_new_tokens
    completions: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    page, width = config.generator.page_tokens, -(-(config.generator.max_prompt_tokens + limit) // 16)
    cache = PagedCache(model.shape, len(prompts) * width, page, dtype=torch.float32, device="cpu")
    table_BP = 1 + torch.arange(len(prompts) * width).view(-1, width)
    slots_B, rope = torch.arange(len(prompts)), rope_up_to(model.shape, width * page, "cpu")
    for row, prompt in enumerate(prompts):  # each by itself: nothing is shared here
        read_RT, pages_RT = torch.zeros(2, 16, 16, dtype=torch.int64)
        read_RT[0, : len(prompt) - 1] = torch.tensor(prompt[:-1])
        pages_RT[0, : len(prompt) - 1] = table_BP[row].repeat_interleave(page)[: len(prompt) - 1]
        model(read_RT, torch.arange(16).expand(16, 16), PrefillAttention(cache, pages_RT))
    ordinals_B = torch.tensor([ordinal for ordinal in ordinals for _ in range(samples)])
    samples_B = torch.arange(samples).repeat(len(ordinals))
    temperatures_B = torch.full((len(prompts),), config.generator.temperature)
    tokens_B = torch.tensor([prompt[-1] for prompt in prompts])
    for position in range(limit):
        positions_B = torch.tensor([len(prompt) - 1 + position for prompt in prompts])
        draws_B = uniform_draws(config.seed, ordinals_B, samples_B, torch.full_like(samples_B, position))
        attend = DecodeAttention(cache, table_BP, slots_B, positions_B, rope)
        hidden_B1C = model(tokens_B[:, None], positions_B[:, None], attend)
        tokens_B, logprobs_B = sample_tokens(model.logits(hidden_B1C[:, 0]), draws_B, {"temperature": temperatures_B})
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
    """Packed, as the trainer packs, since another order of sums rounds otherwise; and held against padded rows."""
    documents = [
        Document(
            tokens=np.array(prompt + completion, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            behavior_logprobs=np.array(behavior, dtype=np.float32),
            staleness=np.zeros(len(completion), dtype=np.int64),
            advantages=np.full(len(completion), advantage, dtype=np.float32),
        )
        for prompt, completion, behavior, advantage in zip(prompts, completions, logprobs, advantages, strict=True)
    ]
    (pack,) = make_packs(documents, config.trainer.tokens_per_pack, long_rows=False)
    hidden_RTC = model(pack.tokens_RT, pack.positions_RT, MaskedDocuments(pack))
    head, hidden_NC = Head(config.generator.temperature), hidden_RTC.flatten(0, 1).index_select(0, pack.at_N)

    def part_loss(part: slice, logprobs_n: torch.Tensor, entropy_n: torch.Tensor) -> torch.Tensor:
        tokens = pack.tokens(part, logprobs_n, entropy_n, num_tokens=pack.num_targets, num_sequences=len(documents))
        return aipo_loss(tokens, config.algo)[0]

    loss, *_ = fused_loss(hidden_NC, model.lm_head.weight, pack.targets_N, part_loss, head)
    padded = padded_aipo(model, config, prompts, completions, logprobs, advantages)
    assert loss.item() == pytest.approx(padded.item(), abs=1e-6)
    return loss


@torch.no_grad()
def padded_aipo(
    model: Transformer,
    config: Config,
    prompts: list[list[int]],
    completions: list[list[int]],
    logprobs: list[list[float]],
    advantages: list[float],
) -> torch.Tensor:
    """With nothing of the trainer's: one row each, padded on the right, log-softmax over all scores at once."""
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    tokens_BT = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    hidden_BTC = model(tokens_BT, torch.arange(width).expand(len(rows), -1), causal_attention)
    at = [(r, len(prompts[r]) - 1 + i) for r in range(len(rows)) for i in range(len(completions[r]))]
    rows_N, columns_N = torch.tensor(at).T
    logits_NV = model.logits(hidden_BTC[rows_N, columns_N]) / config.generator.temperature
    targets_N = torch.tensor([token for completion in completions for token in completion])
    policy_N = torch.log_softmax(logits_NV, -1).gather(1, targets_N[:, None])[:, 0]
    ratio_N = (policy_N - torch.tensor([value for row in logprobs for value in row])).exp()
    advantages_N = torch.tensor([advantages[row] for row, _ in at])
    return -(ratio_N.clamp(max=config.algo.rho) * advantages_N * policy_N).sum() / len(at)
