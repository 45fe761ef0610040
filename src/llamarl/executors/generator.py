"""The generator: prompts in, completions out. New weights are taken between two decode steps, with work in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llamarl.errors import CorruptWeights, StaleWeights
from llamarl.executors.executor import UnexpectedMessage
from llamarl.generate.adapter_check import AdapterCheck
from llamarl.generate.conversation import Conversations
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.sequences import AS_ALL_OTHERS, GroupOptions
from llamarl.generate.stop_strings import StopStrings
from llamarl.messages import (
    DecodingCounted,
    DropCall,
    GroupRefused,
    GroupResult,
    LoadWeights,
    Message,
    MustStop,
    Noted,
    Report,
    ToolsFailed,
    WeightsLoaded,
    WeightsNotLoaded,
    WorkOnGroup,
)
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.failures import FailureLog, FailureShare, to_stderr
from llamarl.types import CompletionGroup, PromptGroup, WrittenAnswer, written_group
from llamarl.weights.transport import WeightReader


class Generator:
    """Serves one replica. With `conversations`, completions have several turns; the job stops when more than
    `max_failure_share` of the tool's calls fail, or, in a deterministic job, when one is late. With `adapters`, it reports
    the hash of those that it applies, and their effect on some answers. `prepare` is called between messages while nothing is
    decoded, until it returns False."""

    def __init__(
        self,
        decoder: ContinuousDecoder,
        weights: WeightReader,
        conversations: Conversations | None = None,
        *,
        max_failure_share: float = 1.0,
        deterministic: bool = False,
        log: Callable[[str], None] = to_stderr,
        adapters: AdapterCheck | None = None,
        tokenizer: Tokenizer | None = None,
        prepare: Callable[[], bool] | None = None,
    ) -> None:
        self._tokenizer = tokenizer  # needed for stop texts of calls
        self._decoder, self._weights, self._conversations = decoder, weights, conversations
        self._max_failure_share, self._deterministic = max_failure_share, deterministic
        self._adapters = adapters
        self._prepare = prepare
        self._failures, self._log = FailureShare(max_failure_share), FailureLog(log)

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case LoadWeights():
                yield self._load(message.version)
            case WorkOnGroup(group=PromptGroup(written=WrittenAnswer()) as group):
                yield GroupResult(written_group(group, self._decoder.version))  # data has answered it
            case WorkOnGroup(group=PromptGroup() as group):
                try:
                    self._decoder.add(group, self._options(group))
                except ValueError as error:
                    yield GroupRefused(group.ordinal, str(error))
            case DropCall():
                if self._decoder.holds(message.ordinal):
                    self._decoder.drop(message.ordinal)
            case _:
                raise UnexpectedMessage("generator", message)

    @property
    def preparing(self) -> str:
        """What the next slice prepares; empty if it decodes."""
        return "capture" if self._prepare is not None and self._decoder.idle else ""

    def work(self) -> Iterable[Report]:
        if self._prepare is not None and self._decoder.idle:
            self._prepare = self._prepare if self._prepare() else None
            return []
        if self._conversations is None:
            reports: list[Report] = [GroupResult(self._measured(group)) for group in self._decoder.step()]
            return [*self._counts(), *reports] if reports else []
        reports = [GroupResult(self._measured(group)) for group in self._conversations.step()]
        return [*(self._counts() if reports else ()), *reports, *self._failed_tools(self._conversations)]

    def _counts(self) -> Iterable[Report]:
        """What became of drafts, and what was read beside answers, told with the groups that are complete."""
        if any(counts := self._decoder.take_counts()):
            yield DecodingCounted(*counts)

    @property
    def idle(self) -> bool:
        return self._decoder.idle and self._prepare is None

    def _options(self, group: PromptGroup) -> GroupOptions:
        """What a call asks for beyond its sampling."""
        if self._tokenizer is None or not (group.stop or group.stop_token_ids):
            return AS_ALL_OTHERS
        return GroupOptions(stop=StopStrings(self._tokenizer, group.stop, group.stop_token_ids))

    def _load(self, version: int) -> Report:
        try:
            num_bytes = self._weights.load(version)
        except (StaleWeights, CorruptWeights) as error:
            return WeightsNotLoaded(version, str(error))
        self._decoder.version = version
        return WeightsLoaded(version, num_bytes, adapters=self._adapters.digest() if self._adapters else "")

    def _measured(self, group: CompletionGroup) -> CompletionGroup:
        return self._adapters.measured(group) if self._adapters else group

    def _failed_tools(self, conversations: Conversations) -> Iterable[Report]:
        """Reports on failed tools. A group whose tool failed is dropped, like a group that cannot be scored."""
        for failed in conversations.take_outcomes():
            self._failures.note(failed=failed)
        failures = conversations.take_failures()
        for failure in failures:
            late = failure.status == "timeout"
            reason = f"tool {failure.reason}" if late else failure.reason
            if self._log.note(reason, failure.trace):
                yield Noted(reason)
            yield GroupRefused(failure.ordinal, reason)
            if self._deterministic and late:
                yield MustStop(
                    f"the tool of group {failure.ordinal} {failure.reason}; schedule.deterministic allows none"
                )
        if counts := conversations.take_counts():
            yield ToolsFailed(counts.failures, counts.timeouts)
        if failures and (excess := self._failures.excess):
            yield MustStop(
                f"{excess[0]} of the last {excess[1]} calls of the tool failed; more than "
                f"conversation.max_failure_share={self._max_failure_share:g}; the last: {self._log.last}"
            )
