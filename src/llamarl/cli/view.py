"""`llamarl view`: the page of one run or several, live or written to a file."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamarl.errors import InputError

if TYPE_CHECKING:
    from llamarl.view.data import ViewData

_NICE = 10  # training on the same machine comes first


def view_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN ...", help="run folders")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write one self-contained HTML file instead of serving the page")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on this machine; 0: a free one")] = 0,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="predict the timeline for this GPU: as for `llamarl simulate`")
    ] = "",
    open_browser: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> None:
    """Show runs on a page, live while they train and afterwards: curves, advice, timeline, rollouts, comparison, audit."""
    from llamarl.plan.gpus import gpu_named
    from llamarl.view.data import ViewData

    if gpu:
        gpu_named(gpu)
    data = ViewData(runs, gpu)
    if out is not None:
        _write(data, out)
        return
    from llamarl.view.server import ViewServer

    with suppress(OSError):
        os.nice(_NICE)
    server = ViewServer(data, port)
    data.follow()
    print(
        f"{server.url}\nCtrl-C ends it. From another machine: ssh -L {server.port}:127.0.0.1:{server.port} HOST",
        flush=True,
    )
    if open_browser:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.server_close()
        data.close()


def _write(data: ViewData, out: Path) -> None:
    from llamarl.view.export import written_page

    data.index()
    page = written_page(data)
    try:
        out.write_bytes(page)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror}") from None
    print(f"{out}: {len(page) / 1e6:.1f} MB")
