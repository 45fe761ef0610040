"""The user's own scorers: how they are called, and which return values are valid.

A function with a parameter `completion` is called by keyword, with one answer at a time. A function with a parameter
`completions` gets all answers to a prompt at once, and every other argument as a list of the same length. Further parameters
may be `answer`, `prompt` (or `prompts`), or names of data columns. Any other function is called as
score(completion, answer, prompt). All of them may be `async`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from llamarl.errors import ConfigError
from llamarl.plugins import check_call

Function = Callable[..., Any]
_ONE, _ALL = "completion", "completions"
_GIVEN = frozenset({_ONE, _ALL, "answer", "prompt", "prompts"})  # available for every problem
_OF_VERL = frozenset({"data_source", "solution_str", "ground_truth"})
_MAX_SHOWN = 60


class Signature(Struct, frozen=True):
    """How a scorer is called: `by_name` with the arguments that its parameters name, else with completion, answer and
    prompt."""

    by_name: bool = False
    batched: bool = False
    is_async: bool = False
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    everything: bool = False  # whether it takes **columns

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data that the scorer requires."""
        return tuple(name for name in self.required if name not in _GIVEN)

    @property
    def needs_answer(self) -> bool:
        return not self.by_name or "answer" in self.required

    def wants(self, column: str) -> bool:
        return self.everything or column in self.required or column in self.optional


class BadReward(Exception):
    """A scorer returned something that is not a reward."""


def signature_of(reference: str, function: Function) -> Signature:
    """Inspect a scorer. Raises ConfigError if it cannot be called in any of these ways."""
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return Signature(is_async=is_async)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {one.name: one.default is inspect.Parameter.empty for one in parameters if one.kind in kinds}
    if others := sorted(named.keys() & _OF_VERL):
        raise ConfigError(
            f"reward.scorer: {reference} has verl's parameters ({', '.join(others)}); here they are '{_ONE}' and "
            "'answer', and columns of the data have their own names"
        )
    if _ONE not in named and _ALL not in named:
        check_call("reward.scorer", reference, function, (_ONE, "answer", "prompt"))
        return Signature(is_async=is_async)
    if _ONE in named and _ALL in named:
        raise ConfigError(
            f"reward.scorer: {reference} asks for both '{_ONE}' and '{_ALL}'; it can have only one of them"
        )
    return Signature(
        by_name=True,
        batched=_ALL in named,
        is_async=is_async,
        required=tuple(name for name, must in named.items() if must),
        optional=tuple(name for name, must in named.items() if not must),
        everything=any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters),
    )


def call(
    function: Function,
    signature: Signature,
    completions: Sequence[str],
    answer: str,
    prompt: str,
    columns: Mapping[str, Any],
) -> Any:
    """Call the function and return its result, which may be an awaitable."""
    if not signature.by_name:
        return function(completions[0], answer, prompt)
    values: dict[str, Any] = {**columns, "answer": answer, "prompt": prompt}
    if signature.batched:
        values = {name: [value] * len(completions) for name, value in values.items()}
        values["prompts"] = values["prompt"]
        values[_ALL] = list(completions)
    else:
        values[_ONE] = completions[0]
    return function(**{name: value for name, value in values.items() if signature.wants(name)})


def rewards_in(returned: Any, signature: Signature, count: int) -> tuple[float, ...]:
    """Return one finite number for each of `count` answers. Raises BadReward if the scorer returned anything else."""
    if not signature.batched:
        return (_number(returned),)
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        raise BadReward(f"scorer gave {_shown(returned)}; for completions it must give a list with one number for each")
    found = list(returned)
    if len(found) != count:
        raise BadReward(f"scorer gave {len(found)} reward{'s' * (len(found) != 1)} for {count} completions")
    return tuple(map(_number, found))


def _number(value: Any) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):  # which float() would read
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadReward(f"scorer gave {_shown(value)}; it must give a number") from None
    if not math.isfinite(number):
        raise BadReward(f"scorer gave {number}")
    return number


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return ascii(value)[:_MAX_SHOWN]
    return f"a {type(value).__name__}"


class ScorerRequirements(Struct, frozen=True):
    """What scorers need of the data besides prompts: columns, and whether there must be an answer."""

    required: dict[str, str] = {}  # maps each column to a scorer that needs it
    optional: frozenset[str] = frozenset()
    everything: bool = False
    answer: bool = True

    @classmethod
    def by(cls, signatures: Mapping[str, Signature], *, answer: bool) -> ScorerRequirements:
        """Combine the needs of several scorers. `answer` says that some other scorer needs the answer."""
        return cls(
            {column: name for name, signature in signatures.items() for column in signature.columns},
            frozenset(name for signature in signatures.values() for name in signature.optional) - _GIVEN,
            any(signature.everything for signature in signatures.values()),
            answer or any(signature.needs_answer for signature in signatures.values()),
        )

    def of(self, row: Mapping[str, Any], beside: Iterable[str] = ()) -> dict[str, Any]:
        """Return the columns of a row that scorers need. Columns in `beside` already serve as prompt or answer and are
        included only if a scorer names them. Raises ConfigError for a missing column."""
        for column, name in self.required.items():
            if column not in row:
                raise ConfigError(missing_column(name, column, row))
        names = {*self.required, *self.optional, *(set(row) - set(beside) if self.everything else ())} - _GIVEN
        return {column: value for column, value in row.items() if column in names}


def missing_column(scorer: str, column: str, there: Iterable[str]) -> str:
    known = ", ".join(sorted({*there, _ONE, "answer", "prompt"}))
    return f"reward.scorer: {scorer} asks for '{column}', which is no column of the data; there are: {known}"
