"""Reward rises in an environment that nobody here wrote: the one that OpenEnv makes with `openenv init`, through verifiers.

    llamarl env install 'verifiers[openenv]' --at environments/openenv
    python benchmarks/claims/openenv_learns.py [--python environments/openenv/bin/python] [--runs FOLDER] [KEY=VALUE ...]

The environment repeats each message and gives a tenth of its length. The run is examples/openenv.yaml: SmolLM2-135M-Instruct
is to find that out. So what is shown is that tokens and rewards come back through verifiers' server as they should, not that
anything hard is learned. Made for half an hour on two cores, most of it for the process that verifiers starts for each
episode. Must: the mean reward of the last ten updates is above that of the first ten by more than three standard errors.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, variance

from arms import ROOT, Arm, Figures, claim_parser, keep, made, options_of
from plot import lines

MUST, SOME = 3.0, 10  # standard errors; updates that are averaged
PORT = 8000  # of the example
SERVE = """
import socket, sys, uvicorn
from echo_env.models import EchoAction, EchoObservation
from echo_env.server.echo_env_environment import EchoEnvironment
from openenv.core.env_server.http_server import create_app

app = create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo_env", max_concurrent_envs=64)
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
"""


@contextmanager
def echo_server(python: Path, folder: Path, port: int = 0) -> Iterator[str]:
    """The address of the environment that OpenEnv makes, served from `folder` by a Python that has it; port 0: any."""
    if not (folder / "echo_env").exists():
        command = [str(python.with_name("openenv")), "init", "echo_env", "--output-dir", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    with subprocess.Popen(
        [python, "-c", SERVE, str(port)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def main() -> None:
    parser = claim_parser(__doc__)
    parser.add_argument("--python", type=Path, default=Path("environments/openenv/bin/python"), help="it has OpenEnv")
    args = parser.parse_intermixed_args()
    options, python = options_of(args), args.python.absolute()
    options.runs.mkdir(parents=True, exist_ok=True)
    with echo_server(python, options.runs, PORT):
        arm = Arm("openenv", (f"task.env_python={python}",), ROOT / "examples" / "openenv.yaml")
        record = made(arm, options)
    rows = [row for _, row in sorted(record.metrics.items())]
    rewards, lengths = ([row[name] for row in rows] for name in ("reward", "answer_tokens"))
    first, last = fmean(rewards[:SOME]), fmean(rewards[-SOME:])
    error = math.sqrt((variance(rewards[:SOME]) + variance(rewards[-SOME:])) / SOME)
    agents = record.summary["agents"]
    print(f"mean reward {first:.2f} -> {last:.2f}, {(last - first) / error:.1f} standard errors (must {MUST:g})")
    print(f"{lengths[0]:.0f} -> {lengths[-1]:.0f} tokens an answer; {agents['agent_sessions']:,} episodes")
    figures = {
        "rewards": rewards,
        "answer_tokens": lengths,
        "first": first,
        "last": last,
        "standard_error": error,
        "logprob_gap": record.mean("logprob_gap"),
        "met": last - first > MUST * error,
        "summary": record.summary,
    }
    keep("openenv_learns", options, figures, picture)


def picture(figures: Figures) -> str:
    series = {"mean reward": list(enumerate(figures["rewards"], start=1))}
    return lines("SmolLM2-135M in OpenEnv's echo environment, through verifiers", "updates", "mean reward", series, ())


if __name__ == "__main__":
    main()
