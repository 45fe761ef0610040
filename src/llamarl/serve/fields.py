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

from llamarl.serve.backend import Ask, Backend
from llamarl.serve.limits import ServeLimits
from llamarl.serve.refusals import RequestRefused, bad_request, too_long
from llamarl.types import Sampling

_MAX_TEMPERATURE = 100.0
_MAX_STOPS, _MAX_STOP_CHARS = 64, 1024


class StrictRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests; see the module's docstring."""

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class SampledRequest(StrictRequest):
    """Base of requests that say how to sample in the words that OpenAI's and vLLM's dialects share."""

    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None

    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    ignore_eos: Any = None
    min_tokens: Any = None
    include_stop_str_in_output: Any = None
    truncate_prompt_tokens: Any = None
    bad_words: Any = None
    structured_outputs: Any = None

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "ignore_eos": (False,),
        "min_tokens": (0,),
        "include_stop_str_in_output": (False,),
        "truncate_prompt_tokens": (),
        "bad_words": ([],),
        "structured_outputs": (),
    }


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


def ask_of(
    request: SampledRequest,
    backend: Backend,
    limits: ServeLimits,
    tokens: Sequence[int],
    *,
    stream: bool | None,
    max_tokens: int | None,
    max_field: str = "max_tokens",
    stop_field: str = "stop",
) -> Ask:
    """What a request asks of the backend. `max_tokens` and the fields' names are those of the dialect."""
    sampling = sampling_of(
        backend,
        limits,
        len(tokens),
        max_tokens=max_tokens,
        max_field=max_field,
        n=request.n,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
    )
    return Ask(
        tokens=tokens,
        sampling=sampling,
        stop=stops_of(request.stop, stop_field),
        stop_token_ids=check_stop_tokens(backend, request.stop_token_ids),
        seed=request.seed,
        stream=bool(stream),
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


def check_length(backend: Backend, text: object, field: str) -> None:
    """Refuse texts, in lists and objects of any depth, that are longer than any prompt of the model. They are not tokenized:
    that could keep the event loop busy for a minute."""
    length, most = _characters(text), backend.max_positions * backend.tokenizer.longest_token
    if length > most:
        raise too_long(
            field, f"has {length:,} characters; {backend.max_positions:,} tokens never have more than {most:,}"
        )


def _characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, (*value, *value.values())))
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0


def check_stop_tokens(backend: Backend, tokens: Sequence[int] | None) -> tuple[int, ...]:
    if tokens:
        check_tokens(backend, tokens, "stop_token_ids")
    return tuple(tokens or ())
