"""A loss of one's own that cannot work is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cli import llamarl

from llamarl.algo.losses import LOSSES
from llamarl.algo.trial import try_loss
from llamarl.config import Algo
from llamarl.plugins import load_function

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_loss.py"


@pytest.mark.parametrize("name", LOSSES)
def test_our_own_losses_pass(name: str) -> None:
    try_loss(LOSSES[name], Algo())


def test_the_example_and_one_that_reads_columns_of_other_roles_pass(tmp_path: Path) -> None:
    try_loss(load_function("algo.loss", f"{EXAMPLE}:ppo_clip"), Algo())
    file = tmp_path / "mine.py"
    file.write_text(
        "def loss(tokens, algo):\n"
        "    value = tokens.columns['critic'] if 'critic' in tokens.columns else 0\n"
        "    return (tokens.policy_logprobs_N * value).sum() / tokens.num_tokens, {'mean': 1.0}\n"
    )
    try_loss(load_function("algo.loss", f"{file}:loss"), Algo())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return tokens.policy_logprobs_N.sum()", "must return a loss and a dict of metrics, returns a tensor"),
        ("return 1.0", "must return a loss and a dict of metrics, returns a float"),
        ("pass", "must return a loss and a dict of metrics, returns nothing"),
        ("return tokens.policy_logprobs_N, {}", "must be a scalar tensor that carries the gradient"),
        ("return tokens.advantages_N.sum(), {}", "without a gradient"),
        ("return 0.5, {}", "is a float"),
        ("return tokens.policy_logprobs_N.sum(), {'x': 'y'}", "the metric 'x' must be a number"),
        ("return tokens.logprobs.sum(), {}", "fails on a trial batch: AttributeError"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"def loss(tokens, algo):\n    {body}\n")
    code, out, err = llamarl("train", f"algo.loss={tmp_path}/mine.py:loss", "--run", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.startswith("llamarl: algo.loss: ") and err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "run").exists()


def test_a_function_of_other_arguments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(tokens):\n    return tokens.policy_logprobs_N.sum(), {}\n")
    assert "takes 1 positional argument but 2 were given" in llamarl("train", f"algo.loss={tmp_path}/mine.py:loss").err
