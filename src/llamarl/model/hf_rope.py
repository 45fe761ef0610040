"""RoPE in `config.json`: transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes both into `rope_parameters`, or an
object for each type of layers, where a family rotates them apart. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from llamarl.errors import ModelError
from llamarl.families.family import Config, Family
from llamarl.model.hf_keys import is_off
from llamarl.model_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ModelSpec,
    RopeScaling,
    YarnScaling,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_COMMON = frozenset(["rope_theta", "rope_type", "type", "partial_rotary_factor"])
_ORIGINAL = "original_max_position_embeddings"
_KEYS = {
    "default": _COMMON | {"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "llama3": _COMMON | {"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "linear": _COMMON | {"factor"},
    "dynamic": _COMMON | {"factor"},
    "yarn": _COMMON
    | {"factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": _COMMON | {"factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"},
}


def rope_fields(config: Config, family: Family, head_dim: int) -> dict[str, Any]:
    """Fields of the spec that tell how its heads are rotated, and its positions."""
    positions = int(config["max_position_embeddings"])
    rope, local = _parts(config, family)
    theta = _theta(rope, config, family)
    scaling, positions = _scaling(rope, config, family, positions)
    rotary = _rotary_dim(rope, config, family, head_dim)
    if isinstance(scaling, LongScaling):
        _check_factors(scaling, rotary or head_dim)
    fields = {"rope_theta": theta, "rope_scaling": scaling, "rotary_dim": rotary, "max_positions": positions}
    if family.local_rope != "none":
        fields["local_rope_theta"] = _local_theta(local, config, family, theta)
    return fields


def _parts(config: Config, family: Family) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What is said of all layers, or of those without a window, and of those with one."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new is not None and old is not None:
        raise ModelError("'rope_parameters' and 'rope_scaling' are both given; keep one")
    given = new if new is not None else old or {}
    if family.local_rope == "none" or not (given.keys() & {_FULL, _SLIDING}):
        return given, {}
    parts = [given.get(which) or {} for which in (_FULL, _SLIDING)]
    if not all(isinstance(part, dict) for part in parts) or given.keys() - {_FULL, _SLIDING}:
        raise ModelError("'rope_parameters' must hold full_attention and sliding_attention, each an object")
    return parts[0], parts[1]


def _theta(rope: Mapping[str, Any], config: Config, family: Family) -> float:
    told = config.get("rope_theta")
    theta = rope.get("rope_theta", told)
    if told is not None and theta != told:
        raise ModelError(f"'rope_theta' is {told} but 'rope_parameters' says {_brief(theta)}")
    return number(family.rope_theta if theta is None else theta, "rope_theta")


def _local_theta(local: Mapping[str, Any], config: Config, family: Family, theta: float) -> float:
    if local.get("rope_type", "default") != "default":
        raise ModelError(f"rope_type {_brief(local['rope_type'])} of layers with a window is not supported")
    _refuse_unknown(local, _COMMON)
    if family.local_rope == "same theta":
        if local.get("rope_theta", theta) != theta:
            raise ModelError("'rope_theta' of layers with a window must be that of the others")
        return theta
    return number(local.get("rope_theta", config.get("rope_local_base_freq")), "rope_local_base_freq")


def _rotary_dim(rope: Mapping[str, Any], config: Config, family: Family, head_dim: int) -> int:
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = number(1.0 if share is None else share, "partial_rotary_factor")
    if share == 1.0:
        return 0
    if not family.partial_rotary or share > 1.0:
        raise ModelError(f"'partial_rotary_factor': {share:g} is not supported; supported: 1")
    return int(head_dim * share)


def _scaling(rope: Mapping[str, Any], config: Config, family: Family, most: int) -> tuple[RopeScaling | None, int]:
    """The scaling, and the number of positions that it leaves exact."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = family.rope_names.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in family.ropes:
        raise ModelError(f"rope_type {_brief(kind)} is not supported; supported: {', '.join(family.ropes)}")
    _refuse_unknown(rope, _KEYS[kind])
    match kind:
        case "default":
            return None, most
        case "linear":
            return LinearScaling(factor=number(rope.get("factor"), "rope factor")), most
        case "dynamic":
            return DynamicScaling(factor=number(rope.get("factor"), "rope factor")), most
        case "llama3":
            return _llama3(rope, most), most
        case "yarn":
            return _yarn(rope, config, most), most
        case _:
            return _longrope(rope, config, most)


