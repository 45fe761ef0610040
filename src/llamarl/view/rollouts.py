"""Rollouts for the page: tables with filters, search in text, a group side by side, and one answer token by token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl.algo.advantages import TOKEN_ADVANTAGES, advantages_for
from llamarl.config import Config
from llamarl.tasks.extract import final_answer, gold_answer
from llamarl.tasks.mixture import PartOrder
from llamarl.tasks.scorers import make_safe_scorer
from llamarl.types import (
    Completion,
    Rollout,
    RolloutGroup,
    bytes_to_floats,
    bytes_to_tokens,
    sampled_places,
)
from llamarl.view.ledger_reader import LedgerReader
from llamarl.view.rollout_index import SORTS, RolloutIndex, problem_id
from llamarl.view.run_reader import RunReader
from llamarl.view.token_text import TokenText

MAX_ROWS = 200
MAX_COUNTED = 100_000
MAX_TOKENS = 4000  # of one answer in one reply
MAX_CHARS = 20_000  # of a prompt or another text in one reply
_PREVIEW_CHARS = 160
_SEARCH_S = 0.35  # time for one step of a search
_SEARCH_GROUPS = 20_000
POLICY_COLUMN = "policy_logprobs"  # the column with the trainer's log-probs, in runs that record it
_NAMES = ("ordinal", "sample", "reward", "tokens", "version", "last_version", "cut", "turns", "flat", "problem", "task")
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

    def __init__(self, run: RunReader, index: RolloutIndex, ledger: LedgerReader) -> None:
        self.run, self.index, self.ledger = run, index, ledger
        self.text, self.tasks = TokenText(run), task_names(run.config)

    # Tables

    def table(self, query: Query) -> dict[str, Any]:
        """A page of rollouts that match the filters; with `text`, a step of a search."""
        where, values = self._where(query)
        if query.get("text"):
            return self._search(query, where, values)
        order = self._order(query)
        limit, offset = _number(query, "limit", 50, MAX_ROWS), _number(query, "offset", 0, 1 << 40)
        rows = self.index.select(where, values, order, limit, offset)
        return {
            "total": self.index.count_up_to(where, values, MAX_COUNTED),
            "max_counted": MAX_COUNTED,
            "offset": offset,
            "rows": self._shown(rows),
            **self.state(),
        }

    def state(self) -> dict[str, Any]:
        """How far the index is, and what cannot be shown."""
        notes = [self.text.missing] if self.text.missing else []
        return {"indexed": round(self.index.progress, 4), "groups": self.index.count(), "notes": notes}

    def histograms(self, query: Query) -> dict[str, Any]:
        where, values = self._where(query)
        return {name: self.index.histogram(where, values, name, 24) for name in ("reward", "tokens")}

    def _order(self, query: Query) -> str:
        column = SORTS.get(query.get("sort", "ordinal"), "ordinal")
        way = "ASC" if query.get("way") == "up" else "DESC"
        return f"ordinal {way}, sample ASC" if column == "ordinal" else f"{column} {way}, ordinal DESC, sample ASC"

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
        if (update := _float(query.get("update"))) is not None:
            sql, found = self._of_update(int(update))
            parts.append(sql)
            values += found
        if (task := _float(query.get("task"))) is not None and self.run.config.task.parts:
            parts.append("task = ?")
            values.append(int(task))
        return " AND ".join(parts), values

    def _of_update(self, update: int) -> tuple[str, list[Any]]:
        schedule = self.run.config.schedule
        if schedule.window <= 1:
            size = schedule.groups_per_update
            return "ordinal >= ? AND ordinal < ?", [update * size, (update + 1) * size]
        self.ledger.refresh()
        batch = self.ledger.batch(update)
        return f"ordinal IN ({','.join('?' * len(batch))})", list(batch)

    def update_of(self, ordinal: int) -> int | None:
        """The update of a group: in order it follows from the ordinal, with a window from the ledger."""
        schedule = self.run.config.schedule
        if schedule.window <= 1:
            return ordinal // schedule.groups_per_update
        return self.ledger.update_of(ordinal)

    def _shown(self, rows: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        found, groups = [], dict[int, RolloutGroup | None]()
        for row in rows:
            shown = dict(zip(_NAMES, row, strict=True))
            ordinal = shown["ordinal"]
            if ordinal not in groups:
                groups[ordinal] = self.index.group(ordinal)
            group = groups[ordinal]
            shown["problem"] = str(shown["problem"])
            shown["task"] = self.tasks[shown["task"]]
            shown["update"] = self.update_of(ordinal)
            if group is not None and shown["sample"] < len(group.rollouts):
                shown["prompt"] = _short(group.prompt.problem.prompt, tail=True)
                tokens = bytes_to_tokens(group.rollouts[shown["sample"]].completion.tokens)[:_PREVIEW_CHARS]
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
        began, found, searched, last = time.monotonic(), list[tuple[Any, ...]](), 0, None
        group: RolloutGroup | None = None
        for row in self.index.select(where, values, "ordinal DESC, sample ASC", _SEARCH_GROUPS * 8):
            if row[0] != last:
                if len(found) >= limit or time.monotonic() - began > _SEARCH_S:
                    break
                last, group, searched = row[0], self.index.group(row[0]), searched + 1
            if group is not None and row[1] < len(group.rollouts):
                answer = self.text.text(bytes_to_tokens(group.rollouts[row[1]].completion.tokens).tolist())
                if wanted in answer.casefold() or wanted in group.prompt.problem.prompt.casefold():
                    found.append(row)
        else:
            last = None
        return {"rows": self._shown(found), "searched": searched, "next_before": last, **self.state()}

    # One group

    def group(self, ordinal: int) -> dict[str, Any] | None:
        """A group side by side: its problem, and every answer with its reward."""
        group = self.index.group(ordinal)
        if group is None:
            return None
        advantages = self._advantages(group)
        problem = group.prompt.problem
        return {
            "ordinal": ordinal,
            "update": self.update_of(ordinal),
            "problem_id": str(problem_id(group)),
            "prompt": _cut(problem.prompt),
            "prompt_tokens": len(group.prompt.prompt_tokens) // 4,
            "turns": [{"role": turn.role, "content": _cut(turn.content)} for turn in problem.turns],
            "answer": _cut(problem.answer),
            "scorer": self._scorer(group),
            "sampling": {
                "temperature": group.prompt.sampling.temperature,
                "max_new_tokens": group.prompt.sampling.max_new_tokens,
            },
            "rollouts": [
                self._brief(group, sample, rollout, advantages[sample]) for sample, rollout in enumerate(group.rollouts)
            ],
            "life": self.ledger.life(ordinal),
            **self.state(),
        }

    def _brief(self, group: RolloutGroup, sample: int, rollout: Rollout, advantage: float) -> dict[str, Any]:
        completion = rollout.completion
        tokens = bytes_to_tokens(completion.tokens)[:MAX_TOKENS].tolist()
        text = self.text.text(tokens)
        return {
            "sample": sample,
            "reward": rollout.reward,
            "advantage": advantage,
            "tokens": completion.num_tokens,
            "all_tokens": len(completion.tokens) // 4,
            "cut": completion.truncated,
            "turns": len(completion.given) + 1,
            "versions": [(run.version, run.count) for run in completion.versions],
            "text": _cut(text),
            "judged": self._judged(group, completion),
        }

    def _advantages(self, group: RolloutGroup) -> list[float]:
        algo = self.run.config.algo
        try:
            return advantages_for(algo.advantage, algo.loss)(group.rewards)
        except ZeroDivisionError:  # a group of one answer has no others to compare with
            return [math.nan] * len(group.rewards)

    # Judging

    def _scorer(self, group: RolloutGroup) -> dict[str, float]:
        """Names and weights of the scorers that made the reward."""
        reward = self.run.config.reward
        if reward.combine:
            return dict(reward.combine)
        return {(group.prompt.problem.scorer or "exact") if reward.scorer == "auto" else reward.scorer: 1.0}

    def _judged(self, group: RolloutGroup, completion: Completion) -> dict[str, Any]:
        """What a scorer reads in the answer, worked out again from its text; parts by scorers that are not pure are not
        recorded, and said so."""
        if self.text.missing:
            return {"note": "not worked out: without a tokenizer there is no text"}
        settings, problem = self.run.config.reward, group.prompt.problem
        tokens = (
            completion.last_turn if self.run.config.conversation.judge == "last" else bytes_to_tokens(completion.tokens)
        )
        text = self.text.text(tokens.tolist())
        parts = []
        for name, weight in self._scorer(group).items():
            scorer = make_safe_scorer(name, settings)
            value = scorer(text, problem.answer, problem.prompt) if scorer else None
            parts.append({"scorer": name, "weight": weight, "value": value})
        found: dict[str, Any] = {"parts": parts}
        if any(part["scorer"] in ("numeric", "math") for part in parts):
            formulas = any(part["scorer"] == "math" for part in parts)
            found["extracted"] = _short(final_answer(text, settings.answer_from, formulas=formulas) or "", 400)
            found["expected"] = _short(gold_answer(problem.answer), 400)
            found["rule"] = f"reward.answer_from={settings.answer_from}"
        elif any(part["scorer"] in ("exact", "choice") for part in parts):
            found["extracted"], found["expected"] = _short(text.strip(), 400), _short(problem.answer, 400)
            found["rule"] = "the whole answer, without white space around it"
        return found

    # One rollout

    def rollout(self, ordinal: int, sample: int, start: int = 0) -> dict[str, Any] | None:
        """The tokens of one answer from `start` on, with everything that is known of each."""
        group = self.index.group(ordinal)
        if group is None or not 0 <= sample < len(group.rollouts):
            return None
        rollout = group.rollouts[sample]
        completion = rollout.completion
        tokens = bytes_to_tokens(completion.tokens).tolist()
        start = max(0, min(start, len(tokens)))
        end = min(len(tokens), start + MAX_TOKENS)
        places = sampled_places(len(tokens), completion.given).tolist()
        place_of = {place: number for number, place in enumerate(places) if start <= place < end}
        logprobs = bytes_to_floats(completion.behavior_logprobs)
        versions = [run.version for run in completion.versions for _ in range(run.count)]
        advantage = self._advantages(group)[sample]
        own = bytes_to_floats(rollout.columns[TOKEN_ADVANTAGES]) if TOKEN_ADVANTAGES in rollout.columns else None
        policy = bytes_to_floats(rollout.columns[POLICY_COLUMN]) if POLICY_COLUMN in rollout.columns else None
        shown: list[dict[str, Any]] = []
        for at, piece in zip(range(start, end), self.text.pieces(tokens[start:end]), strict=True):
            token: dict[str, Any] = {"t": piece, "id": tokens[at]}
            number = place_of.get(at)
            if number is None:
                token["given"] = 1
            else:
                token["lp"] = _rounded(logprobs, number)
                token["v"] = versions[number] if number < len(versions) else None
                token["a"] = _rounded(own, number) if own is not None else _finite(advantage)
                if policy is not None:
                    token["pl"] = _rounded(policy, number)
            shown.append(token)
        return {
            "ordinal": ordinal,
            "sample": sample,
            "start": start,
            "end": end,
            "all_tokens": len(tokens),
            "tokens": shown,
            "prompt": self._prompt_text(group),
            "update": self.update_of(ordinal),
            "has_policy": policy is not None,
            "advantage_by_token": own is not None,
            "brief": self._brief(group, sample, rollout, advantage),
            **self.state(),
        }

    def _prompt_text(self, group: RolloutGroup) -> dict[str, Any]:
        """The prompt as the model read it, special tokens included."""
        tokens = bytes_to_tokens(group.prompt.prompt_tokens).tolist()
        return _cut("".join(self.text.pieces(tokens[-MAX_TOKENS:])))

    def mean_prompt_tokens(self) -> float:
        """Over a few groups of the store; 0 if there are none."""
        rows = self.index.select("sample = 0", [], "ordinal DESC", 32)
        lengths = [len(group.prompt.prompt_tokens) // 4 for group in self.index.groups([row[0] for row in rows])]
        return sum(lengths) / len(lengths) if lengths else 0.0


_FILTERS = {
    "ordinal": "ordinal = ?",
    "reward_from": "reward >= ?",
    "reward_to": "reward <= ?",
    "tokens_from": "tokens >= ?",
    "tokens_to": "tokens <= ?",
    "version": "? BETWEEN version AND last_version",
    "problem": "problem = ?",
    "turns_from": "turns >= ?",
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


def _rounded(values: Any, number: int) -> float | None:
    return _finite(float(values[number])) if number < len(values) else None


def _short(text: str, most: int = _PREVIEW_CHARS, *, tail: bool = False) -> str:
    if len(text) <= most:
        return text
    return "..." + text[-most:] if tail else text[:most] + "..."


def _cut(text: str) -> dict[str, Any]:
    """A text of bounded length, and how long it is in truth."""
    return {"text": text[:MAX_CHARS], "chars": len(text)}
