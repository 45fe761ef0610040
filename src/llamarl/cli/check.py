"""`llamarl check`: this machine, then a job on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from llamarl.cli.help_format import OVERRIDES
from llamarl.cli.plan import AnswerOption
from llamarl.config.file import load_config
from llamarl.errors import InputError


def check_command(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="a YAML file, as for `train`; without it, the machine alone")
    ] = "",
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where the record would go; default: under runs/")
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(metavar="NAME", help="predict for a100, h100 ..., or a .json file of `bench --calibrate`"),
    ] = "",
    answer: AnswerOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Say whether this machine is ready, whether a job fits it, how long that takes and what would be better. Exit code 0:
    fine, perhaps with warnings; 1: there are problems; 2: the command or the settings are wrong."""
    settings = [*([config] if "=" in config else []), *(overrides or [])]
    has_job = bool(config)
    if (gpu or answer) and not has_job:
        raise InputError(
            f"{'--gpu' if gpu else '--answer'}: is about a job; name its CONFIG, or a setting such as seed=0"
        )
    settled = load_config(Path(config) if config and "=" not in config else None, settings) if has_job else None

    from llamarl.plan.gpus import gpu_named

    named = gpu_named(gpu) if gpu else None

    from llamarl.check.finding import has_problem
    from llamarl.check.machine import judge_machine, machine_facts

    facts = machine_facts(run or Path("runs"))
    machine = list(judge_machine(facts))
    found = []
    if settled is not None:
        from llamarl.check.forecast import forecast
        from llamarl.check.job import check_job, prepared
        from llamarl.hub.resolve import with_hub_files

        settled = with_hub_files(settled)
        job, refusal = prepared(settled)
        found = list(check_job(settled, facts, run, refusal, job.notes if job else ()))
        found += forecast(settled, facts, job.prompts, named, answer) if job and not has_problem(found) else []
    fine = not has_problem([*machine, *found])
    if as_json:
        print(msgspec.json.encode({"fine": fine, "machine": machine, "job": found}).decode())
    else:
        print("\n".join(["this machine", *(one.line() for one in machine)]))
        print("\n".join(["", "this job", *(one.line() for one in found)]) if found else "", end="\n" if found else "")
        print("fine" if fine else "there are problems")
    if not fine:
        raise typer.Exit(1)