def _llama3(rope: Mapping[str, Any], most: int) -> Llama3Scaling:
    low, high = (number(rope.get(f"{end}_freq_factor"), f"rope {end}_freq_factor") for end in ("low", "high"))
    if low >= high:
        raise ModelError(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
    return Llama3Scaling(
        factor=number(rope.get("factor"), "rope factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=int(number(rope.get(_ORIGINAL), f"rope {_ORIGINAL}")),
    )


def _yarn(rope: Mapping[str, Any], config: Config, most: int) -> YarnScaling:
    original = _original(rope, config, most)
    factor = number(most / original if rope.get("factor") is None else rope["factor"], "rope factor")
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"'rope truncate' must be true or false, is {_brief(truncate)}")
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        attention_factor=_yarn_attention(rope, factor),
        beta_fast=number(rope.get("beta_fast") or 32, "rope beta_fast"),
        beta_slow=number(rope.get("beta_slow") or 1, "rope beta_slow"),
        truncate=truncate,
    )


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    """The factor of cos and sin: as given, or as transformers infers it."""
    if rope.get("attention_factor") is not None:
        return number(rope["attention_factor"], "rope attention_factor")
    ends = [rope.get(name) for name in ("mscale", "mscale_all_dim")]

    def mscale(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    if all(ends):
        top, bottom = (mscale(number(end, "rope mscale")) for end in ends)
        return top / bottom
    return mscale(1.0)


def _longrope(rope: Mapping[str, Any], config: Config, most: int) -> tuple[LongScaling, int]:
    original = _original(rope, config, most)
    factor = number(most / original if rope.get("factor") is None else rope["factor"], "rope factor")
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_factors(rope.get(f"{which}_factor"), which) for which in ("short", "long"))
    scaling = LongScaling(
        short_factors=short,
        long_factors=long,
        attention_factor=number(attention, "rope attention_factor"),
        long_max_positions=most,
    )
    return scaling, min(original, most)


def _original(rope: Mapping[str, Any], config: Config, most: int) -> int:
    """The positions of pre-training; transformers takes those outside of the rope's own object first."""
    told = config.get(_ORIGINAL, rope.get(_ORIGINAL))
    found = int(number(most if told is None else told, f"rope {_ORIGINAL}"))
    if found < 2:
        raise ModelError(f"'{_ORIGINAL}' is {found}; expected more than 1")
    return found


def _factors(value: Any, which: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise ModelError(f"'rope {which}_factor' must be a list of numbers")
    return tuple(number(one, f"rope {which}_factor") for one in value)


def _check_factors(scaling: LongScaling, rotated: int) -> None:
    for which, factors in (("short", scaling.short_factors), ("long", scaling.long_factors)):
        if len(factors) != rotated // 2:
            raise ModelError(f"'rope {which}_factor' has {len(factors)} numbers; this model needs {rotated // 2}")


def _refuse_unknown(rope: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = {key for key, value in rope.items() if not is_off(key, value)} - known
    if unknown:
        raise ModelError(f"rope: {_brief(min(unknown))} is not known here and could change the maths")


def number(value: Any, name: str) -> float:
    """A positive number of a config, or a ModelError that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ModelError(f"'{name}' must be a positive number, is {_brief(value)}")
    return float(value)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def rope_config(shape: ModelSpec, family: Family) -> dict[str, Any]:
    """Keys of `config.json`, in the form that both transformers 4 and 5 read."""
    found: dict[str, Any] = {"rope_theta": shape.rope_theta, "rope_scaling": _scaling_config(shape)}
    if isinstance(shape.rope_scaling, LongScaling):
        found |= {"max_position_embeddings": shape.rope_scaling.long_max_positions, _ORIGINAL: shape.max_positions}
    if family.local_rope == "theta":
        found["rope_local_base_freq"] = shape.local_rope_theta
    if shape.rotary_dim:
        found["partial_rotary_factor"] = shape.rotary_dim / shape.head_dim
    return found


def _scaling_config(shape: ModelSpec) -> dict[str, Any] | None:
    scaling = shape.rope_scaling
    match scaling:
        case None:
            return None
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                _ORIGINAL: scaling.original_max_positions,
            }
        case LinearScaling() | DynamicScaling():
            kind = "linear" if isinstance(scaling, LinearScaling) else "dynamic"
            return {"rope_type": kind, "factor": scaling.factor}
        case YarnScaling():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                _ORIGINAL: scaling.original_max_positions,
                "attention_factor": scaling.attention_factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                **({} if scaling.truncate else {"truncate": False}),
            }
        case LongScaling():
            return {
                "rope_type": "longrope",
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                "attention_factor": scaling.attention_factor,
            }
