"""`llamarl score`: reads completions as JSON lines and writes one verdict per line, in the same order."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO, NamedTuple, TextIO, cast

from llamarl.errors import ConfigError
from llamarl.tasks.custom_scorers import ScorerRequirements
from llamarl.tasks.data_files import BadRow
from llamarl.tasks.judge import Judge, Judgment
from llamarl.tasks.programs import check_tests
from llamarl.types import Problem

_LINES_AHEAD = 16  # each may be 10 MB
_PATIENCE_S = 0.05
_NOTHING = ScorerRequirements()

# The result for one line: a judgment, or why the line could not be judged.
LineResult = Judgment | str


class ScoredCounts(NamedTuple):
    """Number of lines, and of those that got no reward."""

    lines: int
    failed: int


def score_lines(source: BinaryIO, target: TextIO, notes: TextIO, judge: Judge, scorer: str) -> ScoredCounts:
    """Judge the lines of `source` and write the verdicts to `target`. Reasons for failures go to `notes`."""
    session = _Session(target, notes, judge, scorer)
    session.run(source)
    return ScoredCounts(session.num_written, session.num_failed)


class _Session:
    """Reads ahead, so that several answers are judged at once, and writes verdicts in order."""

    def __init__(self, target: TextIO, notes: TextIO, judge: Judge, scorer: str) -> None:
        self._target, self._notes, self._judge, self._scorer = target, notes, judge, scorer
        self._wanted = judge.wanted
        self._results: dict[int, LineResult] = {}  # verdicts that wait for those of earlier lines
        self._num_read = self.num_written = self.num_failed = 0

    def run(self, source: BinaryIO) -> None:
        lines: queue.Queue[bytes | None] = queue.Queue(_LINES_AHEAD)
        threading.Thread(target=_feed, args=(source, lines), daemon=True).start()
        more = True
        while more or self._num_in_progress:
            if more and self._num_in_progress < _LINES_AHEAD:
                more = self._submit_lines(lines)
            self._write_finished()

    @property
    def _num_in_progress(self) -> int:
        return self._num_read - self.num_written

    def _submit_lines(self, lines: queue.Queue[bytes | None]) -> bool:
        """Submit the lines that have arrived, or wait for one if nothing is in progress. Returns False at the end."""
        for line in _arrived(lines, wait=not self._num_in_progress):
            if line is None:
                return False
            number, self._num_read = self._num_read, self._num_read + 1
            try:
                completion, problem = read_line(line, self._scorer, self._wanted)
            except ValueError as error:
                self._results[number] = str(error)
            else:
                self._judge.ask(number, completion, problem)
        return True

    def _write_finished(self) -> None:
        for key, outcome in self._judge.collect(0.0 if self._results else _PATIENCE_S):
            self._results[cast(int, key)] = outcome
        while self.num_written in self._results:
            result = self._results.pop(self.num_written)
            self.num_written += 1
            self.num_failed += isinstance(result, str) or result.status != "ok"
            _write(self._target, self._notes, self.num_written, result)


def _feed(source: BinaryIO, lines: queue.Queue[bytes | None]) -> None:
    try:
        for line in source:
            lines.put(line)
    finally:
        lines.put(None)


def _arrived(lines: queue.Queue[bytes | None], *, wait: bool) -> Iterator[bytes | None]:
    """Yield the lines that have arrived; with `wait`, wait for the first."""
    if wait:
        yield lines.get()
    with suppress(queue.Empty):
        for _ in range(_LINES_AHEAD):
            yield lines.get_nowait()


def read_line(line: bytes, scorer: str, wanted: ScorerRequirements = _NOTHING) -> tuple[str, Problem]:
    """Parse one line. Raises ValueError if it is invalid. Lone surrogates are allowed, since models write them."""
    try:
        row = json.loads(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {str(error)[:100]}") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    answer = _tests(row["tests"]) if "tests" in row else _text(row, "answer", None if wanted.answer else "")
    prompt = _text(row, "prompt", "")
    try:
        columns = wanted.of(row, beside=("completion", "answer", "prompt", "tests"))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return _text(row, "completion"), Problem(prompt, answer, scorer=scorer, columns=columns)


def _tests(value: object) -> str:
    try:
        return check_tests(value)
    except BadRow as error:
        raise ValueError(str(error)) from None


def _text(row: dict[str, object], field: str, default: object = None) -> str:
    value = row.get(field, default)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"'{field}' must be text")
    return value


def _write(target: TextIO, notes: TextIO, number: int, result: LineResult) -> None:
    """Write the verdict as a line of three fields. A reason, if there is one, goes to `notes`."""
    if isinstance(result, str):
        row: dict[str, object] = {"reward": None, "status": "bad input", "seconds": 0.0}
        reason = result
    else:
        reward = result.reward if result.status == "ok" else None
        row = {"reward": reward, "status": result.status, "seconds": round(result.seconds, 6)}
        reason = result.reason
    if reason:
        print(f"line {number}: {ascii(reason)[1:-1]}", file=notes)
    print(json.dumps(row), file=target, flush=True)
