"""A worker pool that retries failed requests and returns each request once, with its verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec.structs import replace

from llamarl.tasks.custom_scorers import Signature
from llamarl.tasks.failures import Counts
from llamarl.tasks.workers.pool import WorkerPool
from llamarl.tasks.workers.protocol import Setup, Verdict, WorkRequest

T = TypeVar("T")


@dataclass
class _Pending(Generic[T]):
    context: T
    request: WorkRequest
    tries_left: int
    seconds: float = 0.0  # time spent on all attempts, without waiting for a worker


class RetryingPool(Generic[T]):
    """Retries failed requests. `context` is returned with the verdict unchanged. Workers start on first use."""

    def __init__(self, setup: Callable[[], Setup], workers: int, retries: int) -> None:
        self._setup, self._workers, self._retries = setup, workers, retries
        self.counts = Counts()  # failed attempts
        self._pool: WorkerPool | None = None
        self._pending: dict[int, _Pending[T]] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._pool.pids if self._pool else ()

    def prepare(self) -> None:
        """Start the workers. Raises ConfigError if they cannot load their scorers or tool."""
        self._open_pool().wait_until_up()

    @property
    def signatures(self) -> dict[str, Signature]:
        """How the user's own scorers are called; known once workers are up."""
        return self._pool.signatures if self._pool else {}

    def send(self, context: T, request: WorkRequest, retries: int | None = None) -> None:
        """Submit a request, with the default number of retries or another."""
        self._submit(_Pending(context, request, self._retries if retries is None else retries))

    def collect(self, wait_s: float) -> list[tuple[T, WorkRequest, Verdict]]:
        """Return finished requests, after waiting at most `wait_s` for one. The seconds of a verdict include all attempts."""
        finished: list[tuple[T, WorkRequest, Verdict]] = []
        for ticket, verdict in self._pool.collect(wait_s) if self._pending and self._pool else ():
            pending = self._pending.pop(ticket)
            self.counts.add(verdict.status)
            pending.seconds += verdict.seconds
            if verdict.status != "ok" and pending.tries_left:
                pending.tries_left -= 1
                self._submit(pending)
            else:
                finished.append((pending.context, pending.request, replace(verdict, seconds=pending.seconds)))
        return finished

    def close(self) -> None:
        if self._pool:
            self._pool.close()

    def _open_pool(self) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(self._setup(), self._workers)
        return self._pool

    def _submit(self, pending: _Pending[T]) -> None:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._pending[ticket] = pending
        self._open_pool().submit(ticket, pending.request)
