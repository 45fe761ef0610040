"""Problems of reasoning-gym: sets that make their problems by number, and score answers themselves.

A problem is known by its set, the set's options and its number, so it can be made again anywhere, with its metadata as they
were. Which side a problem is on follows from its text alone: no text is both trained on and held out. The package is imported
only where a job names it.
"""

from __future__ import annotations

import builtins
import difflib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from llamarl.config import DatasetConfig
from llamarl.errors import ConfigError, InputError
from llamarl.plugins import describe_error
from llamarl.tasks.custom_scorers import BadReward, ScorerRequirements
from llamarl.tasks.examples import Example
from llamarl.tasks.extract import boxed, final_answer
from llamarl.tasks.formulas import evaluate_formula
from llamarl.tasks.math.without_eval import remove_monomial_code, take_names_without_exec
from llamarl.tasks.prompting import Prompting
from llamarl.tasks.task import Lazily, Task, is_held_out
from llamarl.tasks.workers.confine import Refused, refusals, seal
from llamarl.types import Problem

SCORER = "reasoning_gym"
TEMPLATE = "{prompt}\nGive the final answer between <answer> and </answer>.\n"
_MISSING = "needs the package reasoning-gym: pip install 'llamarl[reasoning-gym]'"
_MAX_TRIES = 1000  # numbers that are looked at for one problem of the wanted side
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_TAIL_CHARS = 20_000


