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
from msgspec import Struct
from msgspec.structs import replace

from llamarl.errors import InputError, ModelError
from llamarl.families.family import Config, ConfigKey, Family
from llamarl.families.parameters import FAMILIES
from llamarl.model.folders import no_config, no_folder
from llamarl.model.hf_keys import HARMLESS, ONLY, is_off
from llamarl.model.hf_rope import number, rope_config, rope_fields
from llamarl.model_spec import SHAPES, ModelSpec, shape_named

# Far above any real model; keeps a false config from building a billion layers before its tensors are checked.
_MAX_LAYERS = 2048
_MAX_SIZE = 1 << 26
_MAX_JSON_BYTES = 64 << 20
_CLASSIFIER = "ForSequenceClassification"
_FULL, _SLIDING = "full_attention", "sliding_attention"


class HFConfig(Struct, frozen=True, kw_only=True):
    """The keys of all families that fix the maths, as transformers 4 and 5 write them, with its defaults."""

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
    rope_local_base_freq: float | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    max_window_layers: int | None = None
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
    family = FAMILIES.get(str(raw.get("model_type")))
    expected = _classifier_name(family) if family else ""
    if raw.get("architectures") != [expected]:
        raise ModelError(
            f"{path}: 'architectures': {_brief(raw.get('architectures'))} is no reward model of a family we support; "
            f"expected ...ForSequenceClassification of {', '.join(FAMILIES)}"
        )
    labels = raw.get("id2label")
    if raw.get("num_labels", 1) != 1 or (isinstance(labels, dict) and len(labels) != 1):
        raise ModelError(f"{path}: a reward model has one label, this one has several")
    kept = {key: value for key, value in raw.items() if key not in ("architectures", "num_labels")}
    try:
        return replace(_shape_of(kept | {"tie_word_embeddings": False}), value_head=True)
    except InputError as error:
        raise ModelError(f"{path}: {error}") from None


def is_classifier(folder: Path) -> bool:
    """Whether `config.json` says that the folder's model has scores instead of a vocabulary."""
    architectures = read_json_object(config_path(folder)).get("architectures")
    return isinstance(architectures, list) and any(_CLASSIFIER in str(one) for one in architectures)


def _classifier_name(family: Family) -> str:
    """Class in transformers of the family's models with scores."""
    return family.architecture.replace("ForCausalLM", _CLASSIFIER)


def config_path(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelError(no_folder(folder))
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(no_config(folder))
    return path


def _shape_of(raw: Mapping[str, Any]) -> ModelSpec:
    family = _family_of(raw)
    _refuse_unsupported(raw, family)
    given = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
    try:
        config = msgspec.convert({**family.defaults, **given}, HFConfig)
    except msgspec.ValidationError as error:
        raise ModelError(str(error).replace("`", "'").replace("$.", "")) from None
    _check_family(config, family, given)
    _check_sizes(config)
    known: Config = {**family.defaults, **given}
    fields = {**family.fixed, **family.sized(known)}
    for key in family.keys:
        fields |= dict.fromkeys(key.fields, _value_of(key, raw))
    head_dim = _head_dim(config)
    return ModelSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=_num_kv_heads(config),
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        tied_head=config.tie_word_embeddings,
        windows=_windows(config, family, known),
        family=family.name,
        **fields,
        **rope_fields(known, family, head_dim),
    )


