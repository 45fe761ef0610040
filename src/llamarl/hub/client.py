"""The border to `huggingface_hub`: where it is loaded, and every failure of it in one line without a token in it."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

from llamarl.config.hub_names import HubName, hub_cache
from llamarl.errors import InputError

INSTALL = "pip install 'llamarl[hub]'"
_TRUE = {"1", "ON", "YES", "TRUE"}
_NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}
_CUT_SHORT = {"RemoteProtocolError", "ReadError", "ReadTimeout", "IncompleteRead", "ChunkedEncodingError"}
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LAST_STATUS = 500


class Unreachable(InputError):
    """The hub cannot be reached, or is not to be asked; the message says why."""


def load_client(setting: str, name: HubName) -> ModuleType:
    """The package `huggingface_hub`, with its own notices off: what it has to say is told by us."""
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError:
        raise InputError(
            f"{setting}: no file or folder {name} here; to fetch it by that name from the Hugging Face Hub: {INSTALL}"
        ) from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return huggingface_hub


def is_offline() -> bool:
    """Whether the environment forbids asking the hub."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def endpoint() -> str:
    """Address of the hub."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


_hidden: ContextVar[bool] = ContextVar("progress hidden", default=False)


@contextmanager
def without_progress() -> Iterator[None]:
    """Nothing but errors is shown inside the `with` block."""
    before = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(before)


def shows_progress() -> bool:
    return not _hidden.get() and os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() not in _TRUE


def tell(line: str) -> None:
    """Show progress on stderr, unless HF_HUB_DISABLE_PROGRESS_BARS or `without_progress` says not to."""
    if shows_progress():
        print(line, file=sys.stderr, flush=True)


@contextmanager
def bars_on_terminals_only(client: ModuleType) -> Iterator[None]:
    """The client's progress bars are for people: a log gets lines of ours instead."""
    utils = client.utils
    if (sys.stderr.isatty() and shows_progress()) or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextmanager
def one_line_errors(setting: str, name: HubName, what: str, done: str = "fetched") -> Iterator[None]:
    """Turn every error of the client, the network and the disk into one line. `what`: model or dataset; `done`: what was to
    be done with it."""
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except Exception as error:  # foreign code: the client raises errors of its own, of its HTTP library and of the disk
        raise _explained(error, setting, name, what, done) from None


def _explained(error: Exception, setting: str, name: HubName, what: str, done: str) -> InputError:
    from huggingface_hub import errors

    causes = [error, *filter(None, [error.__cause__, error.__context__])]
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return InputError(
                f"{setting}: no room for {name}: the disk of {hub_cache()} is full; free some, or set HF_HOME"
            )
        if isinstance(cause, PermissionError) or (isinstance(cause, OSError) and cause.errno == errno.EROFS):
            return InputError(
                f"{setting}: the hub's cache {hub_cache()} cannot be written; set HF_HOME to another folder"
            )
        if isinstance(cause, errors.GatedRepoError):
            return InputError(
                f"{setting}: {name} is gated: accept its terms at {endpoint()}/{_page(name, what)}, then set HF_TOKEN or "
                "run `hf auth login`"
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return InputError(f"{setting}: {name.repo} has no branch, tag or commit '{name.revision or 'main'}'")
        if isinstance(cause, errors.RepositoryNotFoundError) and done == "fetched":
            return InputError(
                f"{setting}: no file or folder {name} here, and the hub has no {what} {name.repo}; if it is private, set "
                "HF_TOKEN or run `hf auth login`"
            )
    for cause in causes:
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        if status in (401, 403):
            return InputError(f"{setting}: the hub refuses {name} ({status}); check HF_TOKEN or run `hf auth login`")
        if isinstance(status, int) and status >= _LAST_STATUS:
            return Unreachable(f"{setting}: {name} cannot be {done}: {endpoint()} answers with error {status}")
    told = _brief(error)
    if "Consistency check failed" in told or any(type(cause).__name__ in _CUT_SHORT for cause in causes):
        return InputError(f"{setting}: the download of {name} broke off; try it again, whole files are kept")
    if any(type(cause).__module__.partition(".")[0] in _NETWORK for cause in causes):
        here = f"no file or folder {name} here, and it" if done == "fetched" else str(name)
        return Unreachable(f"{setting}: {here} cannot be {done}: {endpoint()} cannot be reached ({told})")
    return InputError(f"{setting}: {name} cannot be {done}: {told}")


def _page(name: HubName, what: str) -> str:
    return f"datasets/{name.repo}" if what == "dataset" else name.repo


def _brief(error: Exception) -> str:
    """The first line of an error, without the user's token."""
    from huggingface_hub import get_token

    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    token = get_token()
    return (text.replace(token, "***") if token else text)[:300]
