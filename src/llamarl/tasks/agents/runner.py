"""Runs agents in worker processes and collects how they ended. One process runs the agents of one group at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from llamarl.config import AgentConfig
from llamarl.tasks.agents.client import AgentClient
from llamarl.tasks.workers.pool import WorkerPool
from llamarl.tasks.workers.protocol import KILL_SHARE, AgentItem, ServedEnvironment, Setup, Verdict, WorkRequest
from llamarl.types import Problem

_LEAST_GRACE_S = 1.0  # for starting the process, and for writing its verdict


class AgentRunner:
    """Starts agents and returns one verdict for each. A process that dies fails all agents in it."""

    def __init__(self, settings: AgentConfig, served: ServedEnvironment | None = None) -> None:
        # The agents have the whole limit; a process that outlasts it by a little is killed, with all agents in it.
        patience_s = max(settings.timeout_s / KILL_SHARE, settings.timeout_s + _LEAST_GRACE_S) / KILL_SHARE
        setup = Setup((), "", patience_s, settings.memory_mb, agent=settings, served=served)
        self._pool = WorkerPool(setup, settings.workers)
        self._running: dict[int, tuple[Hashable, ...]] = {}
        self._next_ticket = 0

    def prepare(self) -> None:
        """Wait for the workers. Raises ConfigError if the agent cannot be loaded."""
        self._pool.wait_until_up()

    @property
    def has_tools(self) -> bool:
        """Whether the environment shows tools to the model; known once it is prepared."""
        return self._pool.has_tools

    def start(self, keys: Sequence[Hashable], problem: Problem, clients: Sequence[AgentClient]) -> None:
        """Run one agent for each key, all in one process."""
        encoded = msgspec.json.encode(problem)
        items = tuple(AgentItem(encoded, client.url, client.api_key, client.model) for client in clients)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._running[ticket] = tuple(keys)
        self._pool.submit(ticket, WorkRequest((), agents=items))

    def collect(self, wait_s: float) -> list[tuple[Hashable, Verdict]]:
        """Return how agents ended, after waiting at most `wait_s` for one."""
        ended: list[tuple[Hashable, Verdict]] = []
        for ticket, verdict in self._pool.collect(wait_s) if self._running else ():
            keys = self._running.pop(ticket)
            each = verdict.each if verdict.status == "ok" else [verdict] * len(keys)
            ended += zip(keys, each, strict=True)
        return ended

    def close(self) -> None:
        self._pool.close()
