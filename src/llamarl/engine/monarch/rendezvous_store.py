"""A rank's side of a rendezvous: a torch Store whose values the engine keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from itertools import count

from torch.distributed import Store

from llamarl.engine.monarch.protocol import StoreRequest


class StoreClient:
    """Sends the store requests of this process to the engine, and matches the answers that come back."""

    def __init__(self, send: Callable[[StoreRequest], None]) -> None:
        self._send = send
        self._numbers = count()
        self._open: dict[int, Future[bytes]] = {}
        self._stores: dict[str, RendezvousStore] = {}
        self._lock = threading.Lock()

    def store(self, rendezvous: str, limit_s: float) -> RendezvousStore:
        """A store that is kept here until `leave`: torch holds only its C++ part, which needs the Python part alive."""
        self._stores[rendezvous] = RendezvousStore(self, rendezvous, limit_s)
        return self._stores[rendezvous]

    def leave(self, rendezvous: str) -> None:
        self._stores.pop(rendezvous, None)

    def request(
        self,
        rendezvous: str,
        operation: str,
        key: str,
        value: bytes = b"",
        expected: bytes = b"",
        limit_s: float = 60.0,
    ) -> bytes:
        answer: Future[bytes] = Future()
        with self._lock:
            number = next(self._numbers)
            self._open[number] = answer
        self._send(StoreRequest(number, rendezvous, operation, key, value, expected))
        try:
            return answer.result(limit_s)
        except TimeoutError:
            raise RuntimeError(f"'{key}' did not come to the rendezvous '{rendezvous}' within {limit_s:g} s") from None
        finally:
            with self._lock:
                del self._open[number]

    def on_answer(self, number: int, value: bytes) -> None:
        with self._lock:
            if number in self._open:
                self._open[number].set_result(value)


class RendezvousStore(Store):
    """A torch Store, each of whose operations is a request to the engine."""

    def __init__(self, client: StoreClient, rendezvous: str, limit_s: float) -> None:
        super().__init__()
        self._client, self._rendezvous, self._limit_s = client, rendezvous, limit_s

    def set(self, key: str, value: bytes | str) -> None:
        self._request("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._request("wait", key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._request("wait", key)

    def add(self, key: str, value: int) -> int:
        return int(self._request("add", key, str(value).encode()))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._request("compare_set", key, _bytes(desired), _bytes(expected))

    def delete_key(self, key: str) -> bool:
        return self._request("delete", key) == b"1"

    def check(self, keys: list[str]) -> bool:
        return all(self._request("check", key) == b"1" for key in keys)

    def num_keys(self) -> int:
        return int(self._request("count", ""))

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit_s = min(timeout.total_seconds(), self._limit_s)

    def _request(self, operation: str, key: str, value: bytes = b"", expected: bytes = b"") -> bytes:
        return self._client.request(self._rendezvous, operation, key, value, expected, self._limit_s)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
