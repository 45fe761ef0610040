"""The command line. Commands parse, call, print; torch is imported only by those that compute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from llamarl.cli.bench import bench, device_or_refuse
from llamarl.cli.cluster import certs_command, worker_command
from llamarl.cli.plan import plan_command, simulate_command
from llamarl.cli.transfer import plan_transfer_command
from llamarl.config import Config
from llamarl.configfile import describe, load_config
from llamarl.controller.books import Audit, audit
from llamarl.controller.ledger import read_ledger
from llamarl.controller.replay import replay
from llamarl.engine.local.nursery import nursery_ahead
from llamarl.errors import InputError, Interrupted, LlamaRLError
from llamarl.observe.event_log import event_files, read_events
from llamarl.observe.run_folder import CONFIG, LEDGER, dated_run_folder

if TYPE_CHECKING:
    from llamarl.tasks.task import Prompter
    from llamarl.types import Problem

_SECONDS_BETWEEN_LINES = 5.0


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Split(StrEnum):
    auto = "auto"
    held_out = "held_out"
    test = "test"


app = typer.Typer(
    name="llamarl",
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")


@app.command()
def train(
    config: Annotated[
        str, typer.Argument(metavar="[CONFIG]", help="a YAML file; without it, the default job", show_default=False)
    ] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="settings that replace the file's")
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
    settled = load_config(path, settings)  # mistakes are told at once, before torch is imported
    with nursery_ahead() if settled.engine.kind == "local" else nullcontext():
        _train(settled, run or dated_run_folder(), resume=resume, quiet=quiet)


def _train(config: Config, folder: Path, *, resume: bool, quiet: bool) -> None:
    from llamarl.engine.driver import INTERRUPTED
    from llamarl.job import Job
    from llamarl.observe.display import make_display
    from llamarl.observe.report import print_report, resume_command

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
    finally:
        display.close()
    if not quiet:
        print_report(console, summary, folder)
    if summary.outcome == INTERRUPTED:
        raise Interrupted(f"interrupted; go on with: {resume_command(folder)}")


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder")],
    prompt: Annotated[str, typer.Option(help="what to complete")],
    chat: Annotated[bool, typer.Option("--chat", help="treat the prompt as a user's message")] = False,
    samples: Annotated[int, typer.Option(min=1, help="how many completions")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest completion")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="only the k likeliest tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="only the likeliest that make up this share")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="none below this share of the likeliest")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[Dtype, typer.Option(help="of weights and cache")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
) -> None:
    """Sample from a model folder."""
    import torch

    from llamarl.generate.complete import complete
    from llamarl.types import Sampling

    sampling = Sampling(
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    texts = complete(
        model,
        prompt,
        sampling,
        chat=chat,
        seed=seed,
        dtype=getattr(torch, dtype.value),
        device=device_or_refuse(device),
    )
    for number, text in enumerate(texts, start=1):
        if samples > 1:
            print(f"--- {number} of {samples}")
        print(text)


@app.command("import-gguf")
def import_gguf_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a .gguf file (llama or qwen2 architecture)")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the model folder to make")],
    dtype: Annotated[Dtype, typer.Option(help="of the weights written")] = Dtype.bfloat16,
) -> None:
    """Turn a GGUF file into a Hugging Face folder with tokenizer and chat template."""
    from llamarl.model.gguf_import import import_gguf

    import_gguf(file, folder, dtype=dtype.value)
    print(f"written to {folder}")


@app.command("eval")
def eval_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a model folder; 'tiny' is the shipped model")],
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="arithmetic, gsm8k, math, svamp, jsonl, code, or a YAML file")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="settings, such as task.path=data/gsm8k")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="answers to each problem; more than 1 gives pass@k")] = 1,
    problems: Annotated[int, typer.Option(min=0, help="how many problems; 0: all")] = 0,
    split: Annotated[Split, typer.Option(help="test: the fixed test problems where there are any")] = Split.auto,
    temperature: Annotated[
        float, typer.Option(min=-1.0, help="default: 0 for one answer, else generator.temperature")
    ] = -1.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    answers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write every answer and its reward here, as JSON lines")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Measure how well a model answers a task: accuracy and pass@k, with intervals."""
    from llamarl.tasks.registry import open_task

    # Nothing is trained, so a group's size must not stand in the way of few slots.
    config = _task_config(task, [*(overrides or []), f"model.path={model}", "schedule.samples_per_group=2"])
    chosen = choose_problems(open_task(config), split, problems)
    device_or_refuse(device)

    from llamarl.generate.evaluate import describe_evaluation, evaluate

    if temperature < 0:
        temperature = 0.0 if samples == 1 else config.generator.temperature
    with _answer_file(answers) as tell:
        found = evaluate(
            config,
            chosen,
            samples=samples,
            temperature=temperature,
            device=device,
            progress=_progress_on_stderr(),
            tell=tell,
        )
    print(msgspec.json.encode(found).decode() if as_json else describe_evaluation(found))


