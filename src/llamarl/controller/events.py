"""What the controller hears (events) and what it says (commands). Both are data: logged, replayed, sent anywhere.

Every event of an executor carries its incarnation, the count of its restarts, so that words of the dead are recognised.
"""

from __future__ import annotations

from msgspec import Struct

from llamarl.controller.ledger import Record
from llamarl.types import GroupFacts


class Event(Struct, frozen=True, tag=True, tag_field="event"):
    pass


class FromExecutor(Event, frozen=True):
    executor: str
    incarnation: int


class Began(Event, frozen=True):
    """The first event: start the executors."""


class Started(FromExecutor, frozen=True):
    """The executor is up; it has no weights yet, unless it trains them."""


class Loaded(FromExecutor, frozen=True):
    version: int


class LoadFailed(FromExecutor, frozen=True):
    """The version was not there any more, or its bytes were wrong; the executor keeps what it had."""

    version: int
    reason: str


class GroupDone(FromExecutor, frozen=True):
    ordinal: int
    facts: GroupFacts


class GroupFailed(FromExecutor, frozen=True):
    """The group can never pass this role; the reason goes into the ledger."""

    ordinal: int
    reason: str


class BatchDone(FromExecutor, frozen=True):
    update: int


class Published(FromExecutor, frozen=True):
    version: int
    changed: bool = True  # False: a redone version with the same bytes as before


class Died(FromExecutor, frozen=True):
    reason: str


class Saved(Event, frozen=True):
    """A snapshot of `version` is whole: earlier groups will not be needed again."""

    version: int


AnyEvent = Began | Started | Loaded | LoadFailed | GroupDone | GroupFailed | BatchDone | Published | Died | Saved


class Command(Struct, frozen=True, tag=True, tag_field="command"):
    pass


class ToExecutor(Command, frozen=True):
    executor: str
    incarnation: int


class Start(ToExecutor, frozen=True):
    """Bring the executor up; one that trains continues from the snapshot of `version`."""

    version: int


class Load(ToExecutor, frozen=True):
    version: int


class RunGroup(ToExecutor, frozen=True):
    ordinal: int


class RunBatch(ToExecutor, frozen=True):
    update: int
    ordinals: tuple[int, ...]


class Publish(ToExecutor, frozen=True):
    version: int


class Save(Command, frozen=True):
    """Make a snapshot of `version`; `Saved` says that it is whole."""

    version: int


class Write(Command, frozen=True):
    """Append to the ledger."""

    record: Record


class Sync(Command, frozen=True):
    """Everything written so far must survive a crash before the next command is carried out."""


class Forget(Command, frozen=True):
    """These groups will not be asked for again."""

    ordinals: tuple[int, ...]


class Evaluated(Command, frozen=True):
    """All groups of an evaluation are scored; `version` answered them."""

    version: int
    ordinals: tuple[int, ...]


class Finish(Command, frozen=True):
    """All updates are made and all evaluations done."""


class Abort(Command, frozen=True):
    reason: str


AnyCommand = Start | Load | RunGroup | RunBatch | Publish | Save | Write | Sync | Forget | Evaluated | Finish | Abort