def _family_of(raw: Mapping[str, Any]) -> Family:
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"model_type {_brief(name)} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _value_of(key: ConfigKey, raw: Mapping[str, Any]) -> Any:
    """The spec's value of a family's own key."""
    value = next((raw[name] for name in (key.key, *key.also) if name in raw), key.default)
    if value is None and not key.nullable:
        value = key.default
    if key.type is int and (type(value) is not int or not 1 <= value <= _MAX_SIZE):
        raise ModelError(f"'{key.key}' must be a whole number from 1 to {_MAX_SIZE}, is {_brief(value)}")
    if key.type is bool and not isinstance(value, bool):
        raise ModelError(f"'{key.key}' must be true or false, is {_brief(value)}")
    return key.read(number(value, key.key) if key.type is float and value is not None else value)


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    own, only = set(_own_keys(family)), {**ONLY, **family.only}
    for key, value in raw.items():
        # null is how these files say "not in use"
        if value is None or key in own or key in family.harmless:
            continue
        if key in only:
            if value not in only[key] and not (is_off(key, value) and not only[key]):
                raise ModelError(f"'{key}': {_brief(value)} is not supported{_expected(only[key])}")
        elif not _is_known(key, family) and not is_off(key, value):
            raise ModelError(
                f"{_brief(key)} is not known here and could change the maths, since it is {_brief(value)}; "
                "remove it if it is a note"
            )


def _own_keys(family: Family) -> list[str]:
    return [name for key in family.keys for name in (key.key, *key.also)] + list(family.more_keys)


def _is_known(key: str, family: Family) -> bool:
    own = key in family.harmless or key in family.only or key in _own_keys(family)
    return own or key in HARMLESS or key in ONLY or key in HFConfig.__struct_fields__


def describe_ignored_keys(folder: Path) -> str:
    """One line for people, or none."""
    named = ", ".join(map(_brief, ignored_keys(folder)))
    return (
        f"{folder}/config.json: keys that are not known here, but are off, so nothing changes: {named}" if named else ""
    )


def ignored_keys(folder: Path) -> tuple[str, ...]:
    """Unknown keys of `folder/config.json` that `read_shape` accepts, since they are switched off."""
    raw = read_json_object(config_path(folder))
    family = _family_of(raw)
    return tuple(key for key, value in raw.items() if value is not None and not _is_known(key, family))


def _expected(values: tuple[Any, ...]) -> str:
    return f"; supported: {' or '.join(json.dumps(value) for value in values)}" if values else ""


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_family(config: HFConfig, family: Family, given: Mapping[str, Any]) -> None:
    if config.architectures not in (None, [family.architecture]):
        found = _brief(config.architectures)
        raise ModelError(f"'architectures': {found} is not supported; expected {family.architecture}")
    for key in family.needs:
        if key not in given:
            raise ModelError(f"'{key}' is missing")


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


def _windows(config: HFConfig, family: Family, known: Config) -> tuple[int, ...]:
    """The window of each layer; none where all are at least as long as the context and so mask nothing."""
    layers, window = config.num_hidden_layers, config.sliding_window
    types = config.layer_types
    if types is not None and (len(types) != layers or set(types) - {_FULL, _SLIDING}):
        raise ModelError(f"'layer_types' must say {_FULL} or {_SLIDING} for each of {layers} layers")
    if family.windowed is None:
        return _no_windows(config)
    if family.window_switch and not known.get(family.window_switch):
        window = None
    if window is not None and not 1 <= window <= _MAX_SIZE:
        raise ModelError(f"'sliding_window' is {window}; expected 1 to {_MAX_SIZE}")
    if types is not None and _SLIDING in types and window is None:
        raise ModelError(f"'layer_types' says {_SLIDING}, but no 'sliding_window' is in use")
    sliding = [types[n] == _SLIDING if types else family.windowed(n, known) for n in range(layers)]
    masks = window is not None and (window < config.max_position_embeddings or family.local_rope != "none")
    return tuple(window if one and window else 0 for one in sliding) if masks and any(sliding) else ()


def _no_windows(config: HFConfig) -> tuple[int, ...]:
    if config.layer_types is not None and _SLIDING in config.layer_types:
        raise ModelError("'layer_types' asks for more than full_attention, which this family does not have")
    if config.sliding_window is not None and config.sliding_window < config.max_position_embeddings:
        raise ModelError(f"'sliding_window': {config.sliding_window} is in use, which this family does not have")
    return ()


def _num_kv_heads(config: HFConfig) -> int:
    return config.num_attention_heads if config.num_key_value_heads is None else config.num_key_value_heads


