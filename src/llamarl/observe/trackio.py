"""trackio: a local database (TRACKIO_DIR), or a Space or server that the environment names (TRACKIO_SPACE_ID)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.observe.metric_logger import ACCURACY, Kind, LoggedRun, MetricLogger, SampleRow


class Trackio(MetricLogger):
    """Logs rows with the update, or the evaluated version, as step. trackio knows runs by name, so the id is part of it."""

    _trackio: Any
    _run: Any

    def start(self, run: LoggedRun) -> Mapping[Kind, int]:
        import trackio
        import trackio.run

        for module in (trackio, trackio.run):
            vars(module)["print"] = _print_nothing  # its greetings would fall into the display of the job
        self._trackio = trackio
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return self._written(run)

    def _written(self, run: LoggedRun) -> dict[Kind, int]:
        """The first steps that the local database lacks: trackio writes in batches, so a kill loses the last ones."""
        if not getattr(self._run, "_is_local", True):
            return {}
        rows = self._trackio.SQLiteStorage.get_logs(run.project, run_id=self._run.id)
        names: tuple[tuple[str, Kind], ...] = (("update", "metrics"), (ACCURACY, "evaluations"))
        return {kind: max((int(row["step"]) for row in rows if name in row), default=-1) + 1 for name, kind in names}

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._run.log({"update": update, **values}, step=update)

    def log_evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=version)

    def log_samples(self, kind: Kind, step: int, rows: Sequence[SampleRow]) -> None:
        table = self._trackio.Table(columns=SampleRow.columns(), data=[row.cells() for row in rows])
        self._run.log({kind: table}, step=step)

    def finish(self, outcome: str) -> None:
        self._run.finish()


def _print_nothing(*args: object, **keywords: object) -> None:
    pass
