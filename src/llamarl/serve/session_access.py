"""The open sessions of a job, by their keys, and which of them is asking."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple

from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.refusals import RequestRefused
from llamarl.serve.session import Session
from llamarl.serve.sessions import TrainingSession
from llamarl.types import Sampling


class OpenSession(NamedTuple):
    """A session of one player, the group it belongs to, and how its answers are drawn."""

    session: TrainingSession
    ordinal: int
    sampling: Sampling


_PLAYER = re.compile(r"0|[1-9]\d?")  # behind a key and a dot
_asking: ContextVar[OpenSession] = ContextVar("asking")


def asking_session() -> OpenSession:
    """The session of the request that is being answered. Every request has a task, and so a context, of its own."""
    return _asking.get()


class SessionAccess:
    """Lets in who has the key of a sample, to its session alone. An agent that plays several sides of a game has a session
    for each: KEY is the first player, KEY.1 the second, and so on."""

    def __init__(self, tokenizer: Tokenizer, *, max_calls: int) -> None:
        self._tokenizer, self._max_calls = tokenizer, max_calls
        self._open: dict[str, dict[int, OpenSession]] = {}  # by key and player
        self._lock = threading.Lock()  # players come in the server's thread, and sessions are closed in another

    def open(self, ordinal: int, sampling: Sampling) -> str:
        """Open the session of a sample; returns its key."""
        key = f"sk-{secrets.token_hex(24)}"
        self._open[key] = {0: OpenSession(self._new_session(), ordinal, sampling)}
        return key

    def close(self, key: str) -> dict[int, TrainingSession]:
        """End the session of each player. Its key is not known any more, and answers under way are not recorded."""
        with self._lock:
            players = self._open.pop(key)
        for opened in players.values():
            opened.session.close()
        return {player: players[player].session for player in sorted(players)}

    def session(self, key: str | None, headers: Mapping[str, str]) -> Session:
        # Keys are random and long: how long the search takes says nothing about them.
        known, dot, player = (key or "").partition(".")
        with self._lock:
            players = self._open.get(known)
            if players is None or (dot and not _PLAYER.fullmatch(player)):
                raise RequestRefused(401, "the key is missing, wrong, or of a session that has ended")
            found = self._of_player(players, int(player or 0))
        _asking.set(found)
        return found.session

    def _of_player(self, players: dict[int, OpenSession], player: int) -> OpenSession:
        if player not in players:
            players[player] = players[0]._replace(session=self._new_session())
        return players[player]

    def _new_session(self) -> TrainingSession:
        return TrainingSession(self._tokenizer, max_calls=self._max_calls)
