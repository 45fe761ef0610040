"""A job: the only file that knows everybody. Config -> line, controller, engine, executors, run folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from llamarl.build import (
    BUILDERS,
    Builder,
    Site,
    builder_reference,
    check_loss,
    check_reward_model,
    check_training,
    device_of,
    weight_transport,
)
from llamarl.config import Config
from llamarl.config.file import check_config, config_to_yaml, load_config, parse_config
from llamarl.config.paths import with_absolute_paths
from llamarl.controller.controller import Controller
from llamarl.controller.default_line import default_line
from llamarl.controller.events import Began, Resumed
from llamarl.controller.gpu_numbers import first_gpus
from llamarl.controller.ledger import FINISHED
from llamarl.controller.line import Line, role_of
from llamarl.engine.driver import INTERRUPTED, STOPPED, Driver
from llamarl.engine.engine import Engine
from llamarl.engine.group_store import GroupStore
from llamarl.engine.inline import InlineEngine
from llamarl.engine.local.engine import LocalEngine
from llamarl.engine.monarch.install import check_engine
from llamarl.engine.prompts import Prompts, check_lengths
from llamarl.engine.snapshots import Snapshots
from llamarl.errors import ConfigError, InputError, JobFailed, LlamaRLError, ModelError, OwnCodeFailed
from llamarl.executors.executor import Executor
from llamarl.generate.decoder import Limits
from llamarl.generate.parallel import TensorRank
from llamarl.generate.prompting import reply_tokens
from llamarl.memory_check import check_memory
from llamarl.model.checkpoint import check_headers
from llamarl.model.hf_config import describe_ignored_keys
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.training_state import POLICY
from llamarl.observe.advice import advice_before
from llamarl.observe.display import Display, Quiet
from llamarl.observe.report import resume_command
from llamarl.observe.run_folder import CONFIG, LOGS, SNAPSHOTS, SUMMARY, RunFolder, dated_run_folder
from llamarl.observe.run_lock import RunLock
from llamarl.observe.starts import Starts
from llamarl.observe.summary import Summary, Tally
from llamarl.observe.tensorboard import check_board
from llamarl.observe.watcher import Watcher
from llamarl.plugins import describe_error, format_traceback, refuse_while_importing
from llamarl.resume import changes, read_books, recover, refuse_ended, refuse_other_length
from llamarl.tasks.from_python import with_scorer, with_task
from llamarl.tasks.judge import Judge
from llamarl.tasks.registry import make_task, own_scorers
from llamarl.tasks.task import Prompter
from llamarl.tasks.tools.client import ToolClient
from llamarl.types import Problem
from llamarl.weights.slot_file import SlotFile

if TYPE_CHECKING:
    from llamarl.engine.monarch.engine import MonarchEngine


_UNWRITABLE = "the record of the run cannot be written"


class Job:
    """`Job.load("job.yaml", ["trainer.lr=1e-4"]).run()` does what `llamarl train` does.

    A role is added with a line of one's own and a builder for it: `Job(config, line=..., builders={"critic": build})`.
    A scorer and a task may be given from Python: `Job(config, scorer=function, task=task)`; see docs/tasks.md.
    """

    def __init__(
        self,
        config: Config,
        *,
        line: Line | None = None,
        builders: Mapping[str, Builder] | None = None,
        scorer: Callable[..., Any] | None = None,
        task: Prompter | None = None,
    ) -> None:
        refuse_while_importing()
        config = check_config(config)
        self._task, self._given = task, dict[str, Callable[..., Any]]()
        if scorer is not None:
            config, self._given = with_scorer(config, scorer)
        if task is not None:
            config = with_task(config, task)
        self.config = config
        self.line = line or default_line(config)
        self.builders = {**BUILDERS, **(builders or {})}
        if missing := {role.name for role in self.line.roles} - self.builders.keys():
            raise ConfigError(f"line: no builder for role '{sorted(missing)[0]}'")
        if config.engine.kind != "inline":
            self._references = {r.name: builder_reference(r.name, self.builders[r.name]) for r in self.line.roles}
        self._notes: list[str] = []  # said once, when the job begins
        self._prompts = self._prepare()

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        overrides: Sequence[str] = (),
        *,
        scorer: Callable[..., Any] | None = None,
        task: Prompter | None = None,
    ) -> Job:
        return cls(load_config(Path(path) if path else None, overrides), scorer=scorer, task=task)

    def run(self, folder: Path | str | None = None, *, display: Display | None = None) -> Summary:
        """Train to the end. Everything the job did is in its run folder, also when it fails."""
        path, shown = Path(folder) if folder else dated_run_folder(), display or Quiet()
        with _telling_of_files(path):
            run_folder = RunFolder.create(path, self._training_roles, events_mb=self.config.observe.events_mb)
            with _closed_on_failure(run_folder.close):
                self._record_start(run_folder, version=0)
                store = GroupStore(run_folder.groups)
        return self._run(run_folder, store, Began(), Tally(), shown)

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        *,
        config: Config | None = None,
        overrides: Sequence[str] = (),
        line: Line | None = None,
        builders: Mapping[str, Builder] | None = None,
        scorer: Callable[..., Any] | None = None,
        task: Prompter | None = None,
        display: Display | None = None,
    ) -> Summary:
        """Go on with a run from its newest whole snapshot, with the settings it had, or ones that mean the same. A run that
        is finished is left as it is, unless `schedule.updates` asks for more."""
        path, shown = Path(folder), display or Quiet()
        if not (path / CONFIG).is_file():
            raise InputError(f"--resume: {path} holds no run (no {CONFIG} there)")
        asked = config or load_config(path / CONFIG, overrides)
        job = cls(asked, line=line, builders=builders, scorer=scorer, task=task)
        last, now = Starts(path).last(), job.config
        before = parse_config(last.config) if last else load_config(path / CONFIG)
        changed = changes(before, now)
        refuse_ended(path)
        if (finished := _finished(path, now)) is not None:
            more = f"{resume_command(path)} schedule.updates={2 * now.schedule.updates}"
            shown.note(f"this run is finished; for more than its {now.schedule.updates} updates: {more}")
            return finished
        with _telling_of_files(path):
            lock = RunLock(path)
            with _closed_on_failure(lock.release):
                recovered = recover(path, now, job.line.group_roles[-1].done, job.line.batch_roles[-1].name)
                refuse_other_length(before.schedule.updates, now.schedule, recovered.version)
                for version in recovered.unknown:
                    Snapshots(path / SNAPSHOTS, keep=1).set_aside(version)
                run_folder = RunFolder.reopen(
                    path,
                    lock,
                    recovered.version,
                    job._training_roles,
                    last_run=recovered.last_run,
                    events_mb=now.observe.events_mb,
                )
                for note in (*recovered.notes, *changed, *Starts(path).changed_files(now)):
                    shown.note(note)
                job._record_start(run_folder, recovered.version)
        start = f"the snapshot of version {recovered.version}" if recovered.version else "the beginning"
        shown.note(f"resuming from {start}; {len(recovered.store)} scored groups are still there")
        begin = recovered.begin
        if isinstance(begin, Resumed):
            begin = replace(begin, run=run_folder.run)
        return job._run(run_folder, recovered.store, begin, recovered.tally, shown)

    @property
    def _training_roles(self) -> tuple[str, ...]:
        return tuple(role.name for role in self.line.batch_roles)

    def _record_start(self, run_folder: RunFolder, version: int) -> None:
        config, at = with_absolute_paths(self.config), datetime.now(UTC).isoformat(timespec="seconds")
        run_folder.write_config(config_to_yaml(config))
        Starts(run_folder.path).add(config, run=run_folder.run, version=version, at=at)

    def _run(
        self, run_folder: RunFolder, store: GroupStore, begin: Began | Resumed, tally: Tally, display: Display
    ) -> Summary:
        for note in (*filter(None, [run_folder.lock.warning]), *self._notes):
            display.note(note)
        watcher = Watcher(
            self.config,
            run_folder,
            display,
            tally=tally,
            first_role=self.line.group_roles[0].name,
            last_group_role=self.line.group_roles[-1].name,
            last_role=self.line.batch_roles[-1].name,
        )
        slots = {role: SlotFile() for role in self.line.publishers}
        engine = self._make_engine(slots, run_folder)
        snapshots = Snapshots(run_folder.snapshots, self.config.snapshots.keep)
        driver = Driver(
            Controller(self.line, self.config.schedule, self._prompts.evaluate, self.config.snapshots),
            engine,
            self._prompts,
            store=store,
            snapshots=snapshots,
            run_folder=run_folder,
            watcher=watcher,
        )
        outcome = INTERRUPTED
        try:
            with _heeding_signals(driver, in_this_process=self.config.engine.kind == "inline"):
                driver.run(begin)
            outcome = driver.outcome
        except OwnCodeFailed as error:
            log = run_folder.log("own-code", format_traceback(error.__cause__ or error) or str(error))
            outcome = f"{error}; see {log}"
            raise OwnCodeFailed(outcome) from error
        except LlamaRLError as error:
            outcome = str(error)
            raise
        except OSError as error:
            outcome = f"{_UNWRITABLE}: {error}"
            raise JobFailed(outcome) from error
        finally:
            engine.stop()
            for file in slots.values():
                file.close()
            try:
                with closing(run_folder):
                    store.close()
                    newest = snapshots.versions()[-1:]
                    summary = watcher.finish(outcome, policy=f"{SNAPSHOTS}/{newest[0]}/{POLICY}" if newest else "")
            except OSError as error:
                if outcome in (FINISHED, STOPPED, INTERRUPTED):  # otherwise a line that says why is on its way
                    raise JobFailed(f"{_UNWRITABLE}: {error}") from error
        return summary

    def _make_engine(self, slots: Mapping[str, SlotFile], run_folder: RunFolder) -> Engine:
        if self.config.engine.kind == "inline":
            return InlineEngine(lambda executor, snapshot: self._build(executor, snapshot, slots, run_folder))
        return self._engine_class()(self.config, self.line, self._references, slots, run_folder.path / LOGS)

    def _engine_class(self) -> type[LocalEngine] | type[MonarchEngine]:
        if self.config.engine.kind == "local":
            return LocalEngine
        from llamarl.engine.monarch.engine import MonarchEngine  # an optional extra

        return MonarchEngine

    def _build(
        self, executor: str, snapshot: Path | None, slots: Mapping[str, SlotFile], run_folder: RunFolder
    ) -> Executor:
        def log(text: str) -> None:
            run_folder.log(executor, text)

        site = Site(
            self.config,
            executor,
            slots,
            self.line.weights_source,
            snapshot,
            log=log,
            given=self._given,
            first_gpus=self._first_gpus,
        )
        return self.builders[role_of(executor)](site)

    @property
    def _first_gpus(self) -> dict[str, int]:
        return first_gpus(self.line, self.config.placement)

    def _prepare(self) -> Prompts:
        """Everything a user can get wrong is tried here, before anything starts."""
        config = self.config
        check_engine(config.engine)
        try:
            tokenizer = self._check_model()
        except ModelError as error:
            raise ModelError(f"model.path: {error}") from None
        device_of("generator.device", config.generator.device)
        check_training(config)
        if config.reward_model.path:
            check_reward_model(config)
        weight_transport(config, self._first_gpus, can_reach=lambda reader, writer: True)
        self._notes += check_memory(config)
        check_board(config.observe)
        check_loss(config)
        prompts = self._prepare_prompts(tokenizer)
        _try_tool(config, tokenizer, prompts.group(0).problem)
        self._notes += [*advice_before(config), *check_lengths(prompts, config)]
        return prompts

    def _prepare_prompts(self, tokenizer: Tokenizer) -> Prompts:
        """A scorer that cannot even judge a task's own answer would fail on every group."""
        config = self.config
        judge = Judge.of(config, own_scorers(config.task), workers=1, given=self._given)
        try:
            judge.prepare()
            prompts = Prompts(self._task or make_task(config.task, config.seed, judge.wanted), tokenizer, config)
            problem = prompts.group(0).problem
            outcome = judge.score(problem.answer, problem)
        except LlamaRLError:
            raise
        except Exception as error:  # of a trusted function, on `inline`
            told = describe_error(error)
            raise ConfigError(f"reward.scorer: fails on the first problem's own answer: {told}") from error
        finally:
            judge.close()
        if outcome.status != "ok":
            raise ConfigError(
                f"reward.scorer: fails on the first problem's own answer {problem.answer!r}: {outcome.reason}"
            )
        return prompts

    def _check_model(self) -> Tokenizer:
        config, folder = self.config, self.config.model_folder
        shape = check_headers(folder)
        self._notes += filter(None, [describe_ignored_keys(folder)])
        length = config.generator.max_prompt_tokens + config.generator.max_new_tokens
        if length > shape.max_positions:
            raise ConfigError(
                f"generator.max_new_tokens: prompt and completion may take {length} tokens, "
                f"but {config.model.path} has {shape.max_positions} positions"
            )
        limits = Limits.of(config)
        limits.check_pages(limits.num_pages or limits.enough_pages)
        TensorRank(0, config.generator.tensor).check(shape)
        tokenizer = Tokenizer.load(folder)
        if tokenizer.vocab_size > shape.vocab_size:
            raise ModelError(
                f"the tokenizer of {folder} has {tokenizer.vocab_size} tokens, its model only {shape.vocab_size}"
            )
        if not tokenizer.eos_ids:
            raise ModelError(f"{folder} names no end token, so completions could not end")
        return tokenizer