class ProblemSet(Struct, frozen=True):
    """A set of reasoning-gym with its options: problems 0 to size - 1."""

    name: str
    options: dict[str, Any]
    size: int

    def open(self) -> Any:
        """The set, as reasoning-gym makes it."""
        make, known = _package()
        if self.name not in known or self.name == "composite":
            near = difflib.get_close_matches(self.name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "the package's gallery lists them"
            raise ConfigError(f"task.datasets: reasoning-gym has no set '{self.name}'; {hint}")
        try:
            return make(self.name, **{"seed": 0, **self.options, "size": self.size})
        except Exception as error:  # its checks raise whatever they like
            told = describe_error(error)
            raise ConfigError(f"task.options: reasoning-gym refuses those of '{self.name}': {told}") from None


def _package() -> tuple[Callable[..., Any], Mapping[str, Any]]:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == "reasoning_gym"
        raise ConfigError(f"task.kind: reasoning_gym {_MISSING if missing else describe_error(error)}") from None
    return create_dataset, DATASETS


class Problems:
    """The problems of a set by number, on their sides. A number whose problem is on the other side is passed on to another
    number, so every number has a problem on both sides, without a walk through the set."""

    def __init__(self, wanted: ProblemSet, share: float, columns: ScorerRequirements) -> None:
        self._set, self._share, self._wanted = wanted, share, columns
        self._made = wanted.open()

    def training(self, number: int) -> Example:
        return self._on_side(number, held_out=False)

    def held_out(self, number: int) -> Example:
        return self._on_side(number, held_out=True)

    def _on_side(self, number: int, *, held_out: bool) -> Example:
        for candidate in _chain(number, self._set.size):
            entry = self._entry(candidate)
            if is_held_out(entry["question"], self._share) == held_out:
                return self._example(candidate, entry)
        side = "held out" if held_out else "to train on"
        raise InputError(
            f"task.datasets: none of {_MAX_TRIES} problems of '{self._set.name}' is {side}: it has too few different "
            "ones; change its options, or task.held_out"
        )

    def _entry(self, number: int) -> dict[str, Any]:
        try:
            entry = self._made[number]
            return {**entry, "question": str(entry["question"]), "answer": entry["answer"]}
        except Exception as error:  # foreign code
            told = describe_error(error)
            raise InputError(f"task.datasets: '{self._set.name}' cannot make its problem {number}: {told}") from None

    def _example(self, number: int, entry: dict[str, Any]) -> Example:
        answer = "" if entry["answer"] is None else str(entry["answer"])
        known = {"dataset": self._set.name, "number": number, "metadata": _plain(entry.get("metadata", {}))}
        made_from = {"problem_set": msgspec.to_builtins(self._set), "number": number, "text_hash": _hash(entry)}
        columns = {**self._wanted.of(known), **made_from}
        return Example(entry["question"], answer, answer, columns=columns)


def _chain(number: int, size: int) -> Iterator[int]:
    """The number itself, then others that follow from it."""
    yield number
    rest = np.random.default_rng([number, size])
    for _ in range(_MAX_TRIES - 1):
        yield int(rest.integers(size))


def _hash(entry: dict[str, Any]) -> str:
    return hashlib.blake2b(f"{entry['question']}\n{entry['answer']}".encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """Metadata as JSON can carry them: what it does not know becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class ProceduralTask(Task):
    """A task whose held-out problems are made when they are asked for, each text once."""

    def evaluation(self, count: int, split: str = "held_out") -> Sequence[Problem]:
        if split == "test":
            raise InputError("evaluate.split: reasoning_gym has no test problems, only held-out ones")
        found: dict[str, Problem] = {}
        for number in range(min(4 * count, len(self.held_out))):
            if len(found) == count:
                break
            problem = self.held_out[number]
            found.setdefault(problem.prompt + "".join(turn.content for turn in problem.turns), problem)
        return list(found.values())


def make_reasoning_gym_tasks(
    settings: DatasetConfig, seed: int, wanted: ScorerRequirements, *, chat: bool, system: str
) -> list[tuple[Task, float]]:
    """A task for each set, with its weight."""
    prompting = Prompting(settings.template or TEMPLATE, (), SCORER, chat=chat, system=system, teacher=settings.teacher)
    tasks: list[tuple[Task, float]] = []
    for index, (name, weight) in enumerate(settings.datasets.items()):
        problems = Problems(ProblemSet(name, settings.options.get(name, {}), settings.size), settings.held_out, wanted)
        numbers = range(settings.size)
        train = Lazily(_composed(prompting.problem, problems.training), numbers)
        held_out = Lazily(_composed(prompting.problem, problems.held_out), numbers)
        tasks.append((ProceduralTask(train, held_out, seed=seed + index), weight))
    return tasks


def _composed(finish: Callable[[Example], Problem], make: Callable[[int], Example]) -> Callable[[int], Problem]:
    return lambda number: finish(make(number))


def load_reasoning_gym_scorer(answer_from: str) -> SetScorer:
    _package()
    remove_monomial_code()
    take_names_without_exec()
    return SetScorer(answer_from)


class SetScorer:
    """Calls the set's own `score_answer`, on the problem made again. Making it may read the package's files and takes longer
    than most scoring, so a worker does it before it forks (`prepare`), once for all answers. After that, the process, which
    judges this one answer, can only compute. Some sets call `eval` on answers, which are hostile; here they evaluate formulas
    and nothing else."""

    def __init__(self, answer_from: str) -> None:
        self._answer_from = answer_from

    def prepare(self, problem_set: dict[str, Any], number: int, **_: object) -> None:
        """Make the problem, for processes that are forked from this one."""
        _entry(msgspec.json.encode(problem_set), number)

    def __call__(self, completion: str, problem_set: dict[str, Any], number: int, text_hash: str) -> float:
        encoded, name = msgspec.json.encode(problem_set), problem_set["name"]
        made, entry = _opened(encoded), _entry(encoded, number)
        if _hash(entry) != text_hash:
            raise BadReward(
                f"'{name}' makes another problem {number} in every process, so its answers cannot be scored"
            )
        answer = answer_in(completion, self._answer_from)
        builtins.eval = evaluate_formula
        seal(parses=True)
        return _score(made, answer, entry, name)


def _score(made: Any, answer: str | None, entry: dict[str, Any], name: str) -> float:
    """What the set gives. If its scorer raises on this answer but takes the set's own, the answer is malformed: 0."""
    try:
        found = float(made.score_answer(answer, entry))
    except Exception as error:  # foreign code
        found = _score_of_malformed(made, entry, name, error)
    except Refused:
        found = 0.0
    if refusals:  # also where the scorer caught it, and would call the answer wrong
        raise BadReward(f"the scorer of '{name}' tried to {refusals[0]}, which workers do not allow")
    return found


def _score_of_malformed(made: Any, entry: dict[str, Any], name: str, error: Exception) -> float:
    try:
        made.score_answer(entry["answer"], entry)
    except Exception:  # foreign code
        raise BadReward(f"the scorer of '{name}' failed: {type(error).__name__}") from None
    return 0.0


@cache
def _opened(problem_set: bytes) -> Any:
    return msgspec.json.decode(problem_set, type=ProblemSet).open()


@lru_cache(maxsize=64)
def _entry(problem_set: bytes, number: int) -> Any:
    return _opened(problem_set)[number]


def answer_in(completion: str, answer_from: str) -> str | None:
    """The final answer. `auto`: in the last <answer> tags, else the last box, else the whole text."""
    if answer_from != "auto":
        return final_answer(completion, answer_from)
    tagged = _TAGGED.findall(completion[-_TAIL_CHARS:])
    if tagged:
        return str(tagged[-1]).strip()
    box = boxed(completion)
    return completion.strip() if box is None else box
