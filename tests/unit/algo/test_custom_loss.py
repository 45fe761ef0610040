"""A loss of the user's fails before anything starts, or at once, in one line that says where."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from llamarl.algo.custom_loss import guarded, try_loss
from llamarl.algo.losses import LOSSES, Loss, aipo_loss, gspo_loss, is_tokenwise, tokenwise
from llamarl.builders.loss import check_loss, make_loss
from llamarl.config import AlgoConfig
from llamarl.config.file import load_config
from llamarl.errors import ConfigError, OwnCodeFailed

BODIES = {
    "raise ValueError('no\\nluck')": "failed: ValueError: no luck (",
    "return tokens.nothing, {}": "failed: AttributeError: 'TokenBatch' object has no attribute 'nothing' (",
    "return tokens.policy_logprobs_N.sum()": "returned a tensor of shape (); it must return (loss, metrics)",
    "return None": "returned None; it must return (loss, metrics)",
    "return 0.5, {}": "returned a float for the loss; it must be a tensor",
    "return tokens.policy_logprobs_N, {}": "returned a loss of shape (9,); it must be one number",
    "return tokens.sequence_N.sum(), {}": "returned a loss of torch.int64",
    "return tokens.policy_logprobs_N.detach().sum(), {}": "returned a loss without a gradient",
    "return tokens.policy_logprobs_N.sum() / 0 * 0, {}": "returned nan for a small batch",
    "return tokens.policy_logprobs_N.mean(), {}": "gives -1.05 for three answers, and -2.",
    "a = tokens.advantages_N; return -((a - a.mean()) * tokens.policy_logprobs_N).sum() / tokens.num_tokens, {}": "gives ",
    "p = tokens.policy_logprobs_N; return (p - p.detach()).mean(), {}": "gives other gradients for three answers than",
    "p = tokens.policy_logprobs_N; return (p - p.detach()).abs().sqrt().sum(), {}": "has gradients that are no numbers",
    "d = tokens.behavior_logprobs_N.sub_(1); return (tokens.policy_logprobs_N * d).sum(), {}": "changes tokens.behavior_",
    "tokens.advantages_N.clamp_(0); return tokens.policy_logprobs_N.sum(), {}": "changes tokens.advantages_N in place",
    "return tokens.policy_logprobs_N.sum(), {'entropy': 1.0}": "returned the metric 'entropy', which every update has",
    "return tokens.policy_logprobs_N.sum(), None": "returned None for the metrics",
    "return tokens.policy_logprobs_N.sum(), {'x': tokens.advantages_N}": "returned the metric 'x' as a tensor of shape",
    "return tokens.policy_logprobs_N.sum(), {'x': 'much'}": "returned the metric 'x' as a str",
}


@pytest.mark.parametrize(("body", "told"), BODIES.items())
def test_a_loss_that_cannot_work_is_refused_before_anything_starts(tmp_path: Path, body: str, told: str) -> None:
    file = tmp_path / "my.py"
    file.write_text(f"def f(tokens, algo):\n    {body}\n")
    with pytest.raises(ConfigError) as refused:
        check_loss(load_config(None, [f"algo.loss={file}:f"]))
    assert str(refused.value).startswith(f"algo.loss: {file}:f {told}")
    if "failed" in told:
        assert str(refused.value).endswith("my.py:2)")


def test_a_loss_with_other_parameters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def f(tokens):\n    return 0\n")
    with pytest.raises(ConfigError, match=r"cannot be called with \(tokens, algo\): too many positional arguments"):
        make_loss(load_config(None, [f"algo.loss={tmp_path}/my.py:f"]))


def test_a_gradient_that_fails_is_refused_in_one_line() -> None:
    def loss(tokens, algo):  # type: ignore[no-untyped-def]
        ratio_N = tokens.ratio_N.exp()
        return ratio_N.sum() + 0 * ratio_N.mul_(2).sum(), {}

    with pytest.raises(ConfigError, match=r"^algo.loss: the gradient of aipo failed: RuntimeError: .*inplace"):
        try_loss(loss, AlgoConfig())


def test_a_loss_in_bfloat16_may_differ_by_rounding() -> None:
    def loss(tokens, algo):  # type: ignore[no-untyped-def]
        return -(tokens.advantages_N.bfloat16() * tokens.policy_logprobs_N.bfloat16()).sum() / tokens.num_tokens, {}

    try_loss(loss, AlgoConfig())


def test_columns_of_roles_that_are_not_there_yet_are_made_up() -> None:
    def loss(tokens, algo):  # type: ignore[no-untyped-def]
        return (tokens.policy_logprobs_N * tokens.columns["values"]).sum(), {"mean": tokens.columns["values"].mean()}

    try_loss(loss, AlgoConfig())


def test_a_guarded_loss_is_the_loss() -> None:
    for loss in (aipo_loss, gspo_loss):
        try_loss(loss, AlgoConfig())
        assert is_tokenwise(guarded(loss)) == is_tokenwise(loss)


def test_a_loss_over_whole_answers_is_not_tokenwise() -> None:
    try_loss(gspo_loss, AlgoConfig())
    with pytest.raises(
        ConfigError, match="cut inside an answer: its tokens depend on each other, so leave out @tokenwise"
    ):
        try_loss(tokenwise(partial(gspo_loss)), AlgoConfig())


@pytest.mark.parametrize("loss", LOSSES.values())
def test_our_own_losses_are_sums_of_their_parts(loss: Loss) -> None:
    try_loss(loss, AlgoConfig())


def test_a_loss_that_draws_numbers_is_not_held_to_a_sum() -> None:
    def loss(tokens, algo):  # type: ignore[no-untyped-def]
        return (tokens.policy_logprobs_N * torch.rand_like(tokens.policy_logprobs_N)).sum() / tokens.num_tokens, {}

    try_loss(loss, AlgoConfig())


def test_what_a_loss_raises_later_is_the_users_own_failure(tmp_path: Path) -> None:
    def loss(tokens, algo):  # type: ignore[no-untyped-def]
        raise KeyError("values")

    with pytest.raises(OwnCodeFailed, match=r"failed: KeyError: 'values' \(.*test_custom_loss\.py:\d+\)") as failed:
        guarded(loss)(None, AlgoConfig())  # type: ignore[arg-type]
    assert failed.value.exit_code == 3
    assert isinstance(failed.value.__cause__, KeyError)


def test_a_loss_needs_no_gradient_where_another_term_has_one() -> None:
    try_loss(lambda tokens, algo: (torch.zeros(()), {}), AlgoConfig(entropy=0.01))


@pytest.mark.parametrize("divisor", ["tokens.num_tokens", "(100 * tokens.num_sequences)", "1.0"])
@pytest.mark.parametrize("beside", ["algo.reference_kl=0.1", "algo.entropy=0.01", ""])
def test_a_sum_that_is_not_divided_is_told_beside_a_mean(tmp_path: Path, divisor: str, beside: str) -> None:
    """A KL term had the weight of one token in 3,000: the policy went 40 times as far as with a mean."""
    body = f"return -(tokens.advantages_N * tokens.policy_logprobs_N).sum() / {divisor}, {{}}"
    (tmp_path / "my.py").write_text(f"def f(tokens, algo):\n    {body}\n")
    notes = check_loss(load_config(None, [f"algo.loss={tmp_path}/my.py:f", *filter(None, [beside])]))
    assert len(notes) == (divisor == "1.0" and beside != "")
    assert all(note.startswith("NOTE: algo.loss: ") and beside.partition("=")[0] in note for note in notes)
