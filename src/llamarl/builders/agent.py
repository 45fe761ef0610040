"""Builds the executor that runs agents: the endpoint they talk to, and the processes they run in."""

from __future__ import annotations

from llamarl.builders.context import BuildContext
from llamarl.config import Config
from llamarl.executors.agent import Agents
from llamarl.executors.executor import Executor
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.call_backend import CallBackend, CallLimits
from llamarl.serve.endpoint import SessionEndpoint
from llamarl.serve.limits import ServeLimits
from llamarl.serve.session_access import SessionAccess
from llamarl.tasks.agents.runner import AgentRunner


def build_agents(context: BuildContext) -> Executor:
    config = context.config
    tokenizer = Tokenizer.load(config.model_folder, config.task.chat_options)
    limits = CallLimits(
        max_prompt_tokens=config.generator.max_prompt_tokens, max_new_tokens=config.generator.max_new_tokens
    )
    backend = CallBackend(tokenizer, served_name(config), limits)
    access = SessionAccess(tokenizer, max_calls=config.agent.max_calls)
    endpoint = SessionEndpoint(backend, access, ServeLimits(max_answers=min(128, config.generator.slots)))
    runner = AgentRunner(config.agent)
    runner.prepare()
    return Agents(endpoint, runner, config.agent, context.log)


def served_name(config: Config) -> str:
    """Name of the policy, as agents see it."""
    return config.model.path.rstrip("/").rpartition("/")[2] or config.model.path
