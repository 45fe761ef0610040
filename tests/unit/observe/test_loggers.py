"""A logger that fails, hangs or is slow never stops or slows a job; each step is logged once, also after a resume."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import ClassVar

import pytest

from llamarl.config import Config, ObserveConfig
from llamarl.config.file import load_config
from llamarl.errors import ConfigError
from llamarl.observe import loggers as registry
from llamarl.observe.logger_thread import MAX_WAITING, LoggerThread, LogReport, read_marks, run_id, without_secrets
from llamarl.observe.loggers import KNOWN, Loggers, check_loggers, flat_settings, own_names
from llamarl.observe.metric_logger import Kind, LoggedRun, MetricLogger, SampleRow
from llamarl.observe.run_folder import RunFolder
from llamarl.observe.samples import MAX_CHARS, choose, printable, sample_row
from llamarl.observe.summary import Tally
from llamarl.observe.tensorboard import as_code
from llamarl.observe.wandb import describe_missing_key
from llamarl.observe.watcher import Watcher
from llamarl.types import Completion, Problem, PromptGroup, Rollout, RolloutGroup, Sampling, tokens_to_bytes

DEADLINE_S = 60.0  # far beyond what anything here takes


class Recorder(MetricLogger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.metrics: list[int] = []
        self.evaluations: list[int] = []
        self.values: dict[int, Mapping[str, float]] = {}
        self.tables: list[tuple[str, int, Sequence[SampleRow]]] = []
        self.outcome = ""
        self.run: LoggedRun | None = None

    def start(self, run: LoggedRun) -> Mapping[Kind, int]:
        self.run = run
        return {}

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        self.metrics.append(update)
        self.values[update] = values

    def log_evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self.evaluations.append(version)

    def log_samples(self, kind: Kind, step: int, rows: Sequence[SampleRow]) -> None:
        self.tables.append((kind, step, rows))

    def finish(self, outcome: str) -> None:
        self.outcome = outcome


class Failing(Recorder):
    """Fails in the named method."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()
        self._method, self._error = method, error

    def start(self, run: LoggedRun) -> Mapping[Kind, int]:
        if self._method == "start":
            raise self._error
        return {}

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        if self._method == "log_metrics" and update != 1:
            raise self._error
        super().log_metrics(update, values)

    def finish(self, outcome: str) -> None:
        if self._method == "finish":
            raise self._error


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that went on would write files in the tests behind."""
    yield
    monkeypatch.setattr(LoggerThread, "_save_marks", lambda self: None)  # for each of thousands of reports
    for logger in Hanging.made:
        logger.let_go.set()
    Hanging.made.clear()
    for thread in threading.enumerate():
        if thread.name.startswith("logger-"):
            thread.join(DEADLINE_S)


class Hanging(Recorder):
    """Hangs in the named method until it is let go."""

    made: ClassVar[list[Hanging]] = []

    def __init__(self, method: str) -> None:
        super().__init__()
        self.made.append(self)
        self._method, self.reached, self.let_go = method, threading.Event(), threading.Event()

    def _hang(self, method: str) -> None:
        if method == self._method:
            self.reached.set()
            self.let_go.wait(DEADLINE_S)

    def start(self, run: LoggedRun) -> Mapping[Kind, int]:
        self._hang("start")
        return {}

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._hang("log_metrics")
        super().log_metrics(update, values)

    def finish(self, outcome: str) -> None:
        self._hang("finish")


def start(folder: RunFolder, *own: MetricLogger, first_update: int = 0, config: Config | None = None) -> Loggers:
    return Loggers.start(
        config or Config(),
        folder,
        own,
        decode=lambda tokens: f"{len(tokens)} tokens",
        role="trainer",
        first_update=first_update,
    )


def rollouts(ordinals: Sequence[int], text: str = "1+1=") -> list[RolloutGroup]:
    completion = Completion(tokens_to_bytes([1, 2, 3]), b"\0" * 12, (), truncated=False)
    return [
        RolloutGroup(
            PromptGroup(ordinal, Problem(text, "2"), tokens_to_bytes([5]), Sampling()),
            (Rollout(completion, 1.0), Rollout(completion, 0.0)),
        )
        for ordinal in ordinals
    ]


def ended(loggers: Loggers, outcome: str = "finished") -> list[str]:
    loggers.finish(outcome, DEADLINE_S)
    return list(loggers.take_notes())


def test_a_logger_gets_config_metrics_evaluations_samples_and_the_outcome(tmp_path: Path) -> None:
    told = Recorder()
    loggers = start(
        RunFolder.create(tmp_path / "run"), told, config=Config(observe=ObserveConfig(samples=2, samples_every=2))
    )
    loggers.evaluated(0, 0.25, rollouts([-1, -2, -3]))
    for update in range(3):
        loggers.trained(update, rollouts([update]))
        loggers.metrics(update, {"reward": 0.5})
    assert ended(loggers) == []
    assert told.run is not None and told.run.name == "run" and told.run.project == "llamarl"
    assert told.run.settings == flat_settings(Config(observe=ObserveConfig(samples=2, samples_every=2)))
    assert told.metrics == [0, 1, 2] and told.evaluations == [0] and told.outcome == "finished"
    assert [(kind, step, len(rows)) for kind, step, rows in told.tables] == [
        ("evaluation_samples", 0, 2),
        ("training_samples", 0, 1),
        ("training_samples", 2, 1),
    ]
    assert told.tables[0][2][0] == SampleRow(-1, "1+1=", "3 tokens", "2", 1.0, 3, False)


def test_updates_that_are_made_again_are_logged_once(tmp_path: Path) -> None:
    told = Recorder()
    loggers = start(RunFolder.create(tmp_path / "run"), told)
    for update in (0, 1, 2, 1, 2, 3):  # rewound to update 1
        loggers.metrics(update, {"reward": float(update)})
    for version in (0, 2, 2, 3):
        loggers.evaluated(version, 0.5, [])
    ended(loggers)
    assert told.metrics == [0, 1, 2, 3] and told.evaluations == [0, 2, 3]


def test_a_resumed_run_goes_on_where_its_log_ends_under_the_same_id(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    folder = RunFolder.create(tmp_path / "run")
    loggers = start(folder, first)
    for update in range(5):
        folder.metrics.add(update, "trainer", {"reward": 1.0})
        loggers.metrics(update, {"reward": 1.0})
    ended(loggers)
    folder.close()
    again = RunFolder.reopen(folder.path, folder.lock, 2, ["trainer"])
    loggers = start(again, second, first_update=2)
    for update in range(2, 7):
        loggers.metrics(update, {"reward": 1.0})
    ended(loggers)
    assert first.run is not None and second.run is not None and second.run.id == first.run.id
    assert first.metrics == [0, 1, 2, 3, 4] and second.metrics == [5, 6]


def test_what_the_log_lacks_is_read_from_the_run_folder(tmp_path: Path) -> None:
    class Knows(Recorder):
        """A log that says itself what it lacks: marks of the run folder are of reports that were lost on the way."""

        def start(self, run: LoggedRun) -> Mapping[Kind, int]:
            return {"metrics": 1, "evaluations": 0}

    folder, told, knows = RunFolder.create(tmp_path / "run", ["critic", "trainer"]), Recorder(), Knows()
    for update in range(4):
        for role in ("critic", "trainer"):
            folder.metrics.add(update, role, {f"{role}_loss": float(update)})
    folder.evaluations.append_json({"version": 0, "accuracy": 0.25})
    loggers = start(folder, told, knows, first_update=3)
    loggers.metrics(3, {"trainer_loss": 3.0})
    ended(loggers)
    assert told.metrics == [0, 1, 2, 3] and knows.metrics == [1, 2, 3]
    assert told.values[2] == {"trainer_loss": 2.0} and told.evaluations == knows.evaluations == [0]


@pytest.mark.parametrize("error", [ValueError("no\x1b[31m such\nthing"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["start", "log_metrics", "finish"])
def test_a_failing_logger_is_told_in_one_line_and_the_others_go_on(
    tmp_path: Path, method: str, error: BaseException
) -> None:
    folder, failing, good = RunFolder.create(tmp_path / "run"), Failing(method, error), Recorder()
    loggers = start(folder, failing, good)
    for update in range(3):
        loggers.metrics(update, {"reward": 0.0})
    notes = ended(loggers)
    assert good.metrics == [0, 1, 2]
    assert notes[0].startswith("logger Failing ") and type(error).__name__ in notes[0]
    assert all(note.isprintable() for note in notes)
    assert (folder.path / "logs" / "logger-Failing.log").is_file()
    if method == "log_metrics":
        assert failing.metrics == [1]
        assert notes[1:] == ["logger Failing: 2 of 3 reports were not sent (0 dropped, 2 failed)"]


@pytest.mark.parametrize("method", ["start", "log_metrics", "finish"])
def test_a_hanging_logger_holds_nobody_up(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[LoggerThread] = []
    monkeypatch.setattr(registry, "_left_behind", left)
    hanging, good = Hanging(method), Recorder()
    loggers = start(RunFolder.create(tmp_path / "run"), hanging, good)
    loggers.metrics(0, {"reward": 0.0})
    loggers.finish("finished", 0.01) if method == "finish" else None
    assert hanging.reached.wait(DEADLINE_S)
    started_s = time.monotonic()
    if method != "finish":
        for update in range(1, MAX_WAITING + 10):
            loggers.metrics(update, {"reward": 0.0})
        loggers.finish("finished", 0.2)
    assert time.monotonic() - started_s < DEADLINE_S / 2  # it would hang for all of it
    notes = [note for note in loggers.take_notes() if note.startswith("logger Hanging")]
    assert any("did not end in time" in note for note in notes)
    assert ("logger Hanging is too slow: it drops reports; the job goes on" in notes) == (method != "finish")
    assert left
    hanging.let_go.set()


def test_a_slow_logger_drops_reports_counts_them_and_still_ends(tmp_path: Path) -> None:
    slow = Hanging("log_metrics")
    thread = LoggerThread(
        "slow",
        slow,
        LoggedRun("id", "run", "project", tmp_path, {}),
        decode=lambda tokens: "",
        role="trainer",
        first_update=0,
        write_log=lambda name, text: tmp_path / name,
        max_waiting=3,
    )
    thread.put(LogReport("metrics", 0))
    assert slow.reached.wait(DEADLINE_S)
    for update in range(1, 10):
        thread.put(LogReport("metrics", update))
    thread.end("finished")
    slow.let_go.set()
    assert thread.wait(time.monotonic() + DEADLINE_S)
    assert slow.metrics == [0, 2, 3]
    assert list(thread.take_notes()) == [
        "logger slow is too slow: it drops reports; the job goes on",
        "logger slow: 7 of 10 reports were not sent (7 dropped, 0 failed)",
    ]


def test_samples_are_dropped_before_metrics(tmp_path: Path) -> None:
    slow = Hanging("start")
    loggers = start(RunFolder.create(tmp_path / "run"), slow, config=Config(observe=ObserveConfig(samples_every=1)))
    for update in range(MAX_WAITING // 10 + 1):
        loggers.metrics(update, {"reward": 0.0})
    loggers.trained(MAX_WAITING, rollouts([0]))
    slow.let_go.set()
    assert ended(loggers)[-1].endswith("(1 dropped, 0 failed)")
    assert len(slow.metrics) == MAX_WAITING // 10 + 1 and not slow.tables


def test_a_logger_left_behind_does_not_hold_up_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr(registry, "_left_behind", [])
    registry.leave_loggers_behind(0)
    assert codes == []
    monkeypatch.setattr(registry, "_left_behind", [object()])
    registry.leave_loggers_behind(3)
    assert codes == [3]


def test_the_watcher_logs_weight_transfers_with_the_update_after_them(tmp_path: Path) -> None:
    folder, told = RunFolder.create(tmp_path / "run"), Recorder()

    class Shown:
        def progress(self, done: int, of: int) -> None: ...
        def update(self, snapshot: object) -> None: ...
        def note(self, text: str) -> None: ...
        def close(self) -> None: ...

    watcher = Watcher(
        Config(),
        folder,
        Shown(),
        tally=Tally(),
        first_role="generator",
        last_role="trainer",
        loggers=start(folder, told),
    )
    watcher.batch_done("trainer/0", 0, {"reward": 0.5})
    watcher.loaded("generator/0", 1, 8, 0.25)
    watcher.loaded("generator/1", 1, 8, 0.75)
    watcher.restarted("generator/0")
    watcher.batch_done("trainer/0", 1, {"reward": 0.5}, {"train_s": 2.0})
    watcher.finish("finished", "")
    assert told.values[0] == {"reward": 0.5, "start": 0.0, "restarts": 0.0}
    assert told.values[1] == {"reward": 0.5, "train_s": 2.0, "sync_generator_s": 0.5, "start": 0.0, "restarts": 1.0}


def test_text_of_models_is_printable_and_of_bounded_length(tmp_path: Path) -> None:
    hostile = "\x1b]0;title\x07\u202ereversed\n\ttab\r\x00<script>" + "x" * 10**6
    (group,) = rollouts([1], text=hostile)
    (chosen,) = choose([group], 5)
    row = sample_row(chosen, lambda tokens: hostile)
    for text in (row.prompt, row.answer):
        assert len(text) < 2 * MAX_CHARS
        assert all(char.isprintable() or char in "\n\t" for char in text)
        assert text.startswith("\\x1b]0;title\\x07\\u202ereversed\n\ttab\\r\\x00<script>xxx")
        assert text.endswith("characters more)")
    assert printable("kurz") == "kurz"


def test_no_line_of_an_answer_leaves_its_code_block() -> None:
    assert as_code("# no heading\n\n<b>") == "    # no heading\n    \n    <b>"


def test_keys_and_logins_never_reach_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123456789")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2hunter2")
    told = "401 for abcdef0123456789 at https://me:hunter2hunter2@host/api, and http://x:y@z"
    assert without_secrets(told) == "401 for *** at https://***@host/api, and http://***@z"
    folder = RunFolder.create(tmp_path / "run")
    (note,) = ended(start(folder, Failing("start", RuntimeError(told))))
    log = (folder.path / "logs" / "logger-Failing.log").read_text()
    assert not any(secret in note + log for secret in ("abcdef", "hunter2"))


def test_damaged_marks_and_ids_are_made_anew(tmp_path: Path) -> None:
    made = run_id(tmp_path)
    assert run_id(tmp_path) == made
    (tmp_path / "loggers" / "run_id").write_text("../../etc")
    assert run_id(tmp_path) not in ("../../etc", made)
    (tmp_path / "loggers" / "x.json").write_text('{"metrics": "many"')
    assert read_marks(tmp_path, "x") == {}


@pytest.mark.parametrize(
    "setting", ["observe.loggers=wandb", "observe.loggers=[wandb]", "observe.loggers=[wandb, wandb]"]
)
def test_loggers_are_named_by_a_word_or_a_list(setting: str) -> None:
    assert load_config(None, [setting]).observe.logger_names == ("wandb",)
    assert load_config(None, [setting, "observe.tensorboard=true"]).observe.logger_names == ("tensorboard", "wandb")
    assert Config().observe.logger_names == ()


def test_unknown_and_missing_loggers_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"observe.loggers: no logger 'wandbb'; did you mean 'wandb'\? There are tensor"
    ):
        check_loggers(ObserveConfig(loggers=("wandbb",)))

    def nothing_installed(name: str, package: str | None = None) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing_installed)
    for name in KNOWN:
        with pytest.raises(ConfigError) as refusal:
            check_loggers(ObserveConfig(loggers=name))
        assert str(refusal.value) == f"observe.loggers: the package of {name} is missing; pip install 'llamarl[{name}]'"


def test_wandb_without_a_key_is_refused_unless_it_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert describe_missing_key().startswith("wandb has no key: set WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123\n")
    assert describe_missing_key() == ""
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.our-own.net:8080")
    assert describe_missing_key(), "a login elsewhere"
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert describe_missing_key() == ""


def test_two_loggers_of_one_class_have_names_of_their_own() -> None:
    assert own_names([Recorder(), Recorder(), Hanging("")]) == ["Recorder", "Recorder-2", "Hanging"]
