"""The data behind the page: one function for each address, from a query to plain values. The server and `--out` both ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl.errors import InputError
from llamarl.observe.rollout_log import ROLLOUTS
from llamarl.observe.run_folder import LEDGER
from llamarl.view.compare import curves, settings_that_differ, shared_problems, totals
from llamarl.view.ledger_reader import LedgerReader
from llamarl.view.overview import overview, series
from llamarl.view.predicted import PredictedRun
from llamarl.view.rollout_table import RolloutTable
from llamarl.view.rollouts import RolloutBook, task_numbers
from llamarl.view.run_reader import RunReader
from llamarl.view.timeline import predicted_lanes, timeline

Query = Mapping[str, str]
_LAST = 1 << 60
_INDEX_EVERY_S = 3.0
_FIRST_VIEW_S = 2.0  # the first view is drawn before the table of rollouts is begun


MAX_SERIES = 128  # in one answer


class NotThere(Exception):
    """The address names something that the run does not have."""


class ViewedRun:
    """One run with all its readers."""

    def __init__(self, path: Path, gpu: str) -> None:
        self.reader = RunReader(path)
        self.ledger = LedgerReader(path / LEDGER)
        config = self.reader.config
        self.kept = RolloutTable(path, path / ROLLOUTS, config, task_numbers(config))
        self.book = RolloutBook(self.reader, self.kept, self.ledger)
        self.prediction = PredictedRun(self.reader, gpu)
        self._answers: dict[str, Callable[[Query], Any]] = {
            "overview": lambda query: overview(self.reader),
            "series": self._series,
            "timeline": self._timeline,
            "predicted": self._predicted,
            "audit": lambda query: self.ledger.audit(),
            "groups": self._groups,
            "rollouts": self.book.table,
            "histograms": self.book.histograms,
            "group": self._group,
            "rollout": self._rollout,
        }

    def answer(self, name: str, query: Query) -> Any:
        if name not in self._answers:
            raise NotThere(f"no data called {name}")
        self.reader.refresh()
        if name not in ("overview", "series", "timeline"):
            return self._answers[name](query)
        with self.reader.lock:
            return self._answers[name](query)

    def _series(self, query: Query) -> Any:
        names = [name for name in query.get("names", "reward").split(",") if name][:MAX_SERIES]
        return series(self.reader, names, _int(query, "first", 0), _int(query, "last", 0), _int(query, "points", 600))

    def _timeline(self, query: Query) -> Any:
        window = (_int(query, "start", -1), _real(query, "from"), _real(query, "to"), _int(query, "bins", 600))
        return timeline(self.reader, window)

    def _predicted(self, query: Query) -> Any:
        prompt = self.book.mean_prompt_tokens()
        return predicted_lanes(
            self.prediction, prompt, _real(query, "from"), _real(query, "to"), _int(query, "bins", 600)
        )

    def _groups(self, query: Query) -> Any:
        limit = max(1, min(_int(query, "limit", 50), 200))
        return self.ledger.groups(query.get("state", ""), _int(query, "offset", 0), limit, _int(query, "around", -1))

    def _group(self, query: Query) -> Any:
        found = self.book.group(_int(query, "ordinal", -1))
        if found is None:
            raise NotThere(self._not_kept(_int(query, "ordinal", -1)))
        return found

    def _rollout(self, query: Query) -> Any:
        ordinal = _int(query, "ordinal", -1)
        found = self.book.rollout(ordinal, _int(query, "sample", 0), _int(query, "start", 0))
        if found is None:
            raise NotThere(self._not_kept(ordinal))
        return found

    def _not_kept(self, ordinal: int) -> str:
        return f"group {ordinal} is not in the run folder: it is not trained yet, or was not kept (observe.rollouts_mb)"


class ViewData:
    """All runs of the page. `follow` keeps the tables of rollouts up to date in a thread of its own."""

    def __init__(self, paths: Sequence[Path], gpu: str = "") -> None:
        if len({path.resolve() for path in paths}) < len(paths):
            raise InputError("RUN: the same run folder is named twice")
        self.runs = [ViewedRun(path, gpu) for path in paths]
        self._stop, self._asked = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def answer(self, path: str, query: Query) -> Any:
        """The data of an address such as `live`, `compare` or `run/0/series`."""
        parts = path.strip("/").split("/")
        self._asked.set()
        if parts == ["live"]:
            return self._live()
        if parts[0] == "compare" and len(parts) == 2:
            return self._compare(parts[1], query)
        if len(parts) == 3 and parts[0] == "run" and parts[1].isdigit() and int(parts[1]) < len(self.runs):
            return self.runs[int(parts[1])].answer(parts[2], query)
        raise NotThere(f"nothing at {path}")

    def _live(self) -> Any:
        for run in self.runs:
            run.reader.refresh()
        return [
            {
                "name": run.reader.name,
                "state": run.reader.state[0],
                "updates": run.reader.num_updates,
                "updates_of": run.reader.config.schedule.updates,
                "stamp": f"{run.reader.stamp}.{run.kept.progress:.3f}",
                "indexed": round(run.kept.progress, 4),
                "tasks": run.book.tasks,
            }
            for run in self.runs
        ]

    def _compare(self, name: str, query: Query) -> Any:
        readers = [run.reader for run in self.runs]
        for reader in readers:
            reader.refresh()
        match name:
            case "curves":
                return curves(readers, query.get("metric", "reward"))
            case "settings":
                return {"runs": [totals(reader) for reader in readers], "settings": settings_that_differ(readers)}
            case "problems":
                return shared_problems([run.book for run in self.runs])
        raise NotThere(f"no comparison called {name}")

    def index(self) -> None:
        """Take in all rollouts now."""
        for run in self.runs:
            run.kept.grow()

    def follow(self) -> None:
        """Keep the tables of rollouts up to date while somebody looks at the page."""
        self._thread = threading.Thread(target=self._grow, name="view-index", daemon=True)
        self._thread.start()

    def _grow(self) -> None:
        for run in self.runs:  # before anybody asks
            run.reader.refresh()
            run.reader.spans()
        self._asked.wait()
        self._stop.wait(_FIRST_VIEW_S)
        while not self._stop.wait(0.2):
            if self._asked.wait(1.0):
                self._asked.clear()
                for run in self.runs:
                    run.kept.grow(self._stop)
                self._stop.wait(_INDEX_EVERY_S)

    def close(self) -> None:
        self._stop.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.join()


def _int(query: Query, name: str, default: int) -> int:
    try:
        return max(-_LAST, min(int(query.get(name, default)), _LAST))
    except ValueError:
        return default


def _real(query: Query, name: str) -> float:
    try:
        value = float(query.get(name, 0.0))
    except ValueError:
        return 0.0
    return value if abs(value) < _LAST else 0.0
