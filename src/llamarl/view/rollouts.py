"""Rollouts for the page: tables with filters, search in text, a group side by side, and one answer token by token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl.algo.advantages import TOKEN_ADVANTAGES, estimate_advantages, why_left_out
from llamarl.config import Config
from llamarl.observe.rollout_log import SavedGroup
from llamarl.tasks.extract import gold_answer
from llamarl.tasks.given_answer import given_answer
from llamarl.tasks.judge import FALLBACK
from llamarl.tasks.mixture import PartOrder
from llamarl.types import (
    Completion,
    PromptGroup,
    Rollout,
    RolloutGroup,
    bytes_to_floats,
    bytes_to_tokens,
    completions_of,
    sampled_places,
)
from llamarl.view.ledger_reader import LedgerReader
from llamarl.view.rollout_table import SORTS, STATUSES, RolloutTable, Row, problem_id
from llamarl.view.run_reader import RunReader
from llamarl.view.token_text import TokenText

MAX_ROWS = 200
MAX_COUNTED = 100_000
MAX_TOKENS = 4000  # of one answer in one reply
MAX_CHARS = 20_000  # of a prompt or another text in one reply
_PREVIEW_CHARS = 160
_SEARCH_S = 0.35  # time for one step of a search
_SEARCH_GROUPS = 20_000
_NAMES = ("ordinal", "sample", "update", "reward", "tokens", "version", "last_version", "status", "cut", "turns")
Query = Mapping[str, str]


def task_names(config: Config) -> list[str]:
    """What the tasks are called: that of the job, or the parts of its mixture."""
    parts = config.task.parts or (config.task,)
    names = [part.kind + (f" {Path(part.path).name}" if part.path else "") for part in parts]
    return names if len(set(names)) == len(names) else [f"{name} ({n + 1})" for n, name in enumerate(names)]


def task_numbers(config: Config) -> Callable[[int], int]:
    """Maps the ordinal of a group to the number of its task in `task_names`."""
    if not config.task.parts:
        return lambda ordinal: 0
    order = PartOrder([part.weight for part in config.task.parts], seed=config.seed)
    return lambda ordinal: order.locate(ordinal)[0]


class RolloutBook:
    """Answers questions about the rollouts of one run."""

    def __init__(self, run: RunReader, kept: RolloutTable, ledger: LedgerReader) -> None:
        self.run, self.kept, self.ledger = run, kept, ledger
        self.text, self.tasks = TokenText(run), task_names(run.config)

    # Tables

    def table(self, query: Query) -> dict[str, Any]:
        """A page of rollouts that match the filters; with `text`, a step of a search."""
        where, values = self._where(query)
        if query.get("text"):
            return self._search(query, where, values)
        order = self._order(query)
        limit, offset = _number(query, "limit", 50, MAX_ROWS), _number(query, "offset", 0, 1 << 40)
        rows = list(self.kept.select(where, values, order, limit, offset))
        return {
            "total": self.kept.count_up_to(where, values, MAX_COUNTED),
            "max_counted": MAX_COUNTED,
            "offset": offset,
            "rows": self._shown(rows),
            **self.state(),
        }

    def state(self) -> dict[str, Any]:
        """How far the index is, and what cannot be shown."""
        notes = [self.text.missing] if self.text.missing else []
        kept, all_groups = self.kept.count()
        if kept < all_groups:
            notes.append(
                f"{kept:,} of {all_groups:,} groups are kept (observe.rollouts_mb={self.run.config.observe.rollouts_mb}); "
                "all were trained on"
            )
        return {"indexed": round(self.kept.progress, 4), "groups": kept, "notes": notes}

    def histograms(self, query: Query) -> dict[str, Any]:
        where, values = self._where(query)
        return {name: self.kept.histogram(where, values, name, 24) for name in ("reward", "tokens")}

    def _order(self, query: Query) -> str:
        column = SORTS.get(query.get("sort", "ordinal"), "ordinal")
        way = "ASC" if query.get("way") == "up" else "DESC"
        return f"ordinal {way}, sample ASC" if column == "ordinal" else f"{column} {way}, ordinal {way}, sample {way}"

    def _where(self, query: Query) -> tuple[str, list[Any]]:
        """Our own SQL, and the values that it compares with."""
        parts: list[str] = []
        values: list[Any] = []
        for name, sql in _FILTERS.items():
            if (value := _float(query.get(name))) is not None:
                parts.append(sql)
                values.append(value)
        for name, sql in _FLAGS.items():
            if query.get(name) in ("0", "1"):
                parts.append(f"{sql} = {query[name]}")
        if (task := _float(query.get("task"))) is not None and self.run.config.task.parts:
            parts.append("task = ?")
            values.append(int(task))
        return " AND ".join(parts), values

    def _shown(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        found, groups = [], dict[int, SavedGroup | None]()
        for row in rows:
            shown = dict(zip(_NAMES, row[: len(_NAMES)], strict=True))
            ordinal = shown["ordinal"]
            if ordinal not in groups:
                groups[ordinal] = self.kept.group(ordinal)
            saved = groups[ordinal]
            shown["status"] = STATUSES[shown["status"]]
            shown["flat"], shown["problem"], shown["task"] = row[-3], str(row[-2]), self.tasks[row[-1]]
            if saved is not None:
                completions = completions_of(saved.group)
                shown["prompt"] = _short(_prompt(saved).problem.prompt, tail=True)
                tokens = bytes_to_tokens(completions[shown["sample"]].tokens)[:_PREVIEW_CHARS]
                shown["text"] = _short(self.text.text(tokens.tolist()))
            found.append(shown)
        return found

    # Search

    def _search(self, query: Query, where: str, values: list[Any]) -> dict[str, Any]:
        """Look through answers and prompts, newest first, for a short time; `before` continues where the last step ended."""
        wanted, limit = query["text"].casefold(), _number(query, "limit", 50, MAX_ROWS)
        before = _float(query.get("before"))
        if before is not None:
            where, values = " AND ".join(filter(None, [where, "ordinal < ?"])), [*values, int(before)]
        began, found, searched, last = time.monotonic(), list[Row](), 0, None
        saved: SavedGroup | None = None
        for row in self.kept.select(where, values, "ordinal DESC, sample ASC", _SEARCH_GROUPS * 8):
            if row[0] != last:
                if searched and (len(found) >= limit or time.monotonic() - began > _SEARCH_S):
                    break
                last, saved, searched = row[0], self.kept.group(row[0]), searched + 1
            if saved is not None:
                answer = self.text.text(bytes_to_tokens(completions_of(saved.group)[row[1]].tokens).tolist())
                if wanted in answer.casefold() or wanted in _prompt(saved).problem.prompt.casefold():
                    found.append(row)
        else:
            last = None
        return {"rows": self._shown(found), "searched": searched, "next_before": last, **self.state()}

    # One group

    def group(self, ordinal: int) -> dict[str, Any] | None:
        """A group side by side: its problem, and every answer with its reward."""
        saved = self.kept.group(ordinal)
        if saved is None:
            return None
        prompt, problem = _prompt(saved), _prompt(saved).problem
        return {
            "ordinal": ordinal,
            "update": saved.update,
            "dropped": saved.dropped,
            "problem_id": str(problem_id(prompt)),
            "prompt": _cut(problem.prompt),
            "prompt_tokens": len(prompt.prompt_tokens) // 4,
            "turns": [{"role": turn.role, "content": _cut(turn.content)} for turn in problem.turns],
            "answer": _cut(problem.answer),
            "scorer": self._scorers(prompt),
            "sampling": {"temperature": prompt.sampling.temperature, "max_new_tokens": prompt.sampling.max_new_tokens},
            "rollouts": [self._brief(saved, sample) for sample in range(len(completions_of(saved.group)))],
            "life": self.ledger.life(ordinal),
            **self.state(),
        }

    def _brief(self, saved: SavedGroup, sample: int) -> dict[str, Any]:
        """What is known of one answer, without its tokens one by one."""
        completion = completions_of(saved.group)[sample]
        rollout, advantage, reason = self._fate(saved, sample)
        text = self.text.text(bytes_to_tokens(completion.tokens)[:MAX_TOKENS].tolist())
        return {
            "sample": sample,
            "reward": rollout.reward if rollout else None,
            "advantage": advantage,
            "status": "dropped" if saved.dropped else "left out" if reason else "trained",
            "reason": saved.dropped or reason,
            "tokens": completion.num_tokens,
            "all_tokens": len(completion.tokens) // 4,
            "cut": completion.truncated,
            "turns": len(completion.given) + 1,
            "versions": [(run.version, run.count) for run in completion.versions],
            "text": _cut(text),
            "judged": self._judged(_prompt(saved), completion, rollout),
        }

    def _fate(self, saved: SavedGroup, sample: int) -> tuple[Rollout | None, float | None, str]:
        """The scored answer, its advantage, and why the update did not learn from it; none of them if it was not scored."""
        if not isinstance(saved.group, RolloutGroup):
            return None, None, ""
        algo, rollout = self.run.config.algo, saved.group.rollouts[sample]
        advantages = estimate_advantages(saved.group, algo)
        flat = not any(advantages) and TOKEN_ADVANTAGES not in rollout.columns
        return (
            rollout,
            _finite(advantages[sample]),
            why_left_out(rollout, flat=flat, algo=algo, prompt=saved.group.prompt),
        )

    # Judging

    def _scorers(self, prompt: PromptGroup) -> dict[str, float]:
        """Names and weights of the scorers that make up the reward."""
        reward = self.run.config.reward
        if reward.combine:
            return dict(reward.combine)
        return {(prompt.problem.scorer or FALLBACK) if reward.scorer == "auto" else reward.scorer: 1.0}

    def _judged(self, prompt: PromptGroup, completion: Completion, rollout: Rollout | None) -> dict[str, Any]:
        """The reward by part as it was recorded, and what the scorer's rule reads in the text."""
        if rollout is None:
            return {"note": "it was dropped before it was judged"}
        settings, problem, scorers = self.run.config.reward, prompt.problem, self._scorers(prompt)
        single = rollout.reward if len(scorers) == 1 and not settings.combine else None
        found: dict[str, Any] = {
            "parts": [
                {"scorer": name, "weight": weight, "value": rollout.parts.get(name, single)}
                for name, weight in scorers.items()
            ]
        }
        if self.text.missing:
            return found
        whole = self.run.config.conversation.judge != "last"
        text = self.text.text((bytes_to_tokens(completion.tokens) if whole else completion.last_turn).tolist())
        if not _COMPARING.isdisjoint(scorers):
            given = given_answer(text, problem, settings)
            worked = not {"numeric", "math"}.isdisjoint(scorers)
            found["extracted"] = None if given is None else _short(given, _MAX_EXTRACT)
            found["expected"] = _short(gold_answer(problem.answer) if worked else problem.answer, _MAX_EXTRACT)
            found["rule"] = f"reward.answer_from={settings.answer_from}" if worked else "the scorer's own rule"
        return found

    # One rollout

    def rollout(self, ordinal: int, sample: int, start: int = 0) -> dict[str, Any] | None:
        """The tokens of one answer from `start` on, with everything that is known of each."""
        saved = self.kept.group(ordinal)
        if saved is None or not 0 <= sample < len(completions_of(saved.group)):
            return None
        completion = completions_of(saved.group)[sample]
        tokens = bytes_to_tokens(completion.tokens).tolist()
        start = max(0, min(start, len(tokens)))
        end = min(len(tokens), start + MAX_TOKENS)
        known = _Known(saved, sample, self._fate(saved, sample)[1])
        pieces = self.text.pieces(tokens[start:end])
        return {
            "ordinal": ordinal,
            "sample": sample,
            "start": start,
            "end": end,
            "all_tokens": len(tokens),
            "tokens": [
                {"t": piece, "id": tokens[at], **known.of(at)}
                for at, piece in zip(range(start, end), pieces, strict=True)
            ],
            "prompt": self._prompt_text(_prompt(saved)),
            "update": saved.update,
            "has_policy": known.has_policy,
            "advantage_by_token": known.own_advantages,
            "brief": self._brief(saved, sample),
            **self.state(),
        }

    def _prompt_text(self, prompt: PromptGroup) -> dict[str, Any]:
        """The prompt as the model read it, special tokens included."""
        tokens = bytes_to_tokens(prompt.prompt_tokens).tolist()
        return _cut("".join(self.text.pieces(tokens[-MAX_TOKENS:])))

    def mean_prompt_tokens(self) -> float:
        """Over a few groups; 0 if none is kept."""
        rows = self.kept.select("sample = 0", [], "ordinal DESC", 32)
        groups = [saved for row in rows if (saved := self.kept.group(row[0])) is not None]
        lengths = [len(_prompt(saved).prompt_tokens) // 4 for saved in groups]
        return sum(lengths) / len(lengths) if lengths else 0.0


class _Known:
    """What is known of each token of an answer."""

    def __init__(self, saved: SavedGroup, sample: int, advantage: float | None) -> None:
        completion = completions_of(saved.group)[sample]
        num_tokens = len(completion.tokens) // 4
        self._number_of = {at: n for n, at in enumerate(sampled_places(num_tokens, completion.given).tolist())}
        self._behavior = bytes_to_floats(completion.behavior_logprobs)
        self._versions = [run.version for run in completion.versions for _ in range(run.count)]
        columns = saved.group.rollouts[sample].columns if isinstance(saved.group, RolloutGroup) else {}
        self._own = bytes_to_floats(columns[TOKEN_ADVANTAGES]) if TOKEN_ADVANTAGES in columns else None
        self._policy = bytes_to_floats(saved.policy_logprobs[sample] if sample < len(saved.policy_logprobs) else b"")
        self._advantage = advantage

    @property
    def has_policy(self) -> bool:
        """Whether the trainer's log-probs are recorded."""
        return bool(len(self._policy))

    @property
    def own_advantages(self) -> bool:
        """Whether each token has an advantage of its own."""
        return self._own is not None

    def of(self, at: int) -> dict[str, Any]:
        number = self._number_of.get(at)
        if number is None:
            return {"given": 1}
        found = {
            "lp": _at(self._behavior, number),
            "v": self._versions[number] if number < len(self._versions) else None,
            "a": self._advantage if self._own is None else _at(self._own, number),
        }
        return {**found, "pl": _at(self._policy, number)} if self.has_policy else found


def _prompt(saved: SavedGroup) -> PromptGroup:
    return saved.group if isinstance(saved.group, PromptGroup) else saved.group.prompt


_MAX_EXTRACT = 400
_COMPARING = {"exact", "numeric", "math", "choice"}  # scorers that compare an answer with the expected one
_FILTERS = {
    "update": "number = ?",
    "ordinal": "ordinal = ?",
    "reward_from": "reward >= ?",
    "reward_to": "reward <= ?",
    "tokens_from": "tokens >= ?",
    "tokens_to": "tokens <= ?",
    "version": "? BETWEEN version AND last_version",
    "problem": "problem = ?",
    "status": "status = ?",
}
_FLAGS = {"cut": "cut", "flat": "flat"}


def _number(query: Query, name: str, default: int, most: int) -> int:
    found = _float(query.get(name))
    return default if found is None else max(0, min(int(found), most))


def _float(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is None or math.isfinite(value) else None


def _finite(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def _at(values: Any, number: int) -> float | None:
    return _finite(float(values[number])) if number < len(values) else None


def _short(text: str, most: int = _PREVIEW_CHARS, *, tail: bool = False) -> str:
    if len(text) <= most:
        return text
    return "..." + text[-most:] if tail else text[:most] + "..."


def _cut(text: str) -> dict[str, Any]:
    """A text of bounded length, and how long it is in truth."""
    return {"text": text[:MAX_CHARS], "chars": len(text)}
