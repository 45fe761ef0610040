"""A naive implementation of training: one document at a time, plain log-softmax, the loss as in the paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from helpers.models import VOCABULARY, lively_model
from llamarl.algo.batch import Document, TokenBatch
from llamarl.algo.losses import Loss, aipo_loss, objective
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, Policy, parallelize_for

CPU = torch.device("cpu")


def make_document(rng: np.random.Generator, *, longest: int = 12, staleness: int = 2) -> Document:
    prompt, answer = int(rng.integers(1, 9)), int(rng.integers(1, longest + 1))
    return Document(
        tokens=rng.integers(0, VOCABULARY, prompt + answer).astype(np.int32),
        num_prompt_tokens=prompt,
        behavior_logprobs=rng.normal(-2.5, 1.0, answer).astype(np.float32),
        staleness=np.sort(rng.integers(0, staleness, answer))[::-1].copy(),
        advantages=np.full(answer, rng.normal(), dtype=np.float32),
    )


def make_test_documents(count: int, seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [make_document(rng) for _ in range(count)]


def cpu_learner(
    model: Transformer | None = None, loss: Loss = aipo_loss, algo: AlgoConfig | None = None, **computing: object
) -> Learner:
    how = ComputeSettings(CPU, torch.float32, **computing)  # type: ignore[arg-type]
    policy = Policy(model or lively_model(), how)
    parallelize_for(policy.model, how)
    return Learner(policy, loss, settings=TrainerConfig(lr=1e-3), algo=algo or AlgoConfig(), updates=10)


def one_by_one(
    model: Transformer, documents: Sequence[Document], loss: Loss = aipo_loss, algo: AlgoConfig | None = None
) -> Tensor:
    """The loss of an update, with each document on its own and all logits at once."""
    num_tokens, parts = sum(document.num_answer_tokens for document in documents), []
    for number, document in enumerate(documents):
        tokens_1T = torch.from_numpy(document.tokens.astype(np.int64))[None]
        hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], causal_attention)
        logits_nV = model.logits(hidden_1TC[0, document.num_prompt_tokens - 1 : -1])
        logprobs_nV = torch.log_softmax(logits_nV, dim=-1)
        answer_n = tokens_1T[0, document.num_prompt_tokens :]
        tokens = TokenBatch(
            policy_logprobs_N=logprobs_nV.gather(1, answer_n[:, None])[:, 0],
            behavior_logprobs_N=torch.from_numpy(document.behavior_logprobs),
            advantages_N=torch.from_numpy(document.advantages),
            sequence_N=torch.full(answer_n.shape, number),
            entropy_N=-(logprobs_nV.exp() * logprobs_nV).sum(-1),
            num_tokens=num_tokens,
            num_sequences=len(documents),
            columns={name: torch.from_numpy(column) for name, column in document.columns.items()},
        )
        parts.append(objective(loss, tokens, algo or AlgoConfig())[0])
    return torch.stack(parts).sum()


def naive_gradients(
    model: Transformer, documents: Sequence[Document], loss: Loss = aipo_loss, algo: AlgoConfig | None = None
) -> tuple[float, dict[str, Tensor]]:
    value = one_by_one(model, documents, loss, algo)
    value.backward()  # type: ignore[no-untyped-call]
    return value.item(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Assert that gradients agree to `tolerance`, or to that share of the largest entry if it is above 1."""
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= tolerance * max(1.0, grad.abs().max().item()), name
        assert grad.abs().max() > 1e-4, f"{name} has a gradient that could be wrong"
