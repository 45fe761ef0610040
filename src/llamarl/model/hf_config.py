"""Reads `config.json` of a Hugging Face folder into a `ModelSpec`, and writes it from one. No torch here.

Reading is strict: a key that changes the maths in a way the transformer does not implement is refused by name, and so is an
unknown key, unless it is switched off. A model that loads and computes something else would be worse than one that does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from llamarl.errors import InputError, ModelError
from llamarl.model.folders import no_config, no_folder
from llamarl.model.hf_keys import HARMLESS, ONLY, ROPE_KEYS, is_off
from llamarl.model_spec import SHAPES, ModelSpec, RopeScaling, shape_named

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Far above any real model; keeps a false config from building a billion layers before its tensors are checked.
_MAX_LAYERS = 2048
_MAX_SIZE = 1 << 26
_MAX_JSON_BYTES = 64 << 20


class HFConfig(Struct, frozen=True, kw_only=True):
    """The keys that fix the maths, as transformers 4 and 5 write them, with their defaults in transformers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | UnsetType | None = UNSET
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    architectures: list[str] | None = None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or a one-line ModelError."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {_MAX_JSON_BYTES >> 20} MiB; this is not a model's JSON file")
        value: object = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({' '.join(str(error).split())})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_shape(folder: Path) -> ModelSpec:
    """The spec that `folder/config.json` describes, or a `ModelError` that names what is not supported."""
    return read_shape_file(config_path(folder))


def read_shape_file(path: Path) -> ModelSpec:
    """The spec that a `config.json` describes, whatever the file is called."""
    raw = read_json_object(path)
    try:
        return _shape_of(raw)
    except InputError as error:
        raise ModelError(f"{path}: {error}") from None


def find_shape(model: str) -> ModelSpec:
    """The spec of a well-known model by name, of a model folder, or of a `.json` file; a name goes before a folder."""
    path = Path(model)
    if model.lower() in SHAPES:
        return shape_named(model)
    if path.suffix == ".json":
        return read_shape_file(path)
    return read_shape(path) if path.is_dir() else shape_named(model)


def read_classifier_shape(folder: Path) -> ModelSpec:
    """The spec of a sequence-classification folder: a supported model with one score instead of a head."""
    path = config_path(folder)
    raw = read_json_object(path)
    expected = ARCHITECTURES.get(str(raw.get("model_type")), "").replace("ForCausalLM", "ForSequenceClassification")
    if raw.get("architectures") != [expected]:
        raise ModelError(
            f"{path}: 'architectures': {_brief(raw.get('architectures'))} is no reward model of a family we support; "
            f"expected ...ForSequenceClassification of {', '.join(ARCHITECTURES)}"
        )
    labels = raw.get("id2label")
    if raw.get("num_labels", 1) != 1 or (isinstance(labels, dict) and len(labels) != 1):
        raise ModelError(f"{path}: a reward model has one label, this one has several")
    kept = {key: value for key, value in raw.items() if key not in ("architectures", "num_labels")}
    try:
        return _shape_of(kept | {"tie_word_embeddings": True})
    except InputError as error:
        raise ModelError(f"{path}: {error}") from None


