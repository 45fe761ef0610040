"""The generator: prompts in, completions out; takes new weights between any two decode steps, with work in flight."""

from __future__ import annotations

from collections.abc import Iterable

from llamarl.errors import CorruptWeights, StaleWeights
from llamarl.executors.executor import UnexpectedMessage
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.messages import (
    GroupRefused,
    GroupResult,
    LoadWeights,
    Message,
    Report,
    WeightsLoaded,
    WeightsNotLoaded,
    WorkOnGroup,
)
from llamarl.types import PromptGroup
from llamarl.weights.transport import WeightReader


class Generator:
    def __init__(self, decoder: ContinuousDecoder, weights: WeightReader) -> None:
        self._decoder, self._weights = decoder, weights

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case LoadWeights():
                yield self._load(message.version)
            case WorkOnGroup(group=PromptGroup() as group):
                try:
                    self._decoder.add(group)
                except ValueError as error:
                    yield GroupRefused(group.ordinal, str(error))
            case _:
                raise UnexpectedMessage("generator", message)

    def work(self) -> Iterable[Report]:
        return [GroupResult(group) for group in self._decoder.step()]

    @property
    def idle(self) -> bool:
        return self._decoder.idle

    def _load(self, version: int) -> Report:
        try:
            num_bytes = self._weights.load(version)
        except (StaleWeights, CorruptWeights) as error:
            return WeightsNotLoaded(version, str(error))
        self._decoder.version = version
        return WeightsLoaded(version, num_bytes)
