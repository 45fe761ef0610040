"""A job: the only file that knows everybody. Config -> line, controller, engine, executors, run folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from llamarl.algo.trial import try_loss
from llamarl.build import (
    BUILDERS,
    Builder,
    Site,
    builder_reference,
    check_reward_model,
    check_training,
    device_of,
    make_loss,
    weight_transport,
)
from llamarl.config import Config
from llamarl.configfile import config_to_yaml, load_config
from llamarl.controller.controller import Controller
from llamarl.controller.default_line import default_line
from llamarl.controller.events import Began, Resumed
from llamarl.controller.line import Line, role_of
from llamarl.engine.driver import Driver
from llamarl.engine.engine import Engine
from llamarl.engine.inline import InlineEngine
from llamarl.engine.local.engine import LocalEngine
from llamarl.engine.monarch.install import check_engine
from llamarl.engine.prompts import Prompts
from llamarl.engine.snapshots import Snapshots
from llamarl.engine.store import GroupStore
from llamarl.errors import ConfigError, InputError, JobFailed, LlamaRLError, ModelError
from llamarl.executors.executor import Executor
from llamarl.fits import check_memory
from llamarl.generate.decoder import Limits
from llamarl.generate.parallel import TensorRank
from llamarl.generate.prompting import reply_tokens
from llamarl.model.checkpoint import check_headers
from llamarl.model.hf_config import describe_ignored_keys
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.training_state import POLICY
from llamarl.observe.display import Display, Quiet
from llamarl.observe.run_folder import CONFIG, SNAPSHOTS, RunFolder, dated_run_folder
from llamarl.observe.summary import Summary, Tally
from llamarl.observe.tensorboard import check_board
from llamarl.observe.watcher import Watcher
from llamarl.plugins import is_reference
from llamarl.resume import recover, refuse_ended, refuse_other_meaning
from llamarl.tasks.judge import Judge
from llamarl.tasks.registry import make_task, own_scorers
from llamarl.tasks.tools.desk import Desk
from llamarl.types import Problem
from llamarl.weights.slotfile import SlotFile

if TYPE_CHECKING:
    from llamarl.engine.monarch.engine import MonarchEngine


class Job:
    """`Job.load("job.yaml", ["trainer.lr=1e-4"]).run()` does what `llamarl train` does.

    A role is added with a line of one's own and a builder for it: `Job(config, line=..., builders={"critic": build})`.
    """

    def __init__(
        self, config: Config, *, line: Line | None = None, builders: Mapping[str, Builder] | None = None
    ) -> None:
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
    def load(cls, path: Path | str | None = None, overrides: Sequence[str] = ()) -> Job:
        return cls(load_config(Path(path) if path else None, overrides))

    def run(self, folder: Path | str | None = None, *, display: Display | None = None) -> Summary:
        """Train to the end. Everything the job did is in its run folder, also when it fails."""
        run_folder = RunFolder.create(Path(folder) if folder else dated_run_folder())
        run_folder.write_config(config_to_yaml(self.config))
        return self._run(run_folder, GroupStore(run_folder.groups), Began(), Tally(), display or Quiet())

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        *,
        config: Config | None = None,
        overrides: Sequence[str] = (),
        line: Line | None = None,
        builders: Mapping[str, Builder] | None = None,
        display: Display | None = None,
    ) -> Summary:
        """Go on with a run from its newest whole snapshot, with the settings it had, or ones that mean the same."""
        path, shown = Path(folder), display or Quiet()
        if not (path / CONFIG).is_file():
            raise InputError(f"--resume: {path} holds no run (no {CONFIG} there)")
        before = load_config(path / CONFIG)
        job = cls(config or load_config(path / CONFIG, overrides), line=line, builders=builders)
        refuse_other_meaning(before, job.config)
        refuse_ended(path)
        recovered = recover(path, job.config, job.line.group_roles[-1].done)
        for problem in recovered.problems:
            shown.note(problem)
        start = f"the snapshot of version {recovered.version}" if recovered.version else "the beginning"
        shown.note(f"resuming from {start}; {len(recovered.store)} scored groups are still there")
        tally = Tally()
        for row in recovered.metrics:
            if row["role"] == job.line.batch_roles[-1].name:
                tally.add_update(row["update"], row)
        tally.tokens_generated = recovered.tokens_generated
        tally.evaluations = dict(recovered.evaluations)
        return job._run(RunFolder.reopen(path, recovered.version), recovered.store, recovered.begin, tally, shown)

    def _run(
        self, run_folder: RunFolder, store: GroupStore, begin: Began | Resumed, tally: Tally, display: Display
    ) -> Summary:
        for note in self._notes:
            display.note(note)
        watcher = Watcher(
            self.config,
            run_folder,
            display,
            tally=tally,
            first_role=self.line.group_roles[0].name,
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
        outcome = "interrupted"
        may_fail: tuple[type[OSError], ...] = ()
        try:
            with _heeding_signals(driver, at_once=self.config.engine.kind == "inline"):
                driver.run(begin)
            outcome = "stopped on request" if driver.stopped else "finished"
        except LlamaRLError as error:
            outcome = str(error)
            raise
        except OSError as error:
            outcome, may_fail = f"the record of the run cannot be written: {error}", (OSError,)
            raise JobFailed(outcome) from error
        finally:
            engine.stop()
            for file in slots.values():
                file.close()
            with suppress(*may_fail):
                store.close()
                newest = snapshots.versions()[-1:]
                summary = watcher.finish(outcome, policy=f"{SNAPSHOTS}/{newest[0]}/{POLICY}" if newest else "")
        return summary

    def _make_engine(self, slots: Mapping[str, SlotFile], run_folder: RunFolder) -> Engine:
        if self.config.engine.kind == "inline":
            return InlineEngine(lambda executor, snapshot: self._build(executor, snapshot, slots))
        return self._engine_class()(self.config, self.line, self._references, slots, run_folder.path / "logs")

    def _engine_class(self) -> type[LocalEngine] | type[MonarchEngine]:
        if self.config.engine.kind == "local":
            return LocalEngine
        from llamarl.engine.monarch.engine import MonarchEngine  # an optional extra

        return MonarchEngine

    def _build(self, executor: str, snapshot: Path | None, slots: Mapping[str, SlotFile]) -> Executor:
        site = Site(self.config, executor, slots, self.line.weights_source, snapshot)
        return self.builders[role_of(executor)](site)

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
        weight_transport(config, can_reach=lambda reader, writer: True)
        self._notes += check_memory(config)
        check_board(config.observe)
        loss = make_loss(config)
        if is_reference(config.algo.loss):
            try_loss(loss, config.algo)
        prompts = Prompts(make_task(config.task, config.seed), tokenizer, config)
        _try_scorer(config, prompts.group(0).problem)
        _try_tool(config, tokenizer, prompts.group(0).problem)
        first = len(prompts.group(0).prompt_tokens) // 4
        if not 1 <= first <= config.generator.max_prompt_tokens:
            raise InputError(
                f"task: the first prompt has {first} tokens; generator.max_prompt_tokens is "
                f"{config.generator.max_prompt_tokens}"
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


def _try_scorer(config: Config, problem: Problem) -> None:
    """A scorer that cannot even judge a task's own answer would fail on every group."""
    judge = Judge.of(config, own_scorers(config.task), workers=1)
    try:
        judge.prepare()
        outcome = judge.score(problem.answer, problem)
    finally:
        judge.close()
    if outcome.status != "ok":
        raise ConfigError(
            f"reward.scorer: fails on the first problem's own answer {problem.answer!r}: {outcome.reason}"
        )


def _try_tool(config: Config, tokenizer: Tokenizer, problem: Problem) -> None:
    """A tool that cannot be loaded, or has no sandbox to run in, or whose replies the chat template does not take."""
    settings = config.conversation
    if not settings.tool:
        return
    try:
        reply_tokens(tokenizer, problem, settings, "a reply")
    except ModelError as error:
        raise ConfigError(f"conversation.role: {settings.role} cannot reply in this model's chats: {error}") from None
    desk = Desk(replace(settings, workers=1), config.sandbox)
    try:
        desk.prepare()
    finally:
        desk.close()


@contextmanager
def _heeding_signals(driver: Driver, *, at_once: bool) -> Iterator[None]:
    """SIGTERM asks for a snapshot and a clean end, Ctrl-C for an end without; a second Ctrl-C, or the first with `at_once`,
    is raised wherever the program is. Only the main thread may set handlers; elsewhere nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        """By the loop, not from here: what is raised here may fall into a destructor and be lost."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        driver.interrupt()

    heeded = {signal.SIGTERM: lambda number, frame: driver.request_stop()}
    if not at_once and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        heeded[signal.SIGINT] = interrupt
    before = {number: signal.signal(number, handler) for number, handler in heeded.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