def config_path(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelError(no_folder(folder))
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(no_config(folder))
    return path


def _shape_of(raw: Mapping[str, Any]) -> ModelSpec:
    _refuse_unsupported(raw)
    try:
        config = msgspec.convert(raw, HFConfig)
    except msgspec.ValidationError as error:
        raise ModelError(str(error).replace("`", "'").replace("$.", "")) from None
    _check_family(config)
    _check_sizes(config)
    _check_sliding_window(config)
    theta, scaling = _rope_of(config)
    return ModelSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=_num_kv_heads(config),
        head_dim=_head_dim(config),
        max_positions=config.max_position_embeddings,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.rms_norm_eps,
        tied_head=config.tie_word_embeddings,
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    family = raw.get("model_type")
    if family not in list(ARCHITECTURES):
        raise ModelError(f"model_type {_brief(family)} is not supported; supported: {', '.join(ARCHITECTURES)}")
    for key, value in raw.items():
        # null is how these files say "not in use"
        if value is None:
            continue
        if key in ONLY:
            if value not in ONLY[key] and not (is_off(key, value) and not ONLY[key]):
                raise ModelError(f"'{key}': {_brief(value)} is not supported{_expected(ONLY[key])}")
        elif not _is_known(key) and not is_off(key, value):
            raise ModelError(
                f"{_brief(key)} is not known here and could change the maths, since it is {_brief(value)}; "
                "remove it if it is a note"
            )


def _is_known(key: str) -> bool:
    return key in HARMLESS or key in ONLY or key in HFConfig.__struct_fields__


def describe_ignored_keys(folder: Path) -> str:
    """One line for people, or none."""
    named = ", ".join(map(_brief, ignored_keys(folder)))
    return (
        f"{folder}/config.json: keys that are not known here, but are off, so nothing changes: {named}" if named else ""
    )


def ignored_keys(folder: Path) -> tuple[str, ...]:
    """Unknown keys of `folder/config.json` that `read_shape` accepts, since they are switched off."""
    raw = read_json_object(config_path(folder))
    return tuple(key for key, value in raw.items() if value is not None and not _is_known(key))


def _expected(values: tuple[Any, ...]) -> str:
    return f"; supported: {' or '.join(json.dumps(value) for value in values)}" if values else ""


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_family(config: HFConfig) -> None:
    expected = ARCHITECTURES[config.model_type]
    if config.architectures not in (None, [expected]):
        raise ModelError(f"'architectures': {_brief(config.architectures)} is not supported; expected {expected}")
    if config.model_type != "llama" and config.num_key_value_heads is None:
        raise ModelError("'num_key_value_heads' is missing")


def _check_sizes(config: HFConfig) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    for name in sizes:
        value = getattr(config, name)
        if not 1 <= value <= _MAX_SIZE:
            raise ModelError(f"'{name}' is {value}; expected 1 to {_MAX_SIZE}")
    if not 1 <= config.num_hidden_layers <= _MAX_LAYERS:
        raise ModelError(f"'num_hidden_layers' is {config.num_hidden_layers}; expected 1 to {_MAX_LAYERS}")
    if not 0 < config.rms_norm_eps < 1:
        raise ModelError(f"'rms_norm_eps' is {config.rms_norm_eps}; expected a small positive number")
    for name in ("head_dim", "num_key_value_heads"):
        value = getattr(config, name)
        if value is not None and not 1 <= value <= _MAX_SIZE:
            raise ModelError(f"'{name}' is {value}; expected 1 to {_MAX_SIZE}")


def _check_sliding_window(config: HFConfig) -> None:
    """Refuses a sliding window, unless it is at least as long as the context and so masks nothing."""
    if config.layer_types is not None and set(config.layer_types) - {"full_attention"}:
        raise ModelError("'layer_types' asks for more than full_attention, which is not supported")
    window = config.sliding_window
    if config.model_type in ("qwen2", "qwen3") and not config.use_sliding_window:
        return
    if window is UNSET and config.model_type == "mistral":
        raise ModelError("'sliding_window' is missing, which means 4096 for mistral; write null if it is not in use")
    if isinstance(window, int) and window < config.max_position_embeddings:
        raise ModelError(f"'sliding_window': {window} is in use, which is not supported")


def _num_kv_heads(config: HFConfig) -> int:
    return config.num_attention_heads if config.num_key_value_heads is None else config.num_key_value_heads


def _head_dim(config: HFConfig) -> int:
    if config.head_dim is not None:
        return config.head_dim
    if config.model_type == "qwen3":
        return 128  # Qwen3's own default, whatever the hidden size
    if config.hidden_size % config.num_attention_heads:
        sizes = f"'hidden_size' {config.hidden_size} does not divide into {config.num_attention_heads} heads"
        raise ModelError(f"{sizes}; give 'head_dim'")
    return config.hidden_size // config.num_attention_heads


def _rope_of(config: HFConfig) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling: transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes both into `rope_parameters`."""
    if config.rope_parameters is not None and config.rope_scaling is not None:
        raise ModelError("'rope_parameters' and 'rope_scaling' are both given; keep one")
    rope = config.rope_parameters if config.rope_parameters is not None else config.rope_scaling or {}
    theta = rope.get("rope_theta", config.rope_theta)
    if config.rope_theta is not None and theta != config.rope_theta:
        raise ModelError(f"'rope_theta' is {config.rope_theta} but 'rope_parameters' says {_brief(theta)}")
    theta = _number(10_000.0 if theta is None else theta, "rope_theta")
    return theta, _rope_scaling(rope)


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelError(f"rope_type {_brief(kind)} is not supported; supported: default, llama3")
    unknown = {key for key, value in rope.items() if not is_off(key, value)} - ROPE_KEYS
    if unknown:
        raise ModelError(f"rope: {_brief(min(unknown))} is not known here and could change the maths")
    if rope.get("partial_rotary_factor", 1) not in (1, None):
        raise ModelError("'partial_rotary_factor' is not supported; supported: 1")
    if kind == "default":
        return None
    low, high = (_number(rope.get(f"{end}_freq_factor"), f"rope {end}_freq_factor") for end in ("low", "high"))
    if low >= high:
        raise ModelError(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
    original = rope.get("original_max_position_embeddings")
    return RopeScaling(
        factor=_number(rope.get("factor"), "rope factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=int(_number(original, "rope original_max_position_embeddings")),
    )


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ModelError(f"'{name}' must be a positive number, is {_brief(value)}")
    return float(value)


def model_type_of(shape: ModelSpec) -> str:
    """The `model_type` whose maths the spec has. Mistral without a window is Llama under another name."""
    if shape.qk_norm and shape.qkv_bias:
        raise ModelError("no Hugging Face family has both QKV biases and QK norms")
    return "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"


def config_of(shape: ModelSpec, *, dtype: str = "float32") -> dict[str, Any]:
    """Contents of `config.json`, in the form that both transformers 4 and 5 read."""
    family = model_type_of(shape)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": _rope_scaling_config(shape.rope_scaling),
        "tie_word_embeddings": shape.tied_head,
        "torch_dtype": dtype,
    }
    if family != "qwen2":
        config["attention_bias"] = False
    if family != "llama":
        config["use_sliding_window"] = False
    return config


def _rope_scaling_config(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


def write_config(
    shape: ModelSpec, folder: Path, *, dtype: str = "float32", extra: Mapping[str, Any] | None = None
) -> None:
    """Writes `config.json`; `extra` adds keys such as `eos_token_id` that do not touch the maths."""
    config = config_of(shape, dtype=dtype) | dict(extra or {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def carried_config(shape: ModelSpec, source: Path | None, *, dtype: str) -> dict[str, Any]:
    """The source's own config with the new dtype if it describes the same spec; else one made from the spec."""
    if source is None or not (source / "config.json").is_file() or read_shape(source) != shape:
        return config_of(shape, dtype=dtype)
    config = {key: value for key, value in read_json_object(source / "config.json").items() if key != "dtype"}
    return config | {"torch_dtype": dtype}
