"""The open sessions of a job, by their keys, and which of them is asking."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple

from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.refusals import RequestRefused
from llamarl.serve.session import Session
from llamarl.serve.sessions import TrainingSession
from llamarl.types import Sampling


class OpenSession(NamedTuple):
    """A session, the group it belongs to, and how its answers are drawn."""

    session: TrainingSession
    ordinal: int
    sampling: Sampling


_asking: ContextVar[OpenSession] = ContextVar("asking")


def asking_session() -> OpenSession:
    """The session of the request that is being answered. Every request has a task, and so a context, of its own."""
    return _asking.get()


class SessionAccess:
    """Lets in who has the key of an open session, to that session alone."""

    def __init__(self, tokenizer: Tokenizer, *, max_calls: int) -> None:
        self._tokenizer, self._max_calls = tokenizer, max_calls
        self._open: dict[str, OpenSession] = {}

    def open(self, ordinal: int, sampling: Sampling) -> str:
        """Open a session; returns its key."""
        key = f"sk-{secrets.token_hex(24)}"
        self._open[key] = OpenSession(TrainingSession(self._tokenizer, max_calls=self._max_calls), ordinal, sampling)
        return key

    def close(self, key: str) -> TrainingSession:
        """End a session. Its key is not known any more, and answers under way are not recorded."""
        session = self._open.pop(key).session
        session.close()
        return session

    def session(self, key: str | None, headers: Mapping[str, str]) -> Session:
        # Keys are random and long: how long the search takes says nothing about them.
        found = self._open.get(key or "")
        if found is None:
            raise RequestRefused(401, "the key is missing, wrong, or of a session that has ended")
        _asking.set(found)
        return found.session
