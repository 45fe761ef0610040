"""The client of a tool: sends it turns and collects replies, from this process or from a pool of workers.

A reply is text, the end of the conversation, or a failure of the tool (a time-out or a crash). A failure is retried, then
reported as a failure, and never shown to the model as its own mistake.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from msgspec import Struct

from llamarl.config import ConversationConfig, SandboxConfig
from llamarl.tasks.failures import Counts
from llamarl.tasks.tools.registry import IN_PROCESS, Tool, load_tool
from llamarl.tasks.workers.protocol import (
    KILL_SHARE,
    Call,
    Setup,
    Status,
    Verdict,
    WorkRequest,
    pack_text,
    pack_turns,
    unpack_text,
)
from llamarl.tasks.workers.retrying_pool import RetryingPool
from llamarl.types import Turn


class Reply(Struct, frozen=True):
    """A tool's reply. `text` is valid only if the status is ok; None ends the conversation."""

    status: Status
    text: str | None = None
    reason: str = ""
    trace: str = ""  # traceback of an exception in the user's own tool


class ToolClient:
    """Sends turns to one tool and collects its replies."""

    def __init__(self, settings: ConversationConfig, sandbox: SandboxConfig) -> None:
        self._settings, self._sandbox = settings, sandbox
        self._tool: Tool | None = load_tool(settings, sandbox) if settings.tool in IN_PROCESS else None
        self._pool: RetryingPool[Hashable] = RetryingPool(self._setup, settings.workers, settings.retries)
        self._done: list[tuple[Hashable, Reply]] = []

    @property
    def num_pending(self) -> int:
        return len(self._pool) + len(self._done)

    def prepare(self) -> None:
        """Start the workers, so that a tool that cannot be loaded fails now."""
        if self._tool is None:
            self._pool.prepare()

    def ask(self, key: Hashable, said: str, turns: Sequence[Turn]) -> None:
        """Send a turn to the tool; `collect` returns the reply under this key."""
        if self._tool is not None:
            self._done.append((key, self._limited(self._tool(said, turns))))
        else:
            self._pool.send(key, WorkRequest((), Call(pack_text(said), pack_turns(turns))))

    def collect(self, wait_s: float = 0.0) -> list[tuple[Hashable, Reply]]:
        """Return the replies that have arrived, after waiting at most `wait_s` for one."""
        finished = self._pool.collect(0.0 if self._done else wait_s)
        done, self._done = self._done, []
        return [*done, *((key, self._reply(verdict)) for key, _, verdict in finished)]

    def take_counts(self) -> Counts:
        """Return and reset the counts of failed attempts."""
        counts, self._pool.counts = self._pool.counts, Counts()
        return counts

    def close(self) -> None:
        self._pool.close()

    def _setup(self) -> Setup:
        settings, running_s = self._settings, self._sandbox.patience_s if self._settings.tool == "python" else 0.0
        patience_s = settings.timeout_s + running_s / KILL_SHARE
        return Setup((), "", patience_s, settings.memory_mb, sandbox=self._sandbox, conversation=settings)

    def _reply(self, verdict: Verdict) -> Reply:
        if verdict.status != "ok":
            return Reply(verdict.status, None, verdict.reason, verdict.trace)
        return self._limited(None if verdict.reply is None else unpack_text(verdict.reply))

    def _limited(self, text: str | None) -> Reply:
        """Shorten a reply that is too long and say so in it. Lone surrogates, which have no tokens, become question marks."""
        if text is None:
            return Reply("ok", None)
        whole, limit = text.encode("utf-8", "replace").decode(), self._settings.max_reply_chars
        return Reply("ok", whole if len(whole) <= limit else f"{whole[:limit]} ... (cut off)")
