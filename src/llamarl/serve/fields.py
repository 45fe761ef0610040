"""Fields of requests: decoded strictly, so that nothing a client asks for is left out in silence.

A request is a struct. Its fields are supported, or named in its `IGNORED` (they change no answer), or in its `NEUTRAL`: these
are refused unless they have one of the values named there, which change nothing. Any other field is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Struct

from llamarl.serve.backend import Backend
from llamarl.serve.limits import ServeLimits
from llamarl.serve.refusals import RequestRefused, bad_request, too_long
from llamarl.types import Sampling

_MAX_TEMPERATURE = 100.0
_MAX_STOPS, _MAX_STOP_CHARS = 64, 1024


class StrictRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests; see the module's docstring."""

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


Some = TypeVar("Some", bound=Struct)


def decode_request(body: bytes, kind: type[Some]) -> Some:
    """The request in a body. Raises RequestRefused with one line that names the field."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestRefused(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RequestRefused(400, "the body is not JSON: nested too deeply") from None
    if isinstance(request, StrictRequest):
        check_neutral(request)
    return request


def _invalid(message: str) -> RequestRefused:
    reason, _, place = message.partition(" - at `")
    field = place.removesuffix("`").removeprefix("$").removeprefix(".")
    reason = reason.replace("`", "'")
    if unknown := re.fullmatch(r"Object contains unknown field '(.*)'", reason):
        named = f"{field}.{unknown[1]}" if field else unknown[1]
        return bad_request(named, "is not a field that this server knows; docs/endpoint.md lists them")
    return bad_request(field, reason[:1].lower() + reason[1:])


def check_neutral(request: StrictRequest) -> None:
    for name, allowed in request.NEUTRAL.items():
        value = getattr(request, name)
        if value is not None and not any(_equal(value, one) for one in allowed):
            shown = " or ".join(msgspec.json.encode(one).decode() for one in allowed)
            raise bad_request(name, f"is not supported; leave it out{f' or at {shown}' if shown else ''}")


def _equal(value: Any, other: Any) -> bool:
    """Equality in which 1 is 1.0, but not true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def sampling_of(
    backend: Backend,
    limits: ServeLimits,
    num_prompt: int,
    *,
    max_tokens: int | None,
    max_field: str = "max_tokens",
    n: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
) -> Sampling:
    """How a request is sampled. Without `max_tokens`, an answer may take the rest of the context."""
    room = backend.max_positions - num_prompt
    if room < 1:
        raise too_long("", f"the prompt has {num_prompt} tokens; the context has {backend.max_positions}")
    wanted = room if max_tokens is None else max_tokens
    _check(max_field, wanted, 1, None)
    if wanted > room:
        raise bad_request(
            max_field,
            f"prompt ({num_prompt} tokens) and answer ({wanted}) exceed the context of {backend.max_positions} tokens",
        )
    _check("n", n, 1, limits.max_answers)
    _check("temperature", temperature, 0, _MAX_TEMPERATURE)
    _check("top_p", top_p, 0, 1)
    _check("min_p", min_p, 0, 1)
    _check("top_k", top_k, -1, None)
    return Sampling(
        samples=n or 1,
        max_new_tokens=wanted,
        temperature=1.0 if temperature is None else float(temperature),
        top_k=min(max(0, top_k or 0), backend.vocab_size),
        top_p=1.0 if top_p is None else float(top_p),
        min_p=min_p or 0.0,
    )


def _check(field: str, value: float | None, least: float, most: float | None) -> None:
    if value is not None and (value < least or (most is not None and value > most)):
        allowed = f"at least {least}" if most is None else f"from {least} to {most:g}"
        raise bad_request(field, f"must be {allowed}, is {value}")


def stops_of(stop: str | Sequence[str] | None, field: str = "stop") -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MAX_STOPS or any(not 0 < len(one) <= _MAX_STOP_CHARS for one in stops):
        raise bad_request(field, f"at most {_MAX_STOPS} texts of 1 to {_MAX_STOP_CHARS} characters")
    return stops


def check_tokens(backend: Backend, tokens: Sequence[int], field: str) -> None:
    """Refuse an empty prompt and tokens that the model does not have."""
    if not tokens:
        raise bad_request(field, "is empty")
    if min(tokens) < 0 or max(tokens) >= backend.vocab_size:
        raise bad_request(field, f"token ids are from 0 to {backend.vocab_size - 1}")


def check_stop_tokens(backend: Backend, tokens: Sequence[int] | None) -> tuple[int, ...]:
    if tokens:
        check_tokens(backend, tokens, "stop_token_ids")
    return tuple(tokens or ())
