"""The start of the line: makes the tokenized prompt of every ordinal, with how its answers are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from msgspec.structs import replace

from llamarl.config import Config, TeacherConfig
from llamarl.config.section import changed_settings
from llamarl.config.teacher import THE_TEACHER
from llamarl.controller.probe import probed_version
from llamarl.engine.row_share import NoRows, RowShare, ShareRule, TokenShare, share_rule
from llamarl.engine.rows import DataRows
from llamarl.errors import InputError
from llamarl.generate.prompting import prompt_tokens
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.curriculum import Choice, curriculum_rule
from llamarl.tasks.extract import gold_answer
from llamarl.tasks.task import Prompter
from llamarl.types import GroupKind, Problem, PromptGroup, tokens_to_bytes


class Numbered(Protocol):
    """A task whose training problems have numbers, as a curriculum needs."""

    def numbered(self, part: int, number: int) -> Problem: ...


class Prompts:
    """Makes the prompt group of any ordinal: training, evaluation or probe. With `rows`, some training groups, or all, are
    rows of data that come with their answers."""

    def __init__(self, task: Prompter, tokenizer: Tokenizer, config: Config, rows: DataRows | None = None) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._rows = rows
        self._shared: RowShare = NoRows()
        self.row_share: tuple[ShareRule, Callable[[int], int]] | None = None  # how rows are chosen beside problems
        if rows is not None:
            rule = share_rule(config, rows.mean_learned_tokens), rows.learned_tokens
            self._shared, self.row_share = TokenShare(*rule), None if config.supervised else rule
        own_notes = rows.notes if rows is not None else []
        self.notes: tuple[str, ...] = (*getattr(task, "notes", ()), *own_notes)  # for the user
        self._teacher = config.teacher
        self._training, self._greedy = config.training_sampling, config.greedy_sampling
        self._choice: Callable[[int], Choice | None] = lambda ordinal: None
        self.curriculum = (
            curriculum_rule(config.task, config.schedule, config.seed, task) if config.task.curriculum else None
        )
        self._evaluation = task.evaluation(config.evaluate.prompts, config.evaluate.split)
        # A small task may hold out fewer problems than evaluate.prompts asks for; then each is asked once.
        self.evaluate = replace(config.evaluate, prompts=len(self._evaluation))
        if len(self._evaluation) < config.evaluate.prompts and "prompts" in changed_settings(config.evaluate):
            asked = f"evaluations ask {len(self._evaluation)} problems, all that there are of {config.evaluate.prompts}"
            self.notes = (*self.notes, f"{asked} (evaluate.prompts)")

    def choose_by(self, choice: Callable[[int], Choice | None]) -> None:
        """From now on, ask the training problems that a curriculum chooses."""
        self._choice = choice

    def share_by(self, share: RowShare) -> None:
        """From now on, rows are the ordinals that this says, which knows how long answers are."""
        self._shared = share

    def group(self, ordinal: int, kind: GroupKind = "train") -> PromptGroup:
        if kind == "evaluation":
            problem = self._evaluation[(-ordinal - 1) % len(self._evaluation)]
        elif kind == "train" and (chosen := self._choice(ordinal)) is not None:
            problem = cast(Numbered, self._task).numbered(chosen.part, chosen.number)
        elif kind == "train":
            row = self._shared.row_of(ordinal)
            if self._rows is not None and row is not None:
                return self._rows.group(row, ordinal, self._training)
            problem = self.problem(self._shared.problem_of(ordinal))
        else:
            problem = self.problem(probed_version(ordinal))
        sampling = self._greedy if kind == "evaluation" else self._training
        tokens = tokens_to_bytes(prompt_tokens(self._tokenizer, problem))
        teacher = teacher_of(problem, self._teacher) if kind == "train" else ""
        return PromptGroup(ordinal, problem, tokens, sampling, kind, teacher=teacher)

    def problem(self, number: int) -> Problem:
        """The task's training problem with this number."""
        return self._task.problem(number)

    def typical_lengths(self, count: int = 100) -> tuple[float, float]:
        """Mean number of tokens of the first prompts, and of the answers that the task itself gives to them."""
        groups = [self.group(ordinal) for ordinal in range(count)]
        answers = [len(self._tokenizer.encode(group.problem.answer)) for group in groups]
        return sum(len(group.prompt_tokens) // 4 for group in groups) / count, sum(answers) / count

    def answer_length(self, problem: Problem, config: Config) -> int:
        """Tokens of the answer that a scorer looks for; 0 if none looks for a text."""
        scorers = {problem.scorer if name == "auto" else name for name in config.reward.scorers}
        if scorers & {"numeric", "math"}:
            return len(self._tokenizer.encode(gold_answer(problem.answer)))
        return len(self._tokenizer.encode(problem.answer)) if "exact" in scorers else 0

    def unreadable(self, problem: Problem) -> str:
        """The first piece of a problem that the model has no token for; empty if there is none."""
        texts = [turn.content for turn in problem.turns] if problem.turns else [problem.prompt]
        return next(filter(None, map(self._tokenizer.unreadable, texts)), "")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of an answer's tokens."""
        return self._tokenizer.decode(tokens)


def teacher_of(problem: Problem, settings: TeacherConfig) -> str:
    """Name of the teacher that answers to a problem are compared with; empty: none."""
    if not settings.by_name:
        return THE_TEACHER if settings else ""
    return str(problem.columns.get(settings.column) or problem.teacher)


_MAX_LOOKED_AT = 1000  # takes some tenths of a second


def check_lengths(prompts: Prompts, config: Config) -> list[str]:
    """Notes about prompts that are too long and will be dropped, and answers that no answer can hold; InputError if all
    prompts are. Looks only at the job's first prompts."""
    limit = config.generator.max_prompt_tokens
    asked: tuple[tuple[str, str, GroupKind, range], ...] = (
        ("prompts", "are dropped", "train", range(min(config.schedule.num_groups, _MAX_LOOKED_AT))),
        ("held-out prompts", "count as wrong", "evaluation", range(-min(prompts.evaluate.prompts, _MAX_LOOKED_AT), 0)),
    )
    notes: list[str] = []
    for what, fate, kind, ordinals in asked:
        groups = [prompts.group(ordinal, kind) for ordinal in ordinals]
        lengths = [len(group.prompt_tokens) // 4 for group in groups if group.written is None]
        problems = [group.problem for group in groups if group.written is None]
        notes += [*_unreadable(prompts, problems, what), *_not_given(prompts, problems, what, config)]
        wrong = sum(not 1 <= length <= limit for length in lengths)
        if not wrong:
            continue
        told = (
            f"{wrong} of the first {len(lengths)} {what} have no tokens, or more than generator.max_prompt_tokens={limit} "
            f"(the longest has {max(lengths)})"
        )
        if wrong == len(lengths):
            raise InputError(f"task: {told}")
        notes.append(f"NOTE: {told}; these {fate}")
    return notes


def _not_given(prompts: Prompts, problems: Sequence[Problem], what: str, config: Config) -> list[str]:
    """A note about answers that are longer than any that is sampled, for scorers that look for them."""
    limit = config.generator.max_new_tokens
    if config.conversation.tool:
        return []
    longer = [length for one in problems if (length := prompts.answer_length(one, config)) > limit]
    if not longer:
        return []
    return [
        f"NOTE: {len(longer)} of the first {len(problems)} {what} have answers of more than generator.max_new_tokens={limit} "
        f"tokens (the longest has {max(longer)}), which cannot be given"
    ]


def _unreadable(prompts: Prompts, problems: Sequence[Problem], what: str) -> list[str]:
    """A note about text that the model cannot read."""
    found = [piece for piece in map(prompts.unreadable, problems) if piece]
    if not found:
        return []
    pieces = ", ".join(ascii(piece[:20]) for piece in list(dict.fromkeys(found))[:3])
    return [
        f"NOTE: {len(found)} of the first {len(problems)} {what} hold text that the model's tokenizer has no token for, such "
        f"as {pieces}; the model reads one and the same token for all of it"
    ]
