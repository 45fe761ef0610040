"""The messages between the engine and an executor: MessagePack-encoded structs, nothing else.

A Message goes to an executor, a Report comes from one. Payloads are whole groups; weights never travel this way.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llamarl.types import Completion, CompletionGroup, PromptGroup, RolloutGroup, Sampling


class ToExecutor(Struct, frozen=True, tag=True, tag_field="to"):
    pass


class LoadWeights(ToExecutor, frozen=True):
    version: int


class WorkOnGroup(ToExecutor, frozen=True):
    group: PromptGroup | CompletionGroup | RolloutGroup


class DropCall(ToExecutor, frozen=True):
    """Nobody waits for the answer to this call, which was given as a group of this ordinal: stop sampling it."""

    ordinal: int


class CallAnswered(ToExecutor, frozen=True):
    """The answers to a call, for the executor that made it under this number."""

    number: int
    completions: tuple[Completion, ...]


class CallRefused(ToExecutor, frozen=True):
    """A call that cannot be answered, for the executor that made it under this number."""

    number: int
    reason: str


class WorkOnBatch(ToExecutor, frozen=True):
    """The groups of one update. `probe` was sampled by the version that is about to be trained; it is measured, never
    trained on. In `folder`, a role leaves files for the next ones that are too large for a message; they are removed when
    the update counts."""

    update: int
    groups: tuple[RolloutGroup, ...]
    probe: CompletionGroup | None = None
    wanted: tuple[int, ...] = ()  # ordinals of the groups whose tokens' log-probs the trainer reports
    folder: str = ""


class PublishWeights(ToExecutor, frozen=True):
    version: int


class SaveState(ToExecutor, frozen=True):
    """Write everything that is needed to go on from here into subfolders of `folder`. It may be done beside other work."""

    version: int
    folder: str


class Stop(ToExecutor, frozen=True):
    pass


Message = (
    LoadWeights | WorkOnGroup | DropCall | CallAnswered | CallRefused | WorkOnBatch | PublishWeights | SaveState | Stop
)


class FromExecutor(Struct, frozen=True, tag=True, tag_field="from"):
    pass


class Up(FromExecutor, frozen=True):
    """The executor has built what it needs and waits for work."""


class WeightsLoaded(FromExecutor, frozen=True):
    version: int
    num_bytes: int
    lost_s: float = 0.0  # seconds in which the executor could do nothing else
    adapters: str = ""  # hash of the adapters as they are applied


class WeightsNotLoaded(FromExecutor, frozen=True):
    version: int
    reason: str


class GroupResult(FromExecutor, frozen=True):
    group: PromptGroup | CompletionGroup | RolloutGroup


class GroupRefused(FromExecutor, frozen=True):
    ordinal: int
    reason: str


class CallRequested(FromExecutor, frozen=True):
    """An agent of group `ordinal` asks the policy. The executor numbers its own calls."""

    number: int
    ordinal: int
    prompt_tokens: bytes
    sampling: Sampling
    stop: tuple[str, ...] = ()  # texts that end an answer
    stop_token_ids: tuple[int, ...] = ()


class CallDropped(FromExecutor, frozen=True):
    """Nobody waits for the answer to this call any more."""

    number: int


class AgentsCounted(FromExecutor, frozen=True):
    """What agents did since the last such report: attempts that failed, and the sessions of groups that came through."""

    failures: int = 0
    timeouts: int = 0
    sessions: int = 0
    calls: int = 0
    branches: int = 0
    unmatched: int = 0  # chats whose history was not what the session had told its client
    restarts: int = 0  # of an environment server, which had died or hung


class ScoresFailed(FromExecutor, frozen=True):
    """Number of attempts at judging answers that failed since the last such report. They say nothing about the answers."""

    failures: int
    timeouts: int


class ToolsFailed(FromExecutor, frozen=True):
    """Number of calls of a tool that failed since the last such report. They say nothing about the model."""

    failures: int
    timeouts: int


class DecodingCounted(FromExecutor, frozen=True):
    """Tokens since the last such report: guessed ahead, how many of those were right, and of prompts read beside answers."""

    drafted_tokens: int
    accepted_drafts: int
    tokens_read_beside: int


class Noted(FromExecutor, frozen=True):
    """A line for the display of the job, to be shown now."""

    text: str


class MustStop(FromExecutor, frozen=True):
    """The job must stop, for this reason: going on would be wrong, and restarting the executor would not help."""

    reason: str


class BatchResult(FromExecutor, frozen=True):
    """`groups` comes back only from a role that adds columns for the next one. Metrics follow from the seed, timings from the
    machine."""

    update: int
    metrics: dict[str, float]
    groups: tuple[RolloutGroup, ...] = ()
    timings: dict[str, float] = {}
    logprobs: dict[
        int, tuple[bytes, ...]
    ] = {}  # by ordinal, of each rollout's trained tokens, under the trained policy


class WeightsPublished(FromExecutor, frozen=True):
    version: int
    num_bytes: int
    changed: bool
    lost_s: float = 0.0  # seconds in which the executor could do nothing else
    adapters: str = ""  # hash of the adapters as they are to be applied


class StateSaved(FromExecutor, frozen=True):
    version: int
    files: dict[str, str]  # path inside the folder -> sha256


class StateNotSaved(FromExecutor, frozen=True):
    version: int
    reason: str


class ReaderStuck(FromExecutor, frozen=True):
    """A process keeps its lease on a weight slot past `weights.lease_s`: the engine kills it."""

    pid: int


class Failed(FromExecutor, frozen=True):
    """The last report of an executor that cannot go on."""

    reason: str


Report = (
    Up
    | WeightsLoaded
    | WeightsNotLoaded
    | GroupResult
    | GroupRefused
    | ScoresFailed
    | ToolsFailed
    | DecodingCounted
    | CallRequested
    | CallDropped
    | AgentsCounted
    | Noted
    | MustStop
    | BatchResult
    | WeightsPublished
    | StateSaved
    | StateNotSaved
    | ReaderStuck
    | Failed
)

encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(Message).decode
