"""Each logger with its real package (`make test-loggers`): the log of a killed and resumed run has each step once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.killing import TINY
from helpers.small_model import small_model
from msgspec.structs import replace

for _package in ("tensorboard", "wandb", "trackio", "mlflow"):
    pytest.importorskip(_package)

pytestmark = pytest.mark.timeout(600)
LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")
# Deterministic, and with a learning rate that does not depend on the number of updates, so that what is made again is equal.
SETTINGS = [
    *TINY,
    *small_model(),
    "schedule.deterministic=true",
    "trainer.final_lr_share=1",
    "snapshots.every=5",
    "evaluate.prompts=4",
    "evaluate.every=4",
]
KEY = "0123456789abcdef0123456789abcdef01234567"  # of the right form for wandb
DEADLINE_S = 240.0


class LoggedRuns(NamedTuple):
    """A run that was killed and resumed, and where its loggers wrote."""

    folder: Path
    home: Path  # of databases that are not in the run folder
    killed_at: int  # updates that were made when it was killed
    updates: int
    output: str

    def rows(self) -> dict[int, dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return {row["update"]: row for row in map(json.loads, lines)}

    def accuracies(self) -> dict[int, float]:
        lines = (self.folder / "evaluations.jsonl").read_text().splitlines()
        return {row["version"]: row["accuracy"] for row in map(json.loads, lines)}

    @property
    def run_id(self) -> str:
        return (self.folder / "loggers" / "run_id").read_text().strip()


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(home / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{home / 'mlflow.db'}",
        "HOME": str(home),
    }


def train(folder: Path, *settings: str, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llamarl", "train", *SETTINGS, *settings, "--run", str(folder)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=env["HOME"]
    )


def marks(folder: Path) -> dict[str, int]:
    """How far each logger says that it is."""
    found = {}
    for name in LOGGERS:
        try:
            found[name] = json.loads((folder / "loggers" / f"{name}.json").read_text()).get("metrics", 0)
        except FileNotFoundError:
            found[name] = 0
    return found


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedRuns]:
    home = tmp_path_factory.mktemp("home")
    folder, env = home / "run", environment(home)
    named = f"observe.loggers=[{', '.join(LOGGERS)}]"
    job = train(folder, named, "observe.samples_every=5", "schedule.updates=100000", env=env)
    deadline_s = time.monotonic() + DEADLINE_S
    while min(marks(folder).values()) < 12:
        assert time.monotonic() < deadline_s and job.poll() is None, (marks(folder), job.poll())
        time.sleep(0.05)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    killed_at = len((folder / "metrics.jsonl").read_text().splitlines())
    updates = max(killed_at, *marks(folder).values()) + 10
    again = train(
        folder,
        named,
        "observe.samples_every=5",
        "observe.wait_s=120",
        f"schedule.updates={updates}",
        "--resume",
        env=env,
    )
    output, _ = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, output
    yield LoggedRuns(folder, home, killed_at, updates, output)


def test_the_output_is_ours_alone(logged: LoggedRuns) -> None:
    assert "wandb:" not in logged.output and "Trackio" not in logged.output and "INFO mlflow" not in logged.output
    assert "logger " not in logged.output, "a note about a logger"
    assert 0 < logged.killed_at < len(logged.rows()) == logged.updates


def test_tensorboard_reads_every_update_once(logged: LoggedRuns) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(logged.folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    rewards = [(event.step, event.value) for event in found.Scalars("reward")]
    assert [step for step, _ in rewards] == list(range(logged.updates))
    assert [value for _, value in rewards] == pytest.approx([row["reward"] for row in logged.rows().values()])
    accuracies = {event.step: event.value for event in found.Scalars("held_out_accuracy")}
    assert accuracies == pytest.approx(logged.accuracies())
    assert len(found.Scalars("held_out_accuracy")) == len(accuracies)
    assert {event.value for event in found.Scalars("start")} == {0.0, 1.0}
    text = found.Tensors("training_samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "reward" in text and "\n    " in text
    assert b"trainer.lr" in found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def test_wandb_has_every_update_once_in_its_offline_files(logged: LoggedRuns) -> None:
    from llamarl.observe.wandb import read_history

    files = sorted((logged.folder / "wandb").glob(f"offline-run-*-{logged.run_id}/*.wandb"))
    assert len(files) == 2, "one for each start"
    rows = [row for file in files for row in read_history(file)]
    steps = [row["update"] for row in rows if "update" in row]
    assert steps == list(range(logged.updates))
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows}), "steps go forward"
    expected = [row["reward"] for row in logged.rows().values()]
    assert [row["reward"] for row in rows if "update" in row] == pytest.approx(expected)
    found = [(row["version"], row["held_out_accuracy"]) for row in rows if "version" in row]
    assert dict(found) == pytest.approx(logged.accuracies()) and len(found) == len(dict(found))
    tables = sorted((logged.folder / "wandb").glob("offline-run-*/files/media/table/training_samples_*.json"))
    assert json.loads(tables[-1].read_text())["columns"][:3] == ["ordinal", "prompt", "answer"]


def test_trackio_has_every_update_once_in_one_run(logged: LoggedRuns) -> None:
    script = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; "
        "(run,) = S.get_runs('llamarl'); "
        "print(json.dumps([run, S.get_logs('llamarl', run), S.get_run_config('llamarl', run)], default=str))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], env=environment(logged.home), capture_output=True, text=True, check=True
    ).stdout
    run, rows, config = json.loads(out.splitlines()[-1])
    assert run == f"run-{logged.run_id}"
    updates = [row for row in rows if "update" in row]
    assert [row["step"] for row in updates] == [row["update"] for row in updates] == list(range(logged.updates))
    assert [row["reward"] for row in updates] == pytest.approx([row["reward"] for row in logged.rows().values()])
    accuracies = [(row["step"], row["held_out_accuracy"]) for row in rows if "held_out_accuracy" in row]
    assert dict(accuracies) == pytest.approx(logged.accuracies()) and len(accuracies) == len(dict(accuracies))
    assert config["snapshots.every"] == 5
    (table, *_) = [row["training_samples"] for row in rows if "training_samples" in row]
    assert set(table["_value"][0]) == {"ordinal", "prompt", "answer", "expected", "reward", "num_tokens", "truncated"}


def test_mlflow_has_every_update_once_in_one_run(logged: LoggedRuns) -> None:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=environment(logged.home)["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("llamarl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward")
    assert sorted(one.step for one in history) == list(range(logged.updates))
    found = {one.step: one.value for one in history}
    assert found == pytest.approx({update: row["reward"] for update, row in logged.rows().items()})
    accuracies = client.get_metric_history(run.info.run_id, "held_out_accuracy")
    assert sorted(one.step for one in accuracies) == sorted(logged.accuracies())
    assert run.data.params["trainer.lr"] and run.data.params["schedule.updates"] == "100000"
    assert run.data.tags["llamarl.schedule.updates"] == str(logged.updates), "a setting that was changed on the way"
    assert run.data.tags["llamarl.outcome"] == "finished"
    tables = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert {one["type"] for one in tables} == {"table"}


def test_services_that_nobody_answers_neither_stop_nor_hold_up_a_job(tmp_path: Path) -> None:
    env = environment(tmp_path) | {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": KEY,
        "MLFLOW_TRACKING_URI": "http://user:hunter2hunter2@127.0.0.1:9",
        "TRACKIO_SERVER_URL": f"http://127.0.0.1:9/?write_token={KEY}",
    }
    named = f"observe.loggers=[{', '.join(LOGGERS)}]"
    job = train(tmp_path / "run", named, "schedule.updates=10", "observe.wait_s=3", env=env)
    output, _ = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, output
    assert "updates" in output and "Traceback" not in output
    for name in ("wandb", "mlflow"):
        assert sum(line.startswith(f"logger {name} ") for line in output.splitlines()) == 1, output
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    for secret in (KEY, "hunter2"):
        assert secret not in output and not any(secret.encode() in data for data in written)


def test_an_unknown_logger_starts_nothing(tmp_path: Path) -> None:
    job = train(tmp_path / "run", "observe.loggers=tensorbord", env=environment(tmp_path))
    output, _ = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 2 and not (tmp_path / "run").exists()
    assert output == (
        "llamarl: observe.loggers: no logger 'tensorbord'; did you mean 'tensorboard'? "
        "There are tensorboard, wandb, trackio, mlflow\n"
    )


def test_tensorboard_writes_an_update_again_that_a_kill_cut_short(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from llamarl.observe.metric_logger import LoggedRun
    from llamarl.observe.tensorboard import TensorBoard

    run = LoggedRun("0" * 12, "name", "project", tmp_path, {})
    first = TensorBoard()
    assert first.start(run) == {}
    for update in range(4):
        first.log_metrics(update, {"reward": 0.1 * update})
    first.log_evaluation(3, {"held_out_accuracy": 0.5})
    first.log_metrics(4, {"reward": 9.0})  # of update 4, only a part is there
    again = TensorBoard()
    lacks = again.start(replace(run, start=1, sent={"metrics": 5, "evaluations": 4}))
    assert lacks == {"metrics": 4, "evaluations": 4}
    for update in range(4, 6):
        again.log_metrics(update, {"reward": 0.1 * update, "loss": 1.0})
    for logger in (first, again):
        logger.finish("finished")
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    assert [(one.step, round(one.value, 1)) for one in found.Scalars("reward")] == [
        (n, round(0.1 * n, 1)) for n in range(6)
    ]
    assert [one.step for one in found.Scalars("held_out_accuracy")] == [3]
