"""Builds a reward executor: the judge and its tokenizer."""

from __future__ import annotations

from llamarl.builders.context import BuildContext
from llamarl.executors.executor import Executor
from llamarl.executors.reward import Reward
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.judge import Judge
from llamarl.tasks.registry import own_scorers


def build_reward(context: BuildContext) -> Executor:
    config = context.config
    judge = Judge.of(config, own_scorers(config.task), given=context.given)
    judge.prepare()
    return Reward(
        Tokenizer.load(config.model_folder),
        judge,
        judged=config.conversation.judge,
        max_failure_share=config.reward.max_failure_share,
        deterministic=config.schedule.deterministic,
        log=context.log,
    )