def _try_tool(config: Config, tokenizer: Tokenizer, problem: Problem) -> None:
    """A tool that cannot be loaded, or has no sandbox to run in, or whose replies the chat template does not take."""
    settings = config.conversation
    if not settings.tool:
        return
    try:
        reply_tokens(tokenizer, problem, settings, "a reply")
    except ModelError as error:
        raise ConfigError(f"conversation.role: {settings.role} cannot reply in this model's chats: {error}") from None
    desk = ToolClient(replace(settings, workers=1), config.sandbox)
    try:
        desk.prepare()
    finally:
        desk.close()


def _finished(folder: Path, config: Config) -> Summary | None:
    """The summary of a run that made all its updates and has its last snapshot, if this one asks for no more. The ledger has
    the last word; it is only read where the summary says so too."""
    try:
        summary = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=Summary)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if summary.outcome != FINISHED or config.schedule.updates != summary.updates:
        return None
    books = read_books(folder)
    if books is None or books.closed != FINISHED or config.schedule.updates != books.updates:
        return None
    newest, _ = Snapshots(folder / SNAPSHOTS, keep=1).newest_whole()
    return None if config.snapshots.at_end != "none" and newest < books.updates else summary


@contextmanager
def _closed_on_failure(close: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):  # on a full disk it fails too, and what came first says more
            close()
        raise


@contextmanager
def _telling_of_files(folder: Path) -> Iterator[None]:
    """A folder that cannot be written, a full disk: one line, before anything starts."""
    try:
        yield
    except OSError as error:
        raise InputError(f"--run {folder}: cannot be written: {error.strerror}: {error.filename or ''}") from None


@contextmanager
def _heeding_signals(driver: Driver, *, in_this_process: bool) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C ask for a snapshot and a clean end; the second Ctrl-C ends the job at once. Only the main
    thread may set handlers; elsewhere nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler if in_this_process else interrupt)
        driver.request_stop(INTERRUPTED)

    def interrupt(number: int, frame: object) -> None:
        """By the loop, not from here: what is raised here may fall into a destructor and be lost."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        driver.interrupt()

    heeded: dict[int, Callable[[int, object], None]] = {signal.SIGTERM: lambda number, frame: driver.request_stop()}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        heeded[signal.SIGINT] = stop
    before = {number: signal.signal(number, handler) for number, handler in heeded.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
