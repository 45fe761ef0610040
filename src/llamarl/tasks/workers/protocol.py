"""Messages between the pool and its workers: MessagePack in frames, over a private socket pair."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from llamarl.config import AgentConfig, ConversationConfig, LLMJudgeConfig, SandboxConfig
from llamarl.io.frames import BadFrame, FrameReader, encode_frame
from llamarl.tasks.custom_scorers import Signature
from llamarl.types import ClaimedAnswer, Turn

_READ_BYTES = 1 << 20
KILL_SHARE = 0.9  # of the time limit; the rest is for killing the child, so that the limit holds

Status = Literal["ok", "error", "timeout"]


class ServedEnvironment(Struct, frozen=True):
    """Where an environment server of verifiers listens, and what it must know of the policy."""

    address: str
    tokenizer: str  # folder of the policy, whose tokenizer it uses
    temperature: float
    max_new_tokens: int


class Setup(Struct, frozen=True):
    """The first message to a worker: scorers to load, and limits for judging one answer."""

    scorers: tuple[str, ...]
    pattern: str
    timeout_s: float
    memory_mb: int
    sandbox: SandboxConfig = SandboxConfig()
    share_of_tests: bool = False
    llm: LLMJudgeConfig = LLMJudgeConfig()
    conversation: ConversationConfig = ConversationConfig()  # names the tool, if the worker runs one
    agent: AgentConfig = AgentConfig()  # names the agent, if the worker runs one
    answer_from: str = "auto"
    served: ServedEnvironment | None = None  # the environment server that agents run at, if any


class Ready(Struct, frozen=True, tag=True):
    """Everything is loaded. Tells how the user's own scorers are called, and whether the environment has tools."""

    signatures: dict[str, Signature] = {}
    has_tools: bool = False


class NotReady(Struct, frozen=True, tag=True):
    """The scorers or the tool cannot be loaded."""

    reason: str


class Item(Struct, frozen=True, array_like=True):
    """The input of one scorer: one answer, or several answers to one prompt if it takes them together. Texts are UTF-8 that
    may contain lone surrogates, since models write them."""

    scorer: str
    completions: tuple[bytes, ...]
    answer: bytes
    prompt: bytes
    columns: bytes = b"{}"  # columns of the data that the scorer needs, as JSON


class Call(Struct, frozen=True, array_like=True):
    """The input of a tool: the model's last turn, and all turns including that one."""

    text: bytes
    turns: bytes


class AgentItem(Struct, frozen=True, array_like=True):
    """One run of an agent: the problem as JSON, and the session it talks to."""

    problem: bytes
    url: str
    api_key: str
    model: str


class WorkRequest(Struct, frozen=True):
    """An answer for scorers, a turn for a tool, or runs of an agent at the same time. If `gathered`, items for the user's
    coroutines, which run concurrently in one process, each with its own verdict."""

    items: tuple[Item, ...]
    call: Call | None = None
    gathered: bool = False
    agents: tuple[AgentItem, ...] = ()

    @property
    def num_verdicts(self) -> int:
        """Number of verdicts in `Verdict.each`."""
        return len(self.agents) or (len(self.items) if self.gathered else 0)

    @property
    def num_rewards(self) -> int:
        return sum(len(item.completions) for item in self.items)


class Verdict(Struct, frozen=True, tag=True):
    """The result of a request. `rewards` has the order of items and completions, and is empty if judging failed, which is not
    a wrong answer. `each` has a verdict for each gathered item or agent. `reply` is the tool's; None ends the
    conversation."""

    status: Status
    rewards: tuple[float, ...] = ()
    each: tuple[Verdict, ...] = ()
    reply: bytes | None = None
    parts: dict[str, float] = {}  # further numbers that an agent gave
    claims: tuple[ClaimedAnswer, ...] | None = (
        None  # what an environment server says was sampled; None: nobody says anything
    )
    reason: str = ""
    trace: str = ""  # traceback of an exception in the user's own function, for the log
    seconds: float = 0.0
    peak_mb: float = 0.0


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_request = msgspec.msgpack.Decoder(WorkRequest).decode
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
    """Splits received bytes into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader, self._arrived = FrameReader(), list[bytes]()

    def receive(self) -> bytes | None:
        """Read once and return the next complete message, or None. Raises EOFError if the peer is gone."""
        data = self._connection.recv(_READ_BYTES)
        if not data:
            raise EOFError
        try:
            self._arrived += self._reader.feed(data)
        except BadFrame as error:
            raise EOFError from error
        return self._arrived.pop(0) if self._arrived else None

    def wait(self) -> bytes:
        """Wait for the next message."""
        while (message := self.receive()) is None:
            pass
        return message
