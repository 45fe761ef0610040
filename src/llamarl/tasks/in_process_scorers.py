"""Runs the user's own scorers in this process (`reward.trusted`): no process per answer, and time limits only for `async`.

Plain functions are called at once. Coroutines run concurrently on one event loop, which runs during `collect`.
"""

from __future__ import annotations

import asyncio
import bdb
import inspect
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from llamarl.config import RewardConfig
from llamarl.plugins import describe_error, format_traceback
from llamarl.tasks.custom_scorers import BadReward, Function, Signature, call, rewards_in, signature_of
from llamarl.tasks.failures import Counts
from llamarl.tasks.workers.protocol import Verdict

T = TypeVar("T")


class InProcessScorers(Generic[T]):
    """Calls trusted scorers. `context` is returned unchanged with the verdict. With `raises`, the exception of a plain
    function in its last attempt reaches the caller."""

    def __init__(self, functions: Mapping[str, Function], settings: RewardConfig, *, raises: bool = False) -> None:
        self._functions, self._settings, self._raises = dict(functions), settings, raises
        self.signatures = {name: signature_of(name, function) for name, function in functions.items()}
        self.counts = Counts()  # failed attempts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._running: dict[asyncio.Task[Verdict], T] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def ask(
        self, context: T, name: str, completions: Sequence[str], answer: str, prompt: str, columns: Mapping[str, Any]
    ) -> Verdict | None:
        """Return the verdict of a plain function, or None for a coroutine, whose verdict `collect` returns."""
        function, signature = self._functions[name], self.signatures[name]

        def attempt() -> Any:
            return call(function, signature, completions, answer, prompt, columns)

        if signature.is_async:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                weakref.finalize(self, self._loop.close)
            task = self._loop.create_task(self._judge_async(attempt, signature, len(completions)))
            self._running[task] = context
            return None
        return self._judge(attempt, signature, len(completions))

    def collect(self, wait_s: float) -> list[tuple[T, Verdict]]:
        """Return finished verdicts, after waiting at most `wait_s` for one."""
        if not self._running or self._loop is None:
            return []
        waiting = asyncio.wait(self._running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        done, _ = _run(self._loop, waiting)
        return [(self._running.pop(task), task.result()) for task in done]

    def close(self) -> None:
        if self._loop is None:
            return
        for task in self._running:
            task.cancel()
        if self._running:
            _run(self._loop, asyncio.wait(self._running, timeout=1.0))
        self._running.clear()
        self._loop.close()
        self._loop = None

    def _judge(self, attempt: Callable[[], Any], signature: Signature, count: int) -> Verdict:
        start_s = time.monotonic()
        for number in range(self._settings.retries + 1):
            try:
                verdict = Verdict("ok", rewards_in(attempt(), signature, count))
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                if self._raises and number == self._settings.retries and not isinstance(error, BadReward):
                    raise
                verdict = failure(error)
            if verdict.status == "ok":
                break
            self.counts.add(verdict.status)
        return replace(verdict, seconds=time.monotonic() - start_s)

    async def _judge_async(self, attempt: Callable[[], Any], signature: Signature, count: int) -> Verdict:
        for _ in range(self._settings.retries + 1):
            async with self._slots:
                verdict = await timed(attempt, signature, count, self._settings.timeout_s)
            if verdict.status == "ok":
                break
            self.counts.add(verdict.status)
        return verdict


async def timed(
    attempt: Callable[[], Any], signature: Signature, count: int, limit_s: float, share: float = 1.0
) -> Verdict:
    """Run one attempt of a coroutine, and cancel it after this share of the time limit."""
    start_s, limit = time.monotonic(), asyncio.timeout(share * limit_s)
    try:
        async with limit:
            returned = attempt()
            verdict = Verdict(
                "ok", rewards_in(await returned if inspect.isawaitable(returned) else returned, signature, count)
            )
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        late = isinstance(error, TimeoutError) and limit.expired()
        verdict = Verdict("timeout", reason=f"took longer than {limit_s:g} s") if late else failure(error)
    return replace(verdict, seconds=time.monotonic() - start_s)


def failure(error: BaseException, who: str = "scorer") -> Verdict:
    """Return a failed verdict with the message and traceback of an exception."""
    if isinstance(error, bdb.BdbQuit):
        raise error  # the user has left the debugger
    if isinstance(error, BadReward):
        return Verdict("error", reason=str(error))
    if isinstance(error, MemoryError):
        return Verdict("error", reason=f"{who} failed: it used up its memory")
    return Verdict("error", reason=f"{who} failed: {describe_error(error)}", trace=format_traceback(error))


def _run(loop: asyncio.AbstractEventLoop, waiting: Any) -> Any:
    """Run on this thread, so that debuggers work, unless it already runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
        busy = True
    except RuntimeError:
        busy = False
    if not busy:
        return loop.run_until_complete(waiting)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(loop.run_until_complete, waiting).result()
