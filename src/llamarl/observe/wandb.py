"""Weights & Biases: online, or into the run folder with WANDB_MODE=offline. Keys come from the environment alone."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llamarl.observe.metric_logger import EVALUATION, TRAINING, Kind, LoggedRun, MetricLogger, SampleRow

_OFFLINE = ("offline", "dryrun", "disabled")
_TABLES: tuple[Kind, ...] = (EVALUATION, TRAINING)
# The file of an offline run: a header of 7 bytes, then blocks of records, each with checksum, length and kind.
_BLOCK, _HEADER, _RECORD_END = 1 << 15, 7, (1, 4)


class WandB(MetricLogger):
    """Logs with the update as step. Evaluations have an axis of their own, `version`, since steps may not go back."""

    _wandb: Any
    _run: Any
    _step = 0

    def start(self, run: LoggedRun) -> Mapping[Kind, int]:
        import wandb

        folder = Path(os.environ.get("WANDB_DIR") or run.folder)
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        self._wandb, self._run = (
            wandb,
            wandb.init(
                project=run.project,
                name=run.name,
                id=run.id,
                resume=None if _is_offline() else "allow",
                dir=str(folder),
                config=dict(run.settings),
                allow_val_change=True,
                settings=settings,
            ),
        )
        self._run.define_metric("version")
        self._run.define_metric("held_out_accuracy", step_metric="version")
        found = _written_offline(folder, run.id) if self._run.offline else _written_online(self._run)
        self._step = found["metrics"]
        return found

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._step = update
        self._run.log({"update": update, **values}, step=update)

    def log_evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._run.log({"version": version, **values}, step=self._step)

    def log_samples(self, kind: Kind, step: int, rows: Sequence[SampleRow]) -> None:
        table = self._wandb.Table(columns=SampleRow.columns(), data=[row.cells() for row in rows])
        self._run.log({kind: table, f"{kind}_step": step}, step=self._step)

    def finish(self, outcome: str) -> None:
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


def _is_offline() -> bool:
    return os.environ.get("WANDB_MODE", "").lower() in _OFFLINE


def describe_missing_key() -> str:
    """A line if wandb would ask for a key, which a job cannot answer; else empty."""
    if _is_offline():
        return ""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return ""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    with suppress(OSError, UnicodeDecodeError):
        if host in netrc.read_text():
            return ""
    return "wandb has no key: set WANDB_API_KEY, or run `wandb login`, or set WANDB_MODE=offline"


def _written_online(run: Any) -> dict[Kind, int]:
    return {"metrics": int(run.starting_step)}


def _written_offline(folder: Path, run_id: str) -> dict[Kind, int]:
    """The first steps that the files of earlier starts lack. wandb writes them in large blocks, so a kill loses the last."""
    found: dict[Kind, int] = {"metrics": 0, "evaluations": 0, EVALUATION: 0, TRAINING: 0}
    names: dict[str, Kind] = {"update": "metrics", "version": "evaluations"}
    names |= {f"{kind}_step": kind for kind in _TABLES}
    for file in sorted((folder / "wandb").glob(f"offline-run-*-{run_id}/*.wandb")):
        for row in read_history(file):
            for name, kind in names.items():
                if name in row:
                    found[kind] = max(found[kind], int(row[name]) + 1)
    return found


def read_history(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file of an offline run, up to its torn end."""
    import msgspec
    from wandb.proto import wandb_internal_pb2

    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {"/".join(item.nested_key) or item.key: msgspec.json.decode(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    at, record = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        start, at = at + _HEADER, at + _HEADER + length
        if not kind or at > len(data):
            return
        record += data[start:at]
        if kind in _RECORD_END:
            yield record
            record = b""
