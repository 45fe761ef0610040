"""`llamarl serve`: a model behind HTTP, in the dialects that agents and evaluation harnesses speak."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from llamarl.cli.devices import DeviceOption, say_device
from llamarl.cli.models import MODEL_HELP, Dtype
from llamarl.config import model_folder
from llamarl.errors import InputError, JobFailed
from llamarl.hub.models import fetch_model

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    host: Annotated[str, typer.Option(help="address to listen on; beyond this machine only with a key")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one")] = 8000,
    key: Annotated[
        list[str] | None, typer.Option(help="key that clients must send; may be given more than once")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="keys, one on each line; not seen in the list of processes")
    ] = None,
    name: Annotated[str, typer.Option(help="the model's name in answers; default: as MODEL")] = "",
    slots: Annotated[int, typer.Option(min=0, help="answers sampled at once; 0: 256 on a GPU, 16 on a CPU")] = 0,
    max_model_len: Annotated[
        int,
        typer.Option(min=0, help="longest prompt and answer; 0: as the model, at most 16384 on a GPU, 2048 on a CPU"),
    ] = 0,
    max_requests: Annotated[int, typer.Option(min=1, help="requests at once; more get 429")] = 4096,
    max_body_mb: Annotated[int, typer.Option(min=1, help="largest body of a request; more gets 413")] = 8,
    grace_s: Annotated[float, typer.Option(min=0, help="time for running answers after SIGTERM or Ctrl-C")] = 30.0,
    dtype: Annotated[Dtype, typer.Option(help="of weights and cache; auto: as in eval and train")] = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's and vLLM's dialects."""
    if missing := [package for package in ("uvicorn", "httptools") if find_spec(package) is None]:
        raise InputError(f"serve needs the package {missing[0]}: pip install 'llamarl[serve]'")
    keys = _keys(key or [], key_file)
    if host not in _LOOPBACK and not keys:
        raise InputError(f"--host {host}: beyond this machine only with --key or --key-file")

    from llamarl.serve.app import make_app
    from llamarl.serve.limits import ServeLimits
    from llamarl.serve.local_backend import LocalBackend
    from llamarl.serve.run import HttpServer
    from llamarl.serve.session import KeyAccess

    backend = LocalBackend(
        model_folder(fetch_model(model, "MODEL")),
        name=name or _name_of(model),
        device=device,
        dtype=dtype.value,
        slots=slots,
        max_length=max_model_len,
    )
    if max_model_len > backend.opened.shape.max_positions:
        raise InputError(
            f"--max-model-len {max_model_len}: the model has {backend.opened.shape.max_positions} positions"
        )
    limits = ServeLimits(max_requests=max_requests, max_body_bytes=max_body_mb << 20, grace_s=grace_s)
    server = HttpServer(make_app(backend, KeyAccess(backend.tokenizer, keys), limits), limits, host=host, port=port)
    backend.on_failure = server.stop
    backend.start()
    say_device(backend.device, backend.precision)
    gc.freeze()  # what is there now stays; looking through it again and again would hold up answers

    def ready() -> None:
        backend.attach()
        print(f"{backend.name} on {server.url}", flush=True)

    try:
        server.run(ready)
        failure = backend.failure
    finally:
        backend.close()
    if failure:
        raise JobFailed(f"the model stopped answering: {failure}")


def _keys(given: list[str], file: Path | None) -> list[str]:
    if not all(given):
        raise InputError("--key: is empty")
    if file is None:
        return given
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--key-file {file}: cannot be read ({error})") from None
    found = [line for line in lines if line]
    if not found:
        raise InputError(f"--key-file {file}: holds no key")
    return [*given, *found]


def _name_of(model: str) -> str:
    """The name of a model on the hub as it is; of a folder its last part."""
    return Path(model).resolve().name if Path(model).is_dir() else model
