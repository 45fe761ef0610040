"""Rendezvous stores, in which the ranks of a process group find each other. The engine keeps them in its own memory.

Ranks send requests over the connection that they have to the engine anyway, so nothing else listens; between hosts, whoever
asks has shown a certificate. A request that cannot be answered yet waits until it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llamarl.engine.monarch.protocol import StoreRequest

Answer = Callable[[int, bytes], None]  # takes the number of the request, and the value


@dataclass
class StoreValues:
    """One store, and the requests that wait for a key."""

    values: dict[str, bytes] = field(default_factory=dict)
    waiting: list[tuple[StoreRequest, Answer]] = field(default_factory=list)


class RendezvousStores:
    """The stores of all rendezvous, by name."""

    def __init__(self) -> None:
        self._stores: dict[str, StoreValues] = {}

    def handle(self, request: StoreRequest, answer: Answer) -> None:
        store = self._stores.setdefault(request.rendezvous, StoreValues())
        if request.operation == "wait" and request.key not in store.values:
            store.waiting.append((request, answer))
            return
        answer(request.number, _operate(store.values, request))
        served = [one for one in store.waiting if one[0].key in store.values]
        store.waiting = [one for one in store.waiting if one not in served]
        for waiting, reply in served:
            reply(waiting.number, store.values[waiting.key])

    def end(self, prefix: str) -> None:
        """Forget the stores whose names begin with this."""
        self._stores = {name: store for name, store in self._stores.items() if not name.startswith(prefix)}


def _operate(values: dict[str, bytes], request: StoreRequest) -> bytes:
    match request.operation:
        case "set":
            values[request.key] = request.value
        case "add":
            values[request.key] = str(int(values.get(request.key, b"0")) + int(request.value)).encode()
        case "compare_set":
            if values.get(request.key, b"") == request.expected:
                values[request.key] = request.value
        case "delete":
            return str(int(values.pop(request.key, None) is not None)).encode()
        case "check":
            return str(int(request.key in values)).encode()
        case "count":
            return str(len(values)).encode()
    return values.get(request.key, b"")
