"""Compiles a trainer's passes before its first batch is there, while the generators sample it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from llamarl.algo.batch import Document
from llamarl.plan.trainer import LEAST_SHARED
from llamarl.routes import RouteFormat
from llamarl.train.learner import Learner
from llamarl.train.lm_head import fused_loss
from llamarl.train.speed import measured_tflops

_ANSWERS = 4  # to one prompt
_PROMPTS = 2  # of every rank; a graph for one alone would not serve several
_TOKENS = 128  # of a prompt and of an answer, unless they are shorter: one compiled graph serves all lengths


@dataclass(frozen=True)
class WarmUp:
    """Runs passes on made-up documents, forward and backward, and drops their gradients: weights, optimizer state and metrics
    stay as they are, bit for bit. With `probes`, also the pass that measures a probe."""

    learner: Learner
    max_prompt_tokens: int
    max_new_tokens: int
    probes: bool = False
    samples: int = 1  # answers to a prompt

    def __call__(self) -> None:
        policy, how = self.learner.policy, self.learner.policy.computing
        documents = self._documents(policy.model.shape.vocab_size, policy.route_format)
        for pack in policy.packs(documents):
            here = pack.to(how.device)
            routing = policy.route_sums()
            hidden_NC = policy.hidden(here, routing)
            loss, _, _ = fused_loss(hidden_NC, policy.head_weight, here.targets_N, _nothing, policy.head)
            if routing is not None and routing.balances:
                loss = loss + routing.take_balance() * 0.0
            loss.backward()  # type: ignore[no-untyped-call]
        self.learner.optimizer.zero_grad()
        self.learner.optimizer.warm_up()
        if self.probes:
            for pack in policy.packs(documents[:1], same_everywhere=True):
                policy.logprobs(pack, policy.route_sums())
                if policy.route_format is not None:
                    policy.without_replay().logprobs(pack)
        policy.cudnn_tokens = 0
        measured_tflops(how.device, how.dtype)

    def _documents(self, vocab_size: int, routes: RouteFormat | None = None) -> list[Document]:
        """Documents of different lengths, some for every rank. They have prompts in common, and packs share these, where a
        job's will: with several answers to a prompt, and a limit that is well above the shortest prompts that are shared."""
        ranks = self.learner.policy.computing.mesh.batch_ranks
        alike = _ANSWERS if self.samples > 1 and self.max_prompt_tokens >= 2 * LEAST_SHARED else 1
        prompt, answer = min(_TOKENS, self.max_prompt_tokens), min(_TOKENS, self.max_new_tokens)
        return [
            _document(prompt, max(1, answer - number % _ANSWERS), (number // alike, number), vocab_size, routes)
            for number in range(_PROMPTS * _ANSWERS * ranks)
        ]


def _nothing(part: slice, logprobs_n: Tensor, entropy_n: Tensor) -> Tensor:
    """A loss whose gradient is zero."""
    return (logprobs_n + entropy_n).sum() * 0.0


def _document(
    prompt: int, answer: int, first: tuple[int, int], vocab_size: int, routes: RouteFormat | None
) -> Document:
    """`first`: the first token of prompt and answer."""
    tokens = np.concatenate([np.arange(prompt) + first[0], np.arange(answer) + first[1]]) % vocab_size
    tokens = tokens.astype(np.int32)
    nothing = np.zeros(answer, dtype=np.float32)
    rows = None if routes is None else np.tile(routes.first_experts, (prompt + answer - 1, 1))
    return Document(tokens, prompt, nothing, np.zeros(answer, dtype=np.int64), nothing, routes=rows)
