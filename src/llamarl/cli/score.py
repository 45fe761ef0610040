"""`llamarl score`: judge completions from stdin."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamarl.cli.help_format import OVERRIDES
from llamarl.cli.models import task_config
from llamarl.errors import LlamaRLError


def score_command(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="arithmetic, gsm8k, math, svamp, dataset, code, or a YAML file")
    ],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
) -> None:
    """Judge {"completion", "answer"} lines from stdin as TASK would: one {"reward", "status", "seconds"} for each. The exit
    code is 1 if one got no reward."""
    from llamarl.tasks.judge import Judge
    from llamarl.tasks.registry import own_scorers
    from llamarl.tasks.score_lines import score_lines

    config = task_config(task, ["reward.retries=0", *(overrides or [])])  # failures must show here
    scorers = own_scorers(config.task)
    judge = Judge.of(config, scorers)
    judge.prepare()
    try:
        counts = score_lines(sys.stdin.buffer, sys.stdout, sys.stderr, judge, scorers[0])
    except BrokenPipeError:  # whoever reads the verdicts has seen enough
        return
    finally:
        judge.close()
    if counts.failed:
        raise LlamaRLError(f"{counts.failed} of {counts.lines} answers got no reward")
