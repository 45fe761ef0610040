"""Whether the task can be asked and judged: the scorer is tried on its first problem, the tool is loaded once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from llamarl.config import Config
from llamarl.engine.prompts import Prompts, teacher_of
from llamarl.engine.rows import DataRows
from llamarl.errors import ConfigError, LlamaRLError, ModelError
from llamarl.generate.prompting import check_chat_options, reply_tokens
from llamarl.model.tokenizer import Tokenizer
from llamarl.plugins import describe_error
from llamarl.serve.endpoint import load_server
from llamarl.serve.tool_calls import tool_form
from llamarl.tasks.agents.runner import AgentRunner
from llamarl.tasks.custom_scorers import ScorerRequirements
from llamarl.tasks.judge import Judge
from llamarl.tasks.mixture import Mixture
from llamarl.tasks.registry import make_task, own_scorers
from llamarl.tasks.task import Prompter, Task
from llamarl.tasks.tools.client import ToolClient
from llamarl.types import Problem

_TRIED = 2  # answers, since a scorer of all answers to a prompt must give a reward to each
EVERY_COLUMN = ScorerRequirements(everything=True, answer=False)  # agents see whole rows of the data


def prepare_prompts(
    config: Config,
    tokenizer: Tokenizer,
    given: Mapping[str, Callable[..., Any]],
    task: Prompter | None,
    rows: DataRows | None = None,
) -> Prompts:
    """The job's prompts. A scorer that fails on a task's own answer is refused: it would fail on every group. Agents that
    give their own rewards need none."""
    if config.agent and config.agent.reward == "agent":
        return Prompts(task or make_task(config.task, config.seed, EVERY_COLUMN), tokenizer, config)
    judge = Judge.of(config, own_scorers(config.task), workers=1, given=given)
    try:
        judge.prepare()
        found = task or make_task(config.task, config.seed, with_column(judge.wanted, config.teacher.column))
        check_named_teachers(config, found)
        prompts = Prompts(found, tokenizer, config, rows)
        problem = prompts.problem(0)
        check_chat_options(config.task, problem)
        outcomes = judge.score_all([problem.answer] * _TRIED, problem)
    except LlamaRLError:
        raise
    except Exception as error:  # raised by a trusted function, on `inline`
        told = describe_error(error)
        raise ConfigError(f"reward.scorer: fails on the first problem's own answer: {told}") from error
    finally:
        judge.close()
    for outcome in outcomes:
        if outcome.status != "ok":
            told = f"{problem.answer!r}: {outcome.reason}"
            raise ConfigError(f"reward.scorer: fails on the first problem's own answer {told}")
    return prompts


def with_column(wanted: ScorerRequirements, column: str) -> ScorerRequirements:
    """The same needs, and one column more, where rows have it."""
    return replace(wanted, optional=wanted.optional | {column}) if column else wanted


def check_named_teachers(config: Config, task: Prompter) -> None:
    """Refuse rows that name a teacher which is not there."""
    if not config.teacher.column:
        return
    if not isinstance(task, Task | Mixture):
        raise ConfigError("teacher.column: a task given from Python has no columns; set Problem.teacher there")
    for part, size in enumerate(task.sizes):
        for number in range(size):
            name = teacher_of(task.numbered(part, number), config.teacher)
            if name and name not in config.teacher.by_name:
                known = ", ".join(config.teacher.by_name)
                raise ConfigError(f"teacher.column: a row names '{name}', but teacher.by_name has only {known}")


def check_tool(config: Config, tokenizer: Tokenizer, problem: Problem) -> None:
    """Refuse a tool that cannot be loaded, has no sandbox to run in, or whose replies the chat template does not take."""
    settings = config.conversation
    if not settings.tool:
        return
    try:
        reply_tokens(tokenizer, problem, settings, "a reply")
    except ModelError as error:
        raise ConfigError(f"conversation.role: {settings.role} cannot reply in this model's chats: {error}") from None
    client = ToolClient(replace(settings, workers=1), config.sandbox)
    try:
        client.prepare()
    finally:
        client.close()


def check_agent(config: Config, tokenizer: Tokenizer) -> None:
    """Refuse an agent that cannot be loaded, an installation that cannot serve it, or a model that cannot call its tools."""
    if not config.agent:
        return
    load_server()
    if config.agent.command and shutil.which(config.agent.command[0]) is None:
        raise ConfigError(f"agent.command: no program {config.agent.command[0]}")
    runner = AgentRunner(replace(config.agent, workers=1))
    try:
        runner.prepare()
        if runner.has_tools and tool_form(tokenizer.chat_source) is None:
            raise ConfigError(
                "agent.environment: its methods are tools, but the model's chat template takes none; give it step(text)"
            )
    finally:
        runner.close()
