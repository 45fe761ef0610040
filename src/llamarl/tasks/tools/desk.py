"""Where turns are handed in and replies come out: from the tool on the spot, or from a pool of workers.

A reply is text, or the end of the conversation, or a failure of the tool: a time-out or a crash, which is tried again, then
reported as such, and never told to the model as if it had done something wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from llamarl.config import Conversation, Sandbox
from llamarl.tasks.failures import Counts
from llamarl.tasks.tools.tools import IN_PROCESS, Tool, load_tool
from llamarl.tasks.workers.pool import Pool
from llamarl.tasks.workers.wire import Ask, Call, Setup, Status, Verdict, pack_turns, unpack_text
from llamarl.types import Turn


class Reply(Struct, frozen=True):
    """`text` counts only where the status is ok; None ends the conversation."""

    status: Status
    text: str | None = None
    reason: str = ""


@dataclass
class _Case:
    key: Hashable
    ask: Ask
    tries_left: int


class Desk:
    def __init__(self, settings: Conversation, sandbox: Sandbox) -> None:
        self._settings, self._sandbox = settings, sandbox
        self.counts = Counts()
        self._tool: Tool | None = load_tool(settings, sandbox) if settings.tool in IN_PROCESS else None
        self._pool: Pool | None = None
        self._cases: dict[int, _Case] = {}
        self._next_ticket = 0
        self._done: list[tuple[Hashable, Reply]] = []

    @property
    def num_pending(self) -> int:
        return len(self._cases) + len(self._done)

    def prepare(self) -> None:
        """Start the workers, so that what cannot be loaded shows now."""
        if self._tool is None:
            self._open_pool().wait_until_up()

    def ask(self, key: Hashable, said: str, turns: Sequence[Turn]) -> None:
        """The reply comes out of `collect` under this key."""
        if self._tool is not None:
            self._finish(key, Reply("ok", self._tool(said, turns)))
        else:
            call = Call(said.encode("utf-8", "surrogatepass"), pack_turns(turns))
            self._submit(_Case(key, Ask((), call), self._settings.retries))

    def collect(self, wait_s: float = 0.0) -> list[tuple[Hashable, Reply]]:
        """Replies so far, waiting at most this long for one."""
        if self._cases and self._pool:
            for ticket, verdict in self._pool.collect(0.0 if self._done else wait_s):
                self._hear(self._cases.pop(ticket), verdict)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        if self._pool:
            self._pool.close()

    def _open_pool(self) -> Pool:
        if self._pool is None:
            settings, running_s = self._settings, self._sandbox.wall_s if self._settings.tool == "python" else 0.0
            setup = Setup(
                (),
                "",
                settings.timeout_s + running_s,
                settings.memory_mb,
                sandbox=self._sandbox,
                conversation=settings,
            )
            self._pool = Pool(setup, settings.workers)
        return self._pool

    def _submit(self, case: _Case) -> None:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._cases[ticket] = case
        self._open_pool().submit(ticket, case.ask)

    def _hear(self, case: _Case, verdict: Verdict) -> None:
        self.counts.add(verdict.status)
        if verdict.status != "ok" and case.tries_left:
            case.tries_left -= 1
            self._submit(case)
        elif verdict.status != "ok":
            self._finish(case.key, Reply(verdict.status, None, verdict.reason))
        else:
            self._finish(case.key, Reply("ok", None if verdict.reply is None else unpack_text(verdict.reply)))

    def _finish(self, key: Hashable, reply: Reply) -> None:
        """A reply that is too long is cut, and says so."""
        limit = self._settings.max_reply_chars
        if reply.text is not None and len(reply.text) > limit:
            reply = Reply("ok", f"{reply.text[:limit]} ... (cut off)")
        self._done.append((key, reply))
