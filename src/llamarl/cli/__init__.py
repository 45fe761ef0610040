"""The command line. Commands parse, call, print; torch is imported only by those that compute."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamarl import __version__
from llamarl.cli.bench import bench
from llamarl.cli.check import check_command
from llamarl.cli.cluster import certs_command, worker_command
from llamarl.cli.env import env
from llamarl.cli.help_format import EXIT_CODES, USAGE_ERROR, Commands, describe_usage_error
from llamarl.cli.models import eval_command, generate_command, import_gguf_command, merge_command
from llamarl.cli.plan import plan_command, simulate_command
from llamarl.cli.push import push_command
from llamarl.cli.records import audit_command, replay_command
from llamarl.cli.runs import rollouts_command, runs_command
from llamarl.cli.score import score_command
from llamarl.cli.serve import serve_command
from llamarl.cli.settings import config_command
from llamarl.cli.train import sft_command, train_command
from llamarl.cli.transfer import plan_transfer_command
from llamarl.cli.view import view_command
from llamarl.engine.out_of_memory import is_out_of_memory
from llamarl.errors import InputError, Interrupted, JobFailed, LlamaRLError
from llamarl.observe.loggers import leave_loggers_behind

app = Commands(
    name="llamarl",
    help="Asynchronous reinforcement learning for language models.",
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(env, name="env")


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


app.command("train")(train_command)
app.command("sft")(sft_command)
app.command("check")(check_command)
app.command("generate")(generate_command)
app.command("serve")(serve_command)
app.command("import-gguf")(import_gguf_command)
app.command("merge")(merge_command)
app.command("eval")(eval_command)
app.command("score")(score_command)
app.command("view")(view_command)
app.command("runs")(runs_command)
app.command("rollouts")(rollouts_command)
app.command("audit")(audit_command)
app.command("replay")(replay_command)
app.command("push")(push_command)
app.command("config")(config_command)
app.command("plan")(plan_command)
app.command("simulate")(simulate_command)
app.command("plan-transfer")(plan_transfer_command)
app.command("worker")(worker_command)
app.command("certs")(certs_command)


def main() -> None:
    """Run a command, and end the process with its exit code."""
    code = run_command()
    leave_loggers_behind(code)
    sys.exit(code)


def run_command() -> int:
    """Turn every failure that a user can cause into one line on stderr and an exit code for its kind."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="llamarl", standalone_mode=False)
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