def _head_dim(config: HFConfig) -> int:
    if config.head_dim is not None:
        return config.head_dim
    if config.hidden_size % config.num_attention_heads:
        sizes = f"'hidden_size' {config.hidden_size} does not divide into {config.num_attention_heads} heads"
        raise ModelError(f"{sizes}; give 'head_dim'")
    return config.hidden_size // config.num_attention_heads


def model_type_of(shape: ModelSpec) -> str:
    """The `model_type` whose maths the spec has: that of its family, or of the first family that can say the same."""
    for family in (FAMILIES[shape.family], *FAMILIES.values()):
        try:
            if _shape_of(_config(shape, family, "float32")) == replace(shape, family=family.name):
                return family.name
        except InputError:
            continue
    raise ModelError(
        f"no Hugging Face family has a model like this one ({', '.join(_switches(shape))}), so its config cannot be written"
    )


def _switches(shape: ModelSpec) -> list[str]:
    """Names of fields that have not their default."""
    plain = {name: default for name, default in _defaults().items() if name not in ("family", "tied_head")}
    return [name for name, default in plain.items() if getattr(shape, name) != default]


def _defaults() -> dict[str, Any]:
    return {one.name: one.default for one in msgspec.structs.fields(ModelSpec) if not one.required}


def config_of(shape: ModelSpec, *, dtype: str = "float32") -> dict[str, Any]:
    """Contents of `config.json`, in the form that both transformers 4 and 5 read."""
    spoken = replace(shape, value_head=False)
    family = FAMILIES[model_type_of(spoken)]
    labels = {"architectures": [_classifier_name(family)], "id2label": {"0": "value"}, "label2id": {"value": 0}}
    return _config(spoken, family, dtype) | (labels if shape.value_head else {})


def _config(shape: ModelSpec, family: Family, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        **_activation_config(shape, family),
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        **rope_config(shape, family),
        "tie_word_embeddings": shape.tied_head,
        "torch_dtype": dtype,
    }
    for key in family.keys:
        value = key.write(getattr(shape, key.fields[0]))
        if key.written or value != key.default:
            config[key.key] = value
    return config | dict(family.described(shape)) | _window_config(shape, family)


def _activation_config(shape: ModelSpec, family: Family) -> dict[str, Any]:
    if "hidden_activation" in family.only:
        return {"hidden_activation": family.only["hidden_activation"][0]}
    return {"hidden_act": "silu"}


def _window_config(shape: ModelSpec, family: Family) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if family.windowed is None:
        return found
    if family.window_switch:
        found[family.window_switch] = bool(shape.windows)
    if shape.windows or not family.window_switch:
        # transformers wants a number for a family whose layers are of several types, even if all are of one
        none = shape.max_positions if family.layer_types else None
        found["sliding_window"] = max(shape.windows, default=none)
    if family.layer_types and (shape.windows or not family.window_switch):
        found["layer_types"] = [_SLIDING if shape.window_of(n) else _FULL for n in range(shape.num_layers)]
    return found


def write_config(
    shape: ModelSpec, folder: Path, *, dtype: str = "float32", extra: Mapping[str, Any] | None = None
) -> None:
    """Writes `config.json`; `extra` adds keys such as `eos_token_id` that do not touch the maths."""
    config = config_of(shape, dtype=dtype) | dict(extra or {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _spec_in(folder: Path, *, value_head: bool) -> ModelSpec | None:
    """The spec of a folder; None if its model has another sort of head."""
    if is_classifier(folder) != value_head:
        return None
    return read_classifier_shape(folder) if value_head else read_shape(folder)


def carried_config(shape: ModelSpec, source: Path | None, *, dtype: str) -> dict[str, Any]:
    """The source's own config with the new dtype if it describes the same spec; else one made from the spec."""
    has_config = source is not None and (source / "config.json").is_file()
    if source is None or not has_config or _spec_in(source, value_head=shape.value_head) != shape:
        return config_of(shape, dtype=dtype)
    config = {key: value for key, value in read_json_object(source / "config.json").items() if key != "dtype"}
    return config | {"torch_dtype": dtype}
