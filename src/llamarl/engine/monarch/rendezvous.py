"""Where the ranks of a process group find each other: stores that the engine keeps in its own memory.

Ranks ask over the connection they have to the engine anyway, so nothing else listens, and between hosts who asks has shown
a certificate. A question that cannot be answered yet waits until it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llamarl.engine.monarch.protocol import StoreRequest

Answer = Callable[[int, bytes], None]  # the number of the question, what is answered


@dataclass
class StoreValues:
    values: dict[str, bytes] = field(default_factory=dict)
    waiting: list[tuple[StoreRequest, Answer]] = field(default_factory=list)


class RendezvousStores:
    def __init__(self) -> None:
        self._meetings: dict[str, StoreValues] = {}

    def ask(self, ask: StoreRequest, answer: Answer) -> None:
        meeting = self._meetings.setdefault(ask.meeting, StoreValues())
        if ask.operation == "wait" and ask.key not in meeting.values:
            meeting.waiting.append((ask, answer))
            return
        answer(ask.number, _operate(meeting.values, ask))
        served = [one for one in meeting.waiting if one[0].key in meeting.values]
        meeting.waiting = [one for one in meeting.waiting if one not in served]
        for waiting, reply in served:
            reply(waiting.number, meeting.values[waiting.key])

    def end(self, name: str) -> None:
        """Those that begin with this name are over."""
        self._meetings = {known: one for known, one in self._meetings.items() if not known.startswith(name)}


def _operate(values: dict[str, bytes], ask: StoreRequest) -> bytes:
    match ask.operation:
        case "set":
            values[ask.key] = ask.value
        case "add":
            values[ask.key] = str(int(values.get(ask.key, b"0")) + int(ask.value)).encode()
        case "compare_set":
            if values.get(ask.key, b"") == ask.expected:
                values[ask.key] = ask.value
        case "delete":
            return str(int(values.pop(ask.key, None) is not None)).encode()
        case "check":
            return str(int(ask.key in values)).encode()
        case "count":
            return str(len(values)).encode()
    return values.get(ask.key, b"")
