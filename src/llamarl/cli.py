"""The command line. Commands parse, call, print; torch is imported only by those that compute."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from llamarl.configfile import describe, load_config
from llamarl.controller.ledger import Audit, audit, read_ledger
from llamarl.errors import InputError, Interrupted, LlamaRLError
from llamarl.observe.run_folder import LEDGER


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


app = typer.Typer(
    name="llamarl",
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    if resume and run is None:
        raise InputError("--resume: name the run folder with --run DIR")
    settled = load_config(path, settings)  # mistakes are told at once, before torch is imported

    from llamarl.job import Job
    from llamarl.observe.display import make_display
    from llamarl.observe.report import print_report
    from llamarl.observe.run_folder import dated_run_folder

    console = Console()
    folder = run or dated_run_folder()
    job = None if resume else Job(settled)
    if not quiet:
        console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
    display = make_display(console, quiet=quiet)
    try:
        if job is None:
            summary = Job.resume(folder, config=settled if path else None, overrides=settings, display=display)
        else:
            summary = job.run(folder, display=display)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; the record so far is in {folder}") from None
    finally:
        display.close()
    if not quiet:
        print_report(console, summary, folder)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder")],
    prompt: Annotated[str, typer.Option(help="what to complete")],
    chat: Annotated[bool, typer.Option("--chat", help="treat the prompt as a user's message")] = False,
    samples: Annotated[int, typer.Option(min=1, help="how many completions")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest completion")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[Dtype, typer.Option(help="of weights and cache")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
) -> None:
    """Sample from a model folder."""
    import torch

    from llamarl.generate.complete import complete
    from llamarl.types import Sampling

    sampling = Sampling(samples=samples, max_new_tokens=max_new_tokens, temperature=temperature)
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


@app.command("audit")
def audit_command(run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]) -> None:
    """Say whether every group was trained exactly once or dropped with a reason; reads only the ledger."""
    if not run.is_dir():
        raise InputError(f"{run}: no such run folder")
    found = audit(read_ledger(run / LEDGER))
    print(_describe_audit(found))
    if not found.clean:
        raise typer.Exit(1)


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


def device_or_refuse(device: str) -> str:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device}: cannot be used here ({str(error).splitlines()[0]})") from None
    return device


def _describe_audit(found: Audit) -> str:
    dropped = "".join(f"\n  {count} dropped: {reason}" for reason, count in found.dropped.items())
    lines = [
        f"{found.num_groups} groups, {found.updates} updates, {found.rewinds} rewinds",
        f"  {found.trained} trained exactly once{dropped}",
    ]
    for name, ordinals in (
        ("neither trained nor dropped", found.unfinished),
        ("counted more than once", found.counted_twice),
        ("never issued", found.never_issued),
    ):
        if ordinals:
            shown = ", ".join(map(str, ordinals[:10])) + (" ..." if len(ordinals) > 10 else "")
            lines.append(f"  {len(ordinals)} {name}: {shown}")
    lines.append(f"closed: {found.closed}" if found.closed else "not closed: the job is running, or was killed")
    return "\n".join([*lines, "clean" if found.clean else "NOT clean"])


def main() -> None:
    """Every failure that a user can cause is one line on stderr and an exit code that says whose fault it was."""
    try:
        app()
    except LlamaRLError as error:
        print(f"llamarl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
