"""`llamarl train` and `llamarl sft`: start a job, or resume one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from llamarl.cli.help_format import CONFIG_FILE, OVERRIDES
from llamarl.config import Config
from llamarl.config.file import load_config, read_config
from llamarl.engine.local.fork_server import fork_server_ahead
from llamarl.errors import InputError, Interrupted, JobFailed
from llamarl.hub.client import without_progress
from llamarl.observe.final_report import resume_command
from llamarl.observe.loggers import check_loggers
from llamarl.observe.run_folder import CONFIG, dated_run_folder, no_run_to_resume
from llamarl.processes import imports_undisturbed

RunOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="where the record goes; default: a dated folder under runs/")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="go on with the run in DIR from its newest snapshot")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="print nothing but errors")]


def train_command(
    config: Annotated[str, CONFIG_FILE] = "",
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    run: RunOption = None,
    resume: ResumeOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a policy by reinforcement learning."""
    settled = _settle(config, overrides, run, resume=resume)
    _begin(settled, run, resume=resume, quiet=quiet)


def sft_command(
    config: Annotated[str, CONFIG_FILE] = "",
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    run: RunOption = None,
    resume: ResumeOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a policy on answers from data (supervised fine-tuning)."""
    settled = _settle(config, overrides, run, resume=resume)
    if not settled.sft:
        raise InputError("sft.path: name the data, such as sft.path=chats.jsonl")
    if not settled.supervised:
        raise InputError(
            f"sft.share: {settled.sft.share:g} mixes rows into rollouts, which is `llamarl train`; set it to 1"
        )
    _begin(settled, run, resume=resume, quiet=quiet)


def _settle(config: str, overrides: list[str] | None, run: Path | None, *, resume: bool) -> Config:
    """The settings, before torch is imported, so that mistakes show at once."""
    settings = list(overrides or [])
    path, recorded = None, None
    if "=" in config:
        settings.insert(0, config)
    elif config:
        path = Path(config)
    if resume:
        if run is None:
            raise InputError("--resume: name the run folder with --run DIR")
        if (run / CONFIG).is_file():
            recorded = read_config(run / CONFIG)
        elif path is None:
            raise no_run_to_resume(run)
        path = path or run / CONFIG
    return load_config(path, settings, recorded=recorded)


def _begin(settled: Config, run: Path | None, *, resume: bool, quiet: bool) -> None:
    check_loggers(settled.observe)
    ahead = fork_server_ahead() if settled.engine.kind == "local" else nullcontext()
    with ahead, without_progress() if quiet else nullcontext():
        _train(settled, run or dated_run_folder(), resume=resume, quiet=quiet)


def _train(config: Config, folder: Path, *, resume: bool, quiet: bool) -> None:
    with imports_undisturbed():
        from llamarl.jobs.job import Job
    from llamarl.observe.display import LastingConsole, make_display
    from llamarl.observe.final_report import print_report
    from llamarl.observe.run_folder import refuse_used
    from llamarl.observe.summary import INTERRUPTED

    console = LastingConsole()
    job = None if resume else Job(config)
    if job is not None:
        refuse_used(folder)
    if not quiet:
        console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
    display = make_display(console, quiet=quiet)
    try:
        if job is None:
            summary = Job.resume(folder, config=config, display=display)
        else:
            summary = job.run(folder, display=display)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted at once; go on with: {resume_command(folder)}") from None
    except JobFailed as error:
        raise type(error)(f"{error}; when that is mended, go on with: {resume_command(folder)}") from error
    finally:
        display.close()
    if not quiet:
        print_report(console, summary, folder)
    if summary.outcome == INTERRUPTED:
        raise Interrupted(f"interrupted; go on with: {resume_command(folder)}" if quiet else INTERRUPTED)
