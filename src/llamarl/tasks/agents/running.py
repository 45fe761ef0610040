"""Runs agents inside a worker's child: a function, a class, an environment or a command, several at the same time."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec

from llamarl.config import AgentConfig
from llamarl.errors import ConfigError
from llamarl.plugins import check_call, load_function
from llamarl.tasks.agents.calling import AgentFailed, awaited, is_number
from llamarl.tasks.agents.client import AgentClient
from llamarl.tasks.agents.environment import load_environment
from llamarl.tasks.in_process_scorers import failure
from llamarl.tasks.verifiers.bridge import VERIFIERS, load_bridge
from llamarl.tasks.workers.protocol import AgentItem, ServedEnvironment, Verdict
from llamarl.types import Problem

Agent = Callable[[Problem, AgentClient], Awaitable[Any]]
_THREADS_EACH = 4
REWARD = "reward"  # the key of a returned dict that holds the reward


def load_agent(settings: AgentConfig, served: ServedEnvironment | None = None) -> Agent:
    """The agent that the config names. Raises ConfigError if it cannot be loaded."""
    if settings.environment == VERIFIERS:
        return load_bridge(served)
    if settings.environment:
        return load_environment(settings)
    if settings.command:
        return lambda problem, client: _run_command(settings.command, problem, client)
    made: Any = load_function("agent.run", settings.run)
    if inspect.isclass(made):
        made = _method_of(made, settings.run)
    check_call("agent.run", settings.run, made, ("problem", "client"))
    return lambda problem, client: awaited(made, problem, client)


def _method_of(made: type, reference: str) -> Callable[..., Any]:
    """A new object for every sample, so that samples share no state."""
    if not callable(getattr(made, "run", None)):
        raise ConfigError(f"agent.run: the class {reference} has no method run(problem, client)")
    return lambda problem, client: made().run(problem, client)


def run_agents(agent: Agent, items: Sequence[AgentItem], settings: AgentConfig) -> Verdict:
    """Run all of them at the same time; each has a verdict of its own, and late ones are cancelled. The loop is not closed:
    threads that never end would keep it waiting, and the process ends anyway."""

    async def each() -> list[Verdict]:
        threads = ThreadPoolExecutor(_THREADS_EACH * len(items))  # no agent waits for the threads of another
        asyncio.get_running_loop().set_default_executor(threads)
        return await asyncio.gather(*(_run_one(agent, item, settings) for item in items))

    return Verdict("ok", each=tuple(asyncio.new_event_loop().run_until_complete(each())))


async def _run_one(agent: Agent, item: AgentItem, settings: AgentConfig) -> Verdict:
    start_s, limit = time.monotonic(), asyncio.timeout(settings.timeout_s)
    try:
        async with limit:
            problem = msgspec.json.decode(item.problem, type=Problem)
            verdict = _verdict(await agent(problem, AgentClient(item.url, item.api_key, item.model)))
    except AgentFailed as error:
        verdict = Verdict("error", reason=f"agent {error}")
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        late = isinstance(error, TimeoutError) and limit.expired()
        verdict = failure(error, "agent")
        if late:
            verdict = Verdict("timeout", reason=f"took longer than agent.timeout_s={settings.timeout_s:g}")
    return msgspec.structs.replace(verdict, seconds=time.monotonic() - start_s)


def _verdict(returned: Any) -> Verdict:
    """The reward that an agent returned, if any: a number, or a dict with `reward` and further numbers to record."""
    if returned is None or isinstance(returned, Verdict):
        return returned or Verdict("ok")
    parts: dict[str, float] = {}
    if isinstance(returned, Mapping):
        parts = {str(name): float(value) for name, value in returned.items() if is_number(value) and name != REWARD}
        if returned.get(REWARD) is None:
            return Verdict("ok", parts=parts)
        returned = returned[REWARD]
    if not is_number(returned):
        raise AgentFailed(f"gave {type(returned).__name__} as its reward; it must give a finite number, or None")
    return Verdict("ok", (float(returned),), parts=parts)


async def _run_command(command: Sequence[str], problem: Problem, client: AgentClient) -> Any:
    """The command reads the problem as JSON, and may say its reward in its last line. Any exit code but 0 is a failure."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**os.environ, **client.environment}, process_group=0
    )
    try:
        said, complained = await process.communicate(msgspec.json.encode(problem))
    finally:
        _kill_group(process)
    if process.returncode:
        last = complained.decode(errors="replace").strip().splitlines()[-1:]
        raise AgentFailed(f"ended with exit code {process.returncode}{': ' + last[0] if last else ''}")
    lines = said.decode(errors="replace").strip().splitlines()
    return _reward_in(lines[-1]) if lines else None


def _kill_group(process: Process) -> None:
    """End whatever the command has started and left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _reward_in(line: str) -> Any:
    """A last line that is a number or a JSON object with `reward`; None for any other text, which is no reward."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if is_number(found) or isinstance(found, dict) else None