@contextmanager
def _answer_file(path: Path | None) -> Iterator[Callable[[msgspec.Struct], None]]:
    """A function that appends a line to a new file, or does nothing."""
    if path is None:
        yield lambda answer: None
        return
    try:
        file = path.open("xb")
    except OSError as error:
        raise InputError(f"--answers {path}: cannot be made: {error.strerror}") from None

    def append(answer: msgspec.Struct) -> None:
        file.write(msgspec.json.encode(answer) + b"\n")

    with file:
        yield append


def choose_problems(task: Prompter, split: Split, count: int) -> Sequence[Problem]:
    """The fixed test problems where there are any, else those that are held out."""
    wanted = count or sys.maxsize
    if split is not Split.auto:
        return task.evaluation(wanted, split.value)
    try:
        return task.evaluation(wanted, Split.test.value)
    except InputError:
        return task.evaluation(wanted)


def _progress_on_stderr() -> Callable[[int, int], None]:
    """A line now and then, for people; nothing where no one looks."""
    last_s = time.monotonic()

    def show(done: int, of: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _SECONDS_BETWEEN_LINES:
            last_s = time.monotonic()
            print(f"{done} of {of} answers judged", file=sys.stderr, flush=True)

    return show


@app.command("score")
def score_command(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="arithmetic, gsm8k, math, svamp, jsonl, code, or a YAML file")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="settings, such as reward.scorer=math")
    ] = None,
) -> None:
    """Judge {"completion", "answer"} lines from stdin as TASK would: one {"reward", "status", "seconds"} for each."""
    from llamarl.tasks.judge import Judge
    from llamarl.tasks.registry import own_scorers
    from llamarl.tasks.score_lines import score_lines

    config = _task_config(task, ["reward.retries=0", *(overrides or [])])  # what fails here is to be seen
    scorers = own_scorers(config.task)
    judge = Judge.of(config, scorers)
    judge.prepare()
    with suppress(BrokenPipeError):
        score_lines(sys.stdin.buffer, sys.stdout, sys.stderr, judge, scorers[0])
    judge.close()


def _task_config(task: str, overrides: list[str]) -> Config:
    """TASK is the name of a kind, with default settings, or a YAML file."""
    if task.endswith((".yaml", ".yml")):
        return load_config(Path(task), overrides)
    return load_config(None, [f"task.kind={task}", *overrides])


@app.command("audit")
def audit_command(run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]) -> None:
    """Say whether every group was trained exactly once or dropped with a reason; reads only the ledger."""
    if not run.is_dir():
        raise InputError(f"{run}: no such run folder")
    found = audit(read_ledger(run / LEDGER))
    print(_describe_audit(found))
    if not found.clean:
        raise typer.Exit(1)


@app.command("replay")
def replay_command(run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]) -> None:
    """Tell a run's recorded events to a fresh controller, and hold what it writes against the ledger."""
    logs = {number: read_events(path) for number, path in event_files(run).items()}
    if not logs:
        raise InputError(f"{run}: no run folder with an event log")
    found = replay(logs, read_ledger(run / LEDGER))
    print(f"{found.runs} runs, {found.num_events:,} events, {found.num_records:,} ledger records")
    for note in found.notes:
        print(note)
    if found.difference:
        print(found.difference)
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


def _describe_audit(found: Audit) -> str:
    dropped = "".join(f"\n  {count} dropped: {reason}" for reason, count in found.dropped.items())
    lines = [
        f"{found.num_groups} groups, {found.updates} updates, {found.rewinds} rewinds",
        f"  {found.trained} trained exactly once, at most {found.max_staleness} versions stale{dropped}",
    ]
    for name, count, ordinals in (
        ("neither trained nor dropped", found.num_unfinished, found.unfinished),
        ("counted more than once", len(found.counted_twice), found.counted_twice),
        ("never issued", len(found.never_issued), found.never_issued),
    ):
        if count:
            shown = ", ".join(map(str, ordinals[:10])) + (" ..." if count > 10 else "")
            lines.append(f"  {count} {name}: {shown}")
    lines.append(f"closed: {found.closed}" if found.closed else "not closed: the job is running, or was killed")
    return "\n".join([*lines, "clean" if found.clean else "NOT clean"])


def main() -> None:
    """Every failure that a user can cause is one line on stderr and an exit code that says whose fault it was."""
    try:
        app()
    except LlamaRLError as error:
        print(f"llamarl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("llamarl: interrupted", file=sys.stderr)
        sys.exit(Interrupted.exit_code)
