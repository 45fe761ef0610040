"""`llamarl serve`: a model behind HTTP, in the dialects that agents and evaluation harnesses speak."""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamarl.cli.devices import DeviceOption, device_or_refuse, say_device
from llamarl.cli.models import MODEL_HELP, Dtype
from llamarl.config import model_folder
from llamarl.errors import InputError, JobFailed
from llamarl.hub.models import fetch_model

if TYPE_CHECKING:
    from llamarl.serve.local_backend import LocalBackend

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SWITCH_S = 0.0005  # the decoder's thread must not wait long for the event loop's, nor that for the decoder's


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

    from llamarl.generate.llm import LLM
    from llamarl.serve.app import make_app
    from llamarl.serve.limits import ServeLimits
    from llamarl.serve.local_backend import LocalBackend
    from llamarl.serve.run import HttpServer
    from llamarl.serve.session import KeyAccess

    folder = model_folder(fetch_model(model, "MODEL"))
    llm = LLM(folder, device=device_or_refuse(device), dtype=dtype.value)
    if max_model_len > llm.shape.max_positions:
        raise InputError(f"--max-model-len {max_model_len}: the model has {llm.shape.max_positions} positions")
    limits = ServeLimits(max_requests=max_requests, max_body_bytes=max_body_mb << 20, grace_s=grace_s)
    backend = LocalBackend(llm, name=name or _name_of(model), slots=slots, max_length=max_model_len)
    server = HttpServer(make_app(backend, KeyAccess(llm.tokenizer, keys), limits), limits, host=host, port=port)
    say_device(llm.device, llm.precision)
    sys.setswitchinterval(_SWITCH_S)
    backend.on_failure = server.stop
    backend.load()
    gc.freeze()  # what is there now stays; looking through it again and again would hold up answers
    backend.start()
    try:
        server.run(ready=lambda: print(f"{backend.name} on {server.url}", flush=True))
    finally:
        backend.close()
    _check_failure(backend)


def _check_failure(backend: LocalBackend) -> None:
    if backend.failure is not None:
        raise JobFailed(f"the model stopped answering: {type(backend.failure).__name__}: {backend.failure}")


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
