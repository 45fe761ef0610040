"""A rank's side of a meeting: a torch Store whose values the engine keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from itertools import count

from torch.distributed import Store

from llamarl.engine.monarch.protocol import StoreRequest


class Asking:
    """Questions of this process to the engine, and the answers that come back for them."""

    def __init__(self, send: Callable[[StoreRequest], None]) -> None:
        self._send = send
        self._numbers = count()
        self._open: dict[int, Future[bytes]] = {}
        self._stores: dict[str, RendezvousStore] = {}
        self._lock = threading.Lock()

    def store(self, meeting: str, limit_s: float) -> RendezvousStore:
        """Kept here until `leave`: torch holds only what is C++ of it, and a Store in Python without its Python is none."""
        self._stores[meeting] = RendezvousStore(self, meeting, limit_s)
        return self._stores[meeting]

    def leave(self, meeting: str) -> None:
        self._stores.pop(meeting, None)

    def ask(
        self, meeting: str, operation: str, key: str, value: bytes = b"", expected: bytes = b"", limit_s: float = 60.0
    ) -> bytes:
        answer: Future[bytes] = Future()
        with self._lock:
            number = next(self._numbers)
            self._open[number] = answer
        self._send(StoreRequest(number, meeting, operation, key, value, expected))
        try:
            return answer.result(limit_s)
        except TimeoutError:
            raise RuntimeError(f"'{key}' did not come to the meeting '{meeting}' within {limit_s:g} s") from None
        finally:
            with self._lock:
                del self._open[number]

    def answered(self, number: int, value: bytes) -> None:
        with self._lock:
            if number in self._open:
                self._open[number].set_result(value)


class RendezvousStore(Store):
    def __init__(self, asking: Asking, meeting: str, limit_s: float) -> None:
        super().__init__()
        self._asking, self._meeting, self._limit_s = asking, meeting, limit_s

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask("wait", key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._ask("wait", key)

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, str(value).encode()))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask("compare_set", key, _bytes(desired), _bytes(expected))

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key) == b"1"

    def check(self, keys: list[str]) -> bool:
        return all(self._ask("check", key) == b"1" for key in keys)

    def num_keys(self) -> int:
        return int(self._ask("count", ""))

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit_s = min(timeout.total_seconds(), self._limit_s)

    def _ask(self, operation: str, key: str, value: bytes = b"", expected: bytes = b"") -> bytes:
        return self._asking.ask(self._meeting, operation, key, value, expected, self._limit_s)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
