"""The command line. Commands parse, call, print; each is imported when it is called, and torch only by those that compute."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamarl import __version__
from llamarl.cli.help_format import EXIT_CODES, USAGE_ERROR, describe_usage_error
from llamarl.cli.imported import ImportedCommands
from llamarl.engine.out_of_memory import is_out_of_memory
from llamarl.errors import InputError, Interrupted, JobFailed, LlamaRLError
from llamarl.observe.loggers import leave_loggers_behind

# Each command, and where it is: below this package, and imported when it is asked for.
COMMANDS = {
    "train": "train:train_command",
    "sft": "train:sft_command",
    "check": "check:check_command",
    "generate": "models:generate_command",
    "serve": "serve:serve_command",
    "import-gguf": "models:import_gguf_command",
    "merge": "models:merge_command",
    "eval": "models:eval_command",
    "score": "score:score_command",
    "view": "view:view_command",
    "runs": "runs:runs_command",
    "rollouts": "runs:rollouts_command",
    "audit": "records:audit_command",
    "replay": "records:replay_command",
    "push": "push:push_command",
    "config": "settings:config_command",
    "plan": "plan:plan_command",
    "simulate": "plan:simulate_command",
    "plan-transfer": "transfer:plan_transfer_command",
    "worker": "cluster:worker_command",
    "certs": "cluster:certs_command",
    "bench": "bench:bench",
    "env": "env:env",
}

app = ImportedCommands(
    COMMANDS,
    name="llamarl",
    help="Asynchronous reinforcement learning for language models.",
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
)


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


def main() -> None:
    """Run a command, and end the process with its exit code."""
    code = run_command()
    leave_loggers_behind(code)
    sys.exit(code)


def run_command() -> int:
    """Turn every failure that a user can cause into one line on stderr and an exit code for its kind."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="llamarl", standalone_mode=False)
        if code == Interrupted.exit_code:  # typer's, for a KeyboardInterrupt
            raise KeyboardInterrupt
    except LlamaRLError as error:
        print(f"llamarl: {error}", file=sys.stderr)
        return error.exit_code
    except USAGE_ERROR as error:
        print(f"llamarl: {describe_usage_error(error)}", file=sys.stderr)
        return InputError.exit_code
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        print(f"llamarl: out of memory: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return JobFailed.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("llamarl: interrupted", file=sys.stderr)
        return Interrupted.exit_code
    return code or 0
