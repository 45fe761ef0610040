"""The engine that `engine.kind` names, with everything it needs to build executors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llamarl.builders.context import BuildContext
from llamarl.controller.gpu_numbers import first_gpus
from llamarl.controller.line import role_of
from llamarl.engine.engine import Engine
from llamarl.engine.inline import InlineEngine
from llamarl.engine.local.engine import LocalEngine
from llamarl.engine.local.mps import JobMps
from llamarl.executors.executor import Executor
from llamarl.jobs.prepare import PreparedJob
from llamarl.observe.run_folder import LOGS, RunFolder
from llamarl.weights.slot_file import SlotFile

if TYPE_CHECKING:
    from llamarl.engine.monarch.engine import MonarchEngine


def make_engine(
    job: PreparedJob, slots: Mapping[str, SlotFile], run_folder: RunFolder, mps: JobMps | None = None
) -> Engine:
    if job.config.engine.kind == "inline":
        return InlineEngine(lambda executor, snapshot: _build(job, executor, snapshot, slots, run_folder))
    given = (job.config, job.line, job.builder_references, slots, run_folder.path / LOGS)
    engine = engine_class(job.config.engine.kind)
    return engine(*given, mps) if issubclass(engine, LocalEngine) else engine(*given)


def engine_class(kind: str) -> type[LocalEngine] | type[MonarchEngine]:
    if kind == "local":
        return LocalEngine
    from llamarl.engine.monarch.engine import MonarchEngine  # an optional extra

    return MonarchEngine


def _build(
    job: PreparedJob, executor: str, snapshot: Path | None, slots: Mapping[str, SlotFile], run_folder: RunFolder
) -> Executor:
    def log(text: str) -> None:
        run_folder.log(executor, text)

    context = BuildContext(
        job.config,
        executor,
        slots,
        job.line.weights_source,
        snapshot,
        log=log,
        given=job.given,
        first_gpus=first_gpus(job.line, job.config.placement),
    )
    return job.builders[role_of(executor)](context)
