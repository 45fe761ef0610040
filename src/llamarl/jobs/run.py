"""Running a prepared job in an open run folder, from its first event to its summary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from llamarl.controller.controller import Controller
from llamarl.controller.events import Resumed
from llamarl.controller.gpu_numbers import first_gpus
from llamarl.controller.ledger import FINISHED
from llamarl.engine.curriculum_log import CurriculumLog, NoCurriculum, OutcomeLog
from llamarl.engine.driver import Driver
from llamarl.engine.local.mps import JobMps, mps_of_job
from llamarl.engine.row_share import RowShareLog
from llamarl.engine.snapshot_store import SnapshotStore
from llamarl.errors import InputError, JobFailed, LlamaRLError, OwnCodeFailed
from llamarl.jobs.engines import make_engine
from llamarl.jobs.folder import OpenRun
from llamarl.jobs.prepare import PreparedJob
from llamarl.jobs.signals import signals_stop
from llamarl.model.training_state import POLICY
from llamarl.observe.callbacks import Callback, CallbackRunner
from llamarl.observe.display import Display
from llamarl.observe.loggers import Loggers
from llamarl.observe.run_folder import CURRICULUM, LOGS, ROW_SHARE, SNAPSHOTS
from llamarl.observe.summary import INTERRUPTED, STOPPED, Summary
from llamarl.observe.watcher import Watcher
from llamarl.plugins import format_traceback
from llamarl.types import facts_of
from llamarl.weights.slot_file import SlotFile

_UNWRITABLE = "the record of the run cannot be written"


def run_job(job: PreparedJob, opened: OpenRun, display: Display, callbacks: Sequence[Callback] = ()) -> Summary:
    gpus, log = first_gpus(job.line, job.config.placement), opened.folder.path / LOGS / "mps.log"
    with mps_of_job(job.config, gpus, log, display.note) as mps:
        return _run_job(job, opened, display, callbacks, mps)


def _run_job(
    job: PreparedJob, opened: OpenRun, display: Display, callbacks: Sequence[Callback], mps: JobMps | None
) -> Summary:
    run_folder, config = opened.folder, job.config
    for note in (*filter(None, [run_folder.lock.warning]), *job.notes):
        display.note(note)
    watcher = _make_watcher(job, opened, display)
    called = CallbackRunner(
        callbacks,
        run_folder.path,
        updates=config.schedule.updates,
        score_name=config.score_name,
        note=display.note,
        log=run_folder.log,
    )
    slots = {role: SlotFile() for role in job.line.publishers}
    engine = make_engine(job, slots, run_folder, mps)
    snapshots = SnapshotStore(run_folder.snapshots, config.snapshots.keep)
    outcomes = _open_outcomes(job, opened)
    driver = Driver(
        Controller(job.line, config.schedule, job.prompts.evaluate, config.snapshots),
        engine,
        job.prompts,
        store=opened.store,
        snapshots=snapshots,
        run_folder=run_folder,
        watcher=watcher,
        drop_reasons=opened.drop_reasons,
        callbacks=called,
        outcomes=outcomes,
        cut_off_penalty=config.algo.cut_off_penalty,
    )
    outcome = INTERRUPTED
    try:
        with signals_stop(driver, in_this_process=config.engine.kind == "inline"):
            driver.run(opened.begin)
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
                opened.store.close()
                outcomes.close()
                newest = snapshots.versions()[-1:]
                summary = watcher.finish(outcome, policy=f"{SNAPSHOTS}/{newest[0]}/{POLICY}" if newest else "")
                called.end(summary)
        except OSError as error:
            if outcome in (FINISHED, STOPPED, INTERRUPTED):  # otherwise an error that says why is being raised
                raise JobFailed(f"{_UNWRITABLE}: {error}") from error
    return summary


def _open_outcomes(job: PreparedJob, opened: OpenRun) -> OutcomeLog:
    """The job's curriculum, or its share of rows, with the outcomes of earlier starts. Settled groups that a kill kept from
    the record are told to it again."""
    outcomes: CurriculumLog | RowShareLog
    if job.prompts.row_share is not None:
        folder = opened.folder.path / ROW_SHARE
        if isinstance(opened.begin, Resumed) and opened.begin.version and not folder.exists():
            raise InputError(
                f"--resume: {opened.folder.path} was begun by a version in which sft.share counted groups; its rows would be "
                "other ones now; begin a new run from its snapshot (model.path)"
            )
        outcomes = RowShareLog(folder, *job.prompts.row_share)
        job.prompts.share_by(outcomes)
    elif job.prompts.curriculum is not None:
        outcomes = CurriculumLog(opened.folder.path / CURRICULUM, job.prompts.curriculum)
        job.prompts.choose_by(outcomes.choice)
    else:
        return NoCurriculum()
    if isinstance(opened.begin, Resumed):
        for ordinal in (*(o for batch in opened.begin.batches for o in batch), *opened.begin.settled):
            for group in opened.store.rollouts([ordinal]):
                outcomes.hear(ordinal, facts_of(group, job.config.algo.cut_off_penalty))
        for ordinal in opened.begin.dropped:
            outcomes.hear(ordinal, None)
    return outcomes


def _make_watcher(job: PreparedJob, opened: OpenRun, display: Display) -> Watcher:
    line = job.line
    last_role = line.batch_roles[-1].name
    loggers = Loggers.start(
        job.config,
        opened.folder,
        job.loggers,
        decode=job.prompts.decode,
        role=last_role,
        first_update=opened.begin.version if isinstance(opened.begin, Resumed) else 0,
    )
    return Watcher(
        job.config,
        opened.folder,
        display,
        tally=opened.tally,
        first_role=line.group_roles[0].name,
        last_group_role=line.group_roles[-1].name,
        last_role=last_role,
        loggers=loggers,
    )
