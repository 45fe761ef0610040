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
from llamarl.tasks.verifiers.server import EnvironmentServer
from llamarl.tasks.workers.protocol import ServedEnvironment


def build_agents(context: BuildContext) -> Executor:
    config = context.config
    tokenizer = Tokenizer.load(config.model_folder, config.task.chat_options)
    limits = CallLimits(
        max_prompt_tokens=config.generator.max_prompt_tokens, max_new_tokens=config.generator.max_new_tokens
    )
    backend = CallBackend(tokenizer, served_name(config), limits)
    access = SessionAccess(tokenizer, max_calls=config.agent.max_calls)
    endpoint = SessionEndpoint(backend, access, ServeLimits(max_answers=min(128, config.generator.slots)))
    server = EnvironmentServer(config.task, config.agent.timeout_s) if config.task.env else None
    served = _served(config, server.wait_until_up()) if server else None
    runner = AgentRunner(config.agent, served)
    runner.prepare()
    return Agents(endpoint, runner, config.agent, context.log, server)


def _served(config: Config, address: str) -> ServedEnvironment:
    sampling = config.training_sampling
    folder = str(config.model_folder)
    return ServedEnvironment(address, folder, sampling.temperature, sampling.max_new_tokens)


def served_name(config: Config) -> str:
    """Name of the policy, as agents see it."""
    return config.model.path.rstrip("/").rpartition("/")[2] or config.model.path
