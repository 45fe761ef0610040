"""MLflow: the server or database that MLFLOW_TRACKING_URI names, or MLflow's own default."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from llamarl.observe.metric_logger import ACCURACY, Kind, LoggedRun, MetricLogger, SampleRow

_TAG = "llamarl.run"
_MAX_PARAM = 500  # characters of a parameter; older servers take no more
_MAX_PARAMS = 100  # in one request
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "stopped on request": "KILLED"}


class MLflow(MetricLogger):
    """Logs settings as parameters, metrics with the update and evaluations with the version as step, samples as tables."""

    _client: Any
    _id: str
    _tables: list[dict[str, str]]

    def start(self, run: LoggedRun) -> Mapping[Kind, int]:
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        import mlflow

        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        known = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        before = known[0] if known else self._client.create_run(experiment, run_name=run.name, tags={_TAG: run.id})
        self._id = before.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._log_settings(run, before.data.params)
        self._tables = msgspec.json.decode(before.data.tags.get("mlflow.loggedArtifacts", "[]"))
        return self._written() if known else {}

    def _log_settings(self, run: LoggedRun, known: Mapping[str, str]) -> None:
        """Parameters cannot change, so a setting that a resumed run changed becomes a tag; the whole is an artifact."""
        from mlflow.entities import Param, RunTag

        told = {key: str(value)[:_MAX_PARAM] for key, value in run.settings.items()}
        new = [Param(key, value) for key, value in told.items() if key not in known]
        changed = [RunTag(f"llamarl.{key}", value) for key, value in told.items() if known.get(key, value) != value]
        for at in range(0, max(1, len(new)), _MAX_PARAMS):
            self._client.log_batch(self._id, params=new[at : at + _MAX_PARAMS], tags=changed if not at else [])
        self._client.log_dict(self._id, dict(run.settings), f"settings/{run.start}.json")

    def _written(self) -> dict[Kind, int]:
        names: tuple[tuple[str, Kind], ...] = (("update", "metrics"), (ACCURACY, "evaluations"))
        steps = {kind: [one.step for one in self._client.get_metric_history(self._id, name)] for name, kind in names}
        return {kind: max(found, default=-1) + 1 for kind, found in steps.items()}

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._log(update, {"update": update, **values})

    def log_evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._log(version, values)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        rows = [Metric(name, float(value), now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=rows)

    def log_samples(self, kind: Kind, step: int, rows: Sequence[SampleRow]) -> None:
        """Writes what `mlflow.log_table` would, which needs pandas."""
        path = f"{kind}/{step:08}.json"
        table = {"columns": SampleRow.columns(), "data": [row.cells() for row in rows]}
        self._client.log_text(self._id, msgspec.json.encode(table).decode(), path)
        self._tables.append({"path": path, "type": "table"})
        self._client.set_tag(self._id, "mlflow.loggedArtifacts", msgspec.json.encode(self._tables[-50:]).decode())

    def finish(self, outcome: str) -> None:
        self._client.set_tag(self._id, "llamarl.outcome", outcome[:_MAX_PARAM])
        self._client.set_terminated(self._id, status=_STATUS.get(outcome, "FAILED"))
