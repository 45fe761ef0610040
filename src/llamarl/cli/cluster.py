"""`llamarl worker` and `llamarl certs`: the commands that a cluster needs besides `train`. No torch here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from llamarl.errors import InputError, Interrupted


def worker_command(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="this host's address, as engine.hosts names it")],
    certs: Annotated[str, typer.Option(metavar="DIR", help="this host's folder, made by `llamarl certs`")] = "",
    join: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="join the job whose engine.join this is, now or when it starts")
    ] = "",
    replicas: Annotated[
        int, typer.Option(min=0, help="with --join: generators to bring; 0: one for each generator.tensor GPUs, or one")
    ] = 0,
) -> None:
    """Serve this host to jobs with engine=monarch, until stopped. Beyond loopback it needs certificates.

    With --join, it offers itself to a running job. SIGTERM or Ctrl-C announce its leave; the job goes on without it."""
    from llamarl.engine.monarch.addresses import url_of
    from llamarl.engine.monarch.install import check_installed, prepare_environment
    from llamarl.engine.monarch.join_client import JoinClient, begin_to_count_gpus, check_join

    url = url_of("--listen", listen, certs)
    if replicas and not join:
        raise InputError("--replicas: cannot take effect without --join")
    if join:
        check_join(listen, join, certs)
    check_installed("worker")
    prepare_environment("--certs", certs)

    from llamarl.engine.monarch.worker import serve, serve_joined

    print(f"serving {url}", file=sys.stderr, flush=True)
    if join:
        counting = begin_to_count_gpus()
        serve_joined(url, JoinClient(join, certs, listen=listen, count_gpus=counting, replicas=replicas))
        return
    try:
        serve(url)
    except KeyboardInterrupt:
        raise Interrupted("worker: stopped") from None


def certs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where the cluster's certificates are, or are to be")],
    hosts: Annotated[list[str], typer.Argument(metavar="HOST", help="names or addresses, the job's own too")],
    days: Annotated[int, typer.Option(min=1, help="how long they are good for")] = 365,
) -> None:
    """Make certificates for the hosts of a cluster: one folder each, to be copied to that host and to no other."""
    from llamarl.engine.monarch.install import check_installed

    check_installed("certs", "cryptography")
    from llamarl.engine.monarch.certs import make_certificates

    for made in make_certificates(folder, hosts, days):
        print(f"{made}: for {made.name}")
    print(f"{folder / 'ca.key'}: signs further hosts; whoever has it can join the cluster, so keep it off the hosts")
