"""A reference policy adds what it makes of every answer token, wherever its weights lie, and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from helpers.groups import completion, rollout_group
from helpers.models import lively_model
from helpers.training import CPU
from torch import Tensor

from llamarl.algo.losses import REFERENCE_LOGPROBS
from llamarl.executors.reference import Reference
from llamarl.messages import BatchResult, SaveState, StateSaved, WorkOnBatch
from llamarl.model.transformer import causal_attention
from llamarl.train.policy import ComputeSettings, Policy
from llamarl.train.reference import HostedReference, add_reference_column
from llamarl.types import RolloutGroup, bytes_to_floats, bytes_to_tokens

GROUPS = [
    rollout_group([1, 2, 3], [(completion([4, 5]), 1.0), (completion([6, 7, 8, 9]), 0.0)], ordinal=0),
    rollout_group([10], [(completion([11]), 0.0), (completion([12, 13, 14]), 0.5)], ordinal=1),
]


def make_policy(tokens_per_pack: int = 100) -> Policy:
    return Policy(lively_model(), ComputeSettings(CPU, torch.float32, tokens_per_pack=tokens_per_pack))


@torch.no_grad()
def plain_logprobs(group: RolloutGroup, index: int) -> Tensor:
    model, prompt = lively_model(), bytes_to_tokens(group.prompt.prompt_tokens).tolist()
    answer = bytes_to_tokens(group.rollouts[index].completion.tokens).tolist()
    tokens = torch.tensor([prompt + answer])
    hidden = model(tokens, torch.arange(tokens.shape[1])[None], causal_attention)[0, len(prompt) - 1 : -1]
    return torch.log_softmax(model.logits(hidden), -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("tokens_per_pack", [100, 16])
@pytest.mark.parametrize("hosted", [False, True])
def test_the_column_is_the_references_own_logprobs_and_the_rest_stays(tokens_per_pack: int, hosted: bool) -> None:
    policy = make_policy(tokens_per_pack)
    found = HostedReference(policy).add_column(GROUPS) if hosted else add_reference_column(policy, GROUPS)
    for group, before in zip(found, GROUPS, strict=True):
        assert (group.prompt, group.rewards) == (before.prompt, before.rewards)
        for index, rollout in enumerate(group.rollouts):
            assert rollout.completion == before.rollouts[index].completion
            column = torch.from_numpy(bytes_to_floats(rollout.columns[REFERENCE_LOGPROBS]).copy())
            assert torch.allclose(column, plain_logprobs(before, index), atol=1e-5)


def test_the_executor_answers_a_batch_with_its_groups_and_has_nothing_to_save() -> None:
    reference = Reference(make_policy())
    (answer,) = reference.handle(WorkOnBatch(3, tuple(GROUPS)))
    assert isinstance(answer, BatchResult)
    assert (answer.update, len(answer.groups)) == (3, 2)
    assert list(reference.handle(SaveState(3, "anywhere"))) == [StateSaved(3, {})]
    (nothing,) = reference.handle(WorkOnBatch(4, ()))
    assert isinstance(nothing, BatchResult) and nothing.groups == ()
