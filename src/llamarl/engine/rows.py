"""Rows of data that are imitated: read, tokenized and measured once, before anything starts; then by number, in epochs."""

from __future__ import annotations

from array import array
from math import ceil
from typing import cast

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from llamarl.config import Config, SftConfig
from llamarl.errors import ConfigError, InputError, ModelError
from llamarl.generate.answered_chat import RowTokens, row_tokens
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.data_files import BadRow, Row, read_rows
from llamarl.tasks.dataset_files import find_files
from llamarl.tasks.example_store import ExampleStore
from llamarl.tasks.examples import Example
from llamarl.tasks.supervised import read_answered_chat
from llamarl.types import Problem, PromptGroup, Sampling, WrittenAnswer, sampled_places, tokens_to_bytes

_OWN_ORDER = 2  # keeps the order of rows apart from that of problems with the same seed


class TokenizedRow(Example, frozen=True):
    """A row with its tokens."""

    prompt_tokens: bytes = b""
    written: WrittenAnswer = WrittenAnswer(b"")


class DataRows:
    """All rows that can be learned. Seed and number alone decide which one comes when."""

    def __init__(self, settings: SftConfig, tokenizer: Tokenizer, *, max_positions: int, seed: int) -> None:
        self._settings, self._tokenizer, self._seed = settings, tokenizer, seed
        self._max_tokens = min(settings.max_tokens or max_positions, max_positions)
        self._too_long = self._longest = 0
        self._store = ExampleStore(kind=TokenizedRow)
        self._lengths, self._learned = array("q"), array("q")  # tokens of each row, and those of them that are learned
        self._read()
        self._pass = -1
        self._order: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def notes(self) -> list[str]:
        """What the user should know of the data."""
        fate = {"skip": "are left out", "cut": "are cut off"}.get(self._settings.too_long, "")
        found = [f"sft: {len(self):,} rows, {sum(self._lengths) / len(self):,.0f} tokens each on average"]
        if self._too_long:
            found.append(
                f"NOTE: {self._too_long} rows of sft.path have more than {self._max_tokens} tokens (the longest "
                f"{self._longest}) and {fate}; see sft.max_tokens and sft.too_long"
            )
        return found

    def updates(self, epochs: int, rows_per_update: int) -> int:
        """Number of updates of so many passes. The last one is filled up from the next pass."""
        return ceil(epochs * len(self) / rows_per_update)

    def group(self, number: int, ordinal: int, sampling: Sampling) -> PromptGroup:
        """The row with this number in the order of all passes, as a group with its answer."""
        row = cast(TokenizedRow, self._store[self._place(number)])
        problem = Problem(row.question, row.answer)
        return PromptGroup(ordinal, problem, row.prompt_tokens, replace(sampling, samples=1), written=row.written)

    def learned_tokens(self, number: int) -> int:
        """Number of learned tokens of the row with this number in the order of all passes."""
        return self._learned[self._place(number)]

    @property
    def mean_learned_tokens(self) -> float:
        return sum(self._learned) / len(self)

    def _place(self, number: int) -> int:
        """Where the row with this number lies."""
        turn, index = divmod(number, len(self))
        if turn != self._pass:
            self._order = np.random.default_rng([self._seed, turn, _OWN_ORDER]).permutation(len(self))
            self._pass = turn
        return int(self._order[index])

    def _read(self) -> None:
        try:
            for row in read_rows(find_files(self._settings.source).train, self._convert):
                self._store.add(row)
        except (ConfigError, InputError) as error:
            raise type(error)(str(error).replace("task.", "sft.")) from None
        if not len(self._store):
            raise InputError(
                f"sft.path: all {self._too_long} rows have more than {self._max_tokens} tokens; raise sft.max_tokens, or "
                "set sft.too_long=cut"
            )

    def _convert(self, row: Row) -> TokenizedRow | None:
        chat = read_answered_chat(self._settings, row)
        try:
            tokens = row_tokens(self._tokenizer, chat, learn_all=self._settings.learn == "all")
        except ModelError as error:
            raise BadRow(str(error)) from None
        if not tokens.prompt or not tokens.answer:
            raise BadRow("makes no tokens before its answer, or none of it")
        kept = tokens if len(tokens) <= self._max_tokens else self._shortened(tokens)
        if kept is None:
            return None
        self._lengths.append(len(kept))
        self._learned.append(len(sampled_places(len(kept.written.tokens) // 4, kept.written.given)))
        return TokenizedRow(
            chat.question, chat.answer, "", prompt_tokens=tokens_to_bytes(kept.prompt), written=kept.written
        )

    def _shortened(self, tokens: RowTokens) -> RowTokens | None:
        """What is left of a row that is too long; None: it is left out."""
        if self._settings.too_long == "refuse":
            raise BadRow(f"has {len(tokens)} tokens, more than {self._max_tokens} (sft.max_tokens)")
        self._too_long += 1
        self._longest = max(self._longest, len(tokens))
        return tokens.cut(self._max_tokens) if self._settings.too_long == "cut" else None


def open_rows(config: Config, tokenizer: Tokenizer, max_positions: int) -> DataRows | None:
    if not config.sft:
        return None
    return DataRows(config.sft, tokenizer, max_positions=max_positions, seed=config.seed)


def with_epochs(config: Config, rows: DataRows | None, usual: int) -> Config:
    """The settings with the number of updates that `sft.epochs` asks for. `usual` is the default, which nobody asked for."""
    if rows is None or not config.supervised or not config.sft.epochs:
        return config
    asked, follows = config.schedule.updates, rows.updates(config.sft.epochs, config.schedule.groups_per_update)
    if asked not in (usual, follows):
        raise ConfigError(
            f"schedule.updates: {asked}, but sft.epochs={config.sft.epochs} makes {follows} updates of "
            f"{config.schedule.groups_per_update} rows; set it to {follows}, or sft.epochs=0 to count updates"
        )
    return replace(config, schedule=replace(config.schedule, updates=follows))
