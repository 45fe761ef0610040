"""The command line. Commands parse, call, print; torch is imported only by those that compute."""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from llamarl import __version__
from llamarl.cli.bench import bench
from llamarl.cli.cluster import certs_command, worker_command
from llamarl.cli.models import eval_command, generate_command, import_gguf_command, task_config
from llamarl.cli.plan import plan_command, simulate_command
from llamarl.cli.transfer import plan_transfer_command
from llamarl.cli.whole_help import SETTINGS, USAGE_ERROR, WholeSentences, describe_usage_error
from llamarl.config import Config
from llamarl.config.file import describe, load_config
from llamarl.controller.books import Audit, audit
from llamarl.controller.ledger import read_ledger
from llamarl.controller.replay import replay
from llamarl.engine.local.fork_server import fork_server_ahead
from llamarl.engine.out_of_memory import is_out_of_memory
from llamarl.errors import InputError, Interrupted, JobFailed, LlamaRLError
from llamarl.io.record_log import segment_files
from llamarl.observe.event_log import event_files, read_events
from llamarl.observe.report import resume_command
from llamarl.observe.run_folder import CONFIG, LEDGER, dated_run_folder

_UNFINISHED = 4  # exit code of `audit`

app = typer.Typer(
    name="llamarl",
    help="Asynchronous reinforcement learning for language models.",
    cls=WholeSentences,
    context_settings=SETTINGS,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"llamarl {__version__}")
        raise typer.Exit


@app.callback()
def llamarl(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


@app.command()
def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="a YAML file; without it, the default job", show_default=False)
    ] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="settings that replace the file's")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where the record goes; default: a dated folder under runs/")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the run in DIR from its newest snapshot")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print nothing but errors")] = False,
) -> None:
    """Train a policy by reinforcement learning."""
    settings = list(overrides or [])
    path = None
    if "=" in config:
        settings.insert(0, config)
    elif config:
        path = Path(config)
    if resume:
        if run is None:
            raise InputError("--resume: name the run folder with --run DIR")
        if path is None and (run / CONFIG).is_file():
            path = run / CONFIG
    settled = load_config(path, settings)  # before torch is imported, so that mistakes show at once
    with fork_server_ahead() if settled.engine.kind == "local" else nullcontext():
        _train(settled, run or dated_run_folder(), resume=resume, quiet=quiet)


def _train(config: Config, folder: Path, *, resume: bool, quiet: bool) -> None:
    from llamarl.engine.driver import INTERRUPTED
    from llamarl.jobs.job import Job
    from llamarl.observe.display import make_display
    from llamarl.observe.report import print_report

    console = Console()
    job = None if resume else Job(config)
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


app.command("generate")(generate_command)
app.command("import-gguf")(import_gguf_command)
app.command("eval")(eval_command)


@app.command("score")
def score_command(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="arithmetic, gsm8k, math, svamp, jsonl, code, or a YAML file")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="settings, such as reward.scorer=math")
    ] = None,
) -> None:
    """Judge {"completion", "answer"} lines from stdin as TASK would: one {"reward", "status", "seconds"} for each."""
    from llamarl.tasks.judge import Judge
    from llamarl.tasks.registry import own_scorers
    from llamarl.tasks.score_lines import score_lines

    config = task_config(task, ["reward.retries=0", *(overrides or [])])  # failures must show here
    scorers = own_scorers(config.task)
    judge = Judge.of(config, scorers)
    judge.prepare()
    with suppress(BrokenPipeError):
        score_lines(sys.stdin.buffer, sys.stdout, sys.stderr, judge, scorers[0])
    judge.close()


@app.command("audit")
def audit_command(run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]) -> None:
    """Say whether every group was trained exactly once or dropped with a reason; reads only the ledger. Exit code 0: yes; 1:
    no; 4: so far, but the run is unfinished."""
    if not run.is_dir():
        raise InputError(f"{run}: no such run folder")
    if not segment_files(run / LEDGER):
        raise InputError(f"{run}: holds no run: no ledger there")
    found = audit(read_ledger(run / LEDGER))
    print(_describe_audit(found, run))
    if not found.clean:
        raise typer.Exit(_UNFINISHED if found.only_unfinished else 1)


@app.command("replay")
def replay_command(run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]) -> None:
    """Tell a run's recorded events to a fresh controller, and hold what it writes against the ledger."""
    logs = {number: read_events(path) for number, path in event_files(run).items()}
    if not logs:
        is_run = bool(segment_files(run / LEDGER))
        raise InputError(f"{run}: {'its event log is gone' if is_run else 'no run folder with an event log'}")
    found = replay(logs, read_ledger(run / LEDGER))
    print(f"{found.runs} runs, {found.num_events:,} events, {found.num_records:,} ledger records")
    for note in found.notes:
        print(note)
    if found.difference:
        print(found.difference)
        raise typer.Exit(1)
    if not found.num_records:
        print("nothing was left to compare")
        raise typer.Exit(1)
    print("the replayed controller wrote the same")


@app.command("config")
def config_command() -> None:
    """Print every setting with its default and meaning, as YAML to start from."""
    section = ""
    for key, default, meaning in describe():
        prefix, _, name = key.rpartition(".")
        if prefix != section:
            print(f"\n{prefix}:")
            section = prefix
        indent = "  " if prefix else ""
        print(f"{indent}{name}: {default}".ljust(36) + f"  # {meaning}")


app.command("plan")(plan_command)
app.command("simulate")(simulate_command)
app.command("plan-transfer")(plan_transfer_command)
app.command("worker")(worker_command)
app.command("certs")(certs_command)


def _describe_audit(found: Audit, run: Path) -> str:
    dropped = "".join(f"\n  {count} dropped: {reason}" for reason, count in found.dropped.items())
    lines = [
        f"{found.num_groups} groups, {found.updates} updates, {found.rewinds} rewinds",
        f"  {found.trained} trained exactly once, at most {found.max_staleness} versions stale{dropped}",
    ]
    for name, count, ordinals in (
        (
            "not trained yet" if found.only_unfinished else "neither trained nor dropped",
            found.num_unfinished,
            found.unfinished,
        ),
        ("counted more than once", len(found.counted_twice), found.counted_twice),
        ("never issued", len(found.never_issued), found.never_issued),
    ):
        if count:
            shown = ", ".join(map(str, ordinals[:10])) + (" ..." if count > 10 else "")
            lines.append(f"  {count} {name}: {shown}")
    if found.digest:
        lines.append(f"  digest of what was trained: {found.digest}")
    lines.append(f"closed: {found.closed}" if found.closed else "not closed: the job is running, or was killed")
    if found.only_unfinished:
        return "\n".join([*lines, f"clean so far, but unfinished; go on with: {resume_command(run)}"])
    return "\n".join([*lines, "clean" if found.clean else "NOT clean"])


def main() -> None:
    """Turn every failure that a user can cause into one line on stderr and an exit code for its kind."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="llamarl", standalone_mode=False)
    except LlamaRLError as error:
        print(f"llamarl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except USAGE_ERROR as error:
        print(f"llamarl: {describe_usage_error(error)}", file=sys.stderr)
        sys.exit(InputError.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        print(f"llamarl: out of memory: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        sys.exit(JobFailed.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        print("llamarl: interrupted", file=sys.stderr)
        sys.exit(Interrupted.exit_code)
    sys.exit(code or 0)
