"""Events are the controller's input, commands its output. Both are data: they can be logged, replayed and sent anywhere.

Every event of an executor carries its incarnation, the count of its restarts, so that late events of a dead one are
recognized.
"""

from __future__ import annotations

from msgspec import Struct

from llamarl.controller.ledger import Record
from llamarl.types import GroupFacts, GroupKind

FIRST_CALL = 1 << 40  # calls are numbered from here on, beyond all groups


class Event(Struct, frozen=True, tag=True, tag_field="event"):
    pass


class ExecutorEvent(Event, frozen=True):
    executor: str
    incarnation: int


class Began(Event, frozen=True):
    """The first event: start the executors."""


class Started(ExecutorEvent, frozen=True):
    """The executor is up. It has no weights yet, unless it trains them."""


class Loaded(ExecutorEvent, frozen=True):
    version: int


class LoadFailed(ExecutorEvent, frozen=True):
    """The version was gone, or its bytes were wrong. The executor keeps the weights it had."""

    version: int
    reason: str


class GroupDone(ExecutorEvent, frozen=True):
    ordinal: int
    facts: GroupFacts


class GroupFailed(ExecutorEvent, frozen=True):
    """The group can never pass this role. The reason goes into the ledger."""

    ordinal: int
    reason: str


class CallMade(ExecutorEvent, frozen=True):
    """An agent of a group asks the policy: `num_completions` answers to one prompt. `call` is its number, from `FIRST_CALL`
    on; a replica that answers it knows it as the ordinal of a group."""

    call: int
    ordinal: int
    num_completions: int


class CallEnded(ExecutorEvent, frozen=True):
    """Nobody waits for the answer to this call any more."""

    call: int


class GaveUp(ExecutorEvent, frozen=True):
    """The executor found that the job cannot go on."""

    reason: str


class BatchDone(ExecutorEvent, frozen=True):
    update: int
    skipped: bool = False  # a loss or gradient was not a number, so the weights stayed as they were


class Published(ExecutorEvent, frozen=True):
    version: int
    changed: bool = True  # False: a redone version with the same bytes as before


class Died(ExecutorEvent, frozen=True):
    reason: str


class Joined(Event, frozen=True):
    """A host that came while the job runs offers an executor of a role that works on groups: start it there."""

    executor: str
    host: str


class Left(Event, frozen=True):
    """The host of an executor that had joined is gone, announced or not. Its groups are handed out again; this counts as no
    death of theirs, since they did not cause it."""

    executor: str
    reason: str


class Saved(ExecutorEvent, frozen=True):
    """The executor has written its part of the snapshot of `version`."""

    version: int


class Committed(Event, frozen=True):
    """The snapshot of `version` is whole: earlier groups are not needed again."""

    version: int


class SaveFailed(Event, frozen=True):
    """The snapshot of `version` could not be written. The job goes on with the one before."""

    version: int
    reason: str


class Resumed(Event, frozen=True):
    """Comes instead of `Began`: go on from the snapshot of `version`, with the groups that ledger and store still hold."""

    version: int
    batches: tuple[tuple[int, ...], ...]  # batches of updates from `version` on that were made before; to be made again
    oldest: int  # the smallest ordinal that is in no batch
    taken: tuple[int, ...]  # larger ordinals that are in a batch
    settled: tuple[int, ...]  # ordinals that are scored or dropped, and in no batch yet
    dropped: tuple[int, ...]
    evaluated: tuple[int, ...]  # versions that were evaluated before
    run: int = 0  # number of this start of the job; the first is 0
    replaced: tuple[tuple[int, int], ...] = ()  # update and number of groups that were replaced in its batch
    same_rewards: tuple[int, ...] = ()  # settled ordinals whose rewards are all equal


class StopRequested(Event, frozen=True):
    """Finish the update under way, make a snapshot, end."""


AnyEvent = (
    Began
    | Started
    | Loaded
    | LoadFailed
    | GroupDone
    | GroupFailed
    | CallMade
    | CallEnded
    | GaveUp
    | BatchDone
    | Published
    | Died
    | Joined
    | Left
    | Saved
    | Committed
    | SaveFailed
    | Resumed
    | StopRequested
)


class Command(Struct, frozen=True, tag=True, tag_field="command"):
    pass


class ExecutorCommand(Command, frozen=True):
    executor: str
    incarnation: int


class Start(ExecutorCommand, frozen=True):
    """Bring the executor up. One that trains continues from the snapshot of `version`."""

    version: int


class Dismiss(ExecutorCommand, frozen=True):
    """An executor that had joined fails again and again: the job goes on without it."""

    reason: str


class Load(ExecutorCommand, frozen=True):
    version: int


class RunGroup(ExecutorCommand, frozen=True):
    ordinal: int
    kind: GroupKind = "train"


class CancelCall(ExecutorCommand, frozen=True):
    """Nobody waits for this answer: stop sampling it."""

    call: int


class RefuseCall(ExecutorCommand, frozen=True):
    """Tell the executor that made the call that it cannot be answered."""

    call: int
    reason: str


class RunBatch(ExecutorCommand, frozen=True):
    update: int
    ordinals: tuple[int, ...]
    probe: int | None = None  # ordinal of a group to measure beside the batch


class Publish(ExecutorCommand, frozen=True):
    version: int


class Save(ExecutorCommand, frozen=True):
    """Write the executor's part of the snapshot of `version`; `Saved` follows."""

    version: int


class Commit(Command, frozen=True):
    """All parts are written: make them a snapshot; `Committed` or `SaveFailed` follows."""

    version: int


class Prune(Command, frozen=True):
    """No executor will come back from a version before this one: older snapshots, beyond those to keep, may be removed."""

    version: int


class Write(Command, frozen=True):
    """Append a record to the ledger."""

    record: Record


class Sync(Command, frozen=True):
    """Everything written so far must survive a crash before the next command is carried out."""


class Forget(Command, frozen=True):
    """These groups are not needed again."""

    ordinals: tuple[int, ...]


class Evaluated(Command, frozen=True):
    """All groups of an evaluation are scored; `version` answered them."""

    version: int
    ordinals: tuple[int, ...]


class Finish(Command, frozen=True):
    """The job is over: all updates made and all evaluations done, or stopped on request with a snapshot."""

    stopped: bool = False


class Abort(Command, frozen=True):
    reason: str


AnyCommand = (
    Start
    | Dismiss
    | Load
    | RunGroup
    | CancelCall
    | RefuseCall
    | RunBatch
    | Publish
    | Save
    | Commit
    | Prune
    | Write
    | Sync
    | Forget
    | Evaluated
    | Finish
    | Abort
)
