"""What the pool and its workers tell each other: MessagePack in frames, over a socket pair nobody else holds."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from llamarl.config import ConversationConfig, LLMJudgeConfig, SandboxConfig
from llamarl.io.frames import BadFrame, FrameReader, encode_frame
from llamarl.tasks.own_scorers import Signature
from llamarl.types import Turn

_READ_BYTES = 1 << 20
KILL_SHARE = 0.9  # of the time limit: the rest is for killing, so that the limit itself is kept

Status = Literal["ok", "error", "timeout"]


class Setup(Struct, frozen=True):
    """The first word to a worker: which scorers to load, and the limits of judging one answer."""

    scorers: tuple[str, ...]
    pattern: str
    timeout_s: float
    memory_mb: int
    sandbox: SandboxConfig = SandboxConfig()
    share_of_tests: bool = False
    llm: LLMJudgeConfig = LLMJudgeConfig()
    conversation: ConversationConfig = ConversationConfig()  # with its tool, if that is what the worker is for


class Ready(Struct, frozen=True, tag=True):
    """All is loaded; how the user's own scorers want to be called."""

    signatures: dict[str, Signature] = {}


class NotReady(Struct, frozen=True, tag=True):
    reason: str


class Item(Struct, frozen=True, array_like=True):
    """One scorer's view of an answer; of several answers to one prompt where it takes them together. Texts are UTF-8 in
    which lone surrogates are let through, as models write them."""

    scorer: str
    completions: tuple[bytes, ...]
    answer: bytes
    prompt: bytes
    columns: bytes = b"{}"  # of the data, as JSON: those that the scorer asks for


class Call(Struct, frozen=True, array_like=True):
    """A tool's view of a conversation: what the model has just said, and all turns, that one included."""

    said: bytes
    turns: bytes


class WorkRequest(Struct, frozen=True):
    """An answer for its scorers, or a turn for a tool. Or, `gathered`, items for coroutines of the user's that run at the
    same time in one process, each with a verdict of its own."""

    items: tuple[Item, ...]
    call: Call | None = None
    gathered: bool = False

    @property
    def num_rewards(self) -> int:
        return sum(len(item.completions) for item in self.items)


class Verdict(Struct, frozen=True, tag=True):
    """`rewards` in the order of the items and their completions; none when judging failed, which is not the same as a wrong
    answer. Of gathered items, a verdict on `each`. Of a call, the tool's `reply`; none when the conversation is over."""

    status: Status
    rewards: tuple[float, ...] = ()
    each: tuple[Verdict, ...] = ()
    reply: bytes | None = None
    reason: str = ""
    trace: str = ""  # of an exception in a user's own function, for the log
    seconds: float = 0.0
    peak_mb: float = 0.0


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_ask = msgspec.msgpack.Decoder(WorkRequest).decode
decode_reply = msgspec.msgpack.Decoder(Ready | NotReady | Verdict).decode
_decode_turns = msgspec.msgpack.Decoder(tuple[tuple[bytes, bytes], ...]).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def pack_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def unpack_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def pack_turns(turns: Sequence[Turn]) -> bytes:
    return encode([(pack_text(turn.role), pack_text(turn.content)) for turn in turns])


def unpack_turns(data: bytes) -> tuple[Turn, ...]:
    return tuple(Turn(unpack_text(role), unpack_text(content)) for role, content in _decode_turns(data))


def send(connection: socket.socket, message: Struct) -> None:
    connection.sendall(encode_frame(encode(message)))


class Inbox:
    """Cuts what arrives into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader, self._arrived = FrameReader(), list[bytes]()

    def receive(self) -> bytes | None:
        """One read, then the next whole message if there is one. Raises EOFError when the peer is gone."""
        data = self._connection.recv(_READ_BYTES)
        if not data:
            raise EOFError
        try:
            self._arrived += self._reader.feed(data)
        except BadFrame as error:
            raise EOFError from error
        return self._arrived.pop(0) if self._arrived else None

    def wait(self) -> bytes:
        """The next message, however long it takes."""
        while (message := self.receive()) is None:
            pass
        return message
