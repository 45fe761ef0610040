"""Folders of LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Reading is strict, as for model folders: a key that changes the maths in a way that is not implemented here is refused by
name. A folder names its base model: by its path, or by its name and commit on the hub if it came from there. `base_of` finds
it on this machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from llamarl.config import model_folder
from llamarl.config.hub_names import HubName, name_of_pinned
from llamarl.config.lora import LoraConfig
from llamarl.errors import ConfigError, InputError, ModelError
from llamarl.families.adapters import adapted_layers, adapter_names, adapter_parameters, layer_name, layer_names
from llamarl.families.family import ParameterSpec
from llamarl.layout.boxes import Box
from llamarl.model.adapter_files import adapted_parameters, stored_adapters
from llamarl.model.checkpoint import (
    all_of,
    carry_files,
    load_model,
    new_folder,
    open_checkpoint,
    save_model,
    widest_dtype,
)
from llamarl.model.expert_files import tensors_of
from llamarl.model.folders import ADAPTER_CONFIG, newest_policy, no_folder
from llamarl.model.hf_config import read_json_object
from llamarl.model.lora import matrices
from llamarl.model.safetensors_file import TensorSpan, read_spans
from llamarl.model.tensor_io import write_tensors
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec

WEIGHTS = "adapter_model.safetensors"
FINGERPRINT = "base_fingerprint.txt"  # of the base that the adapters were trained on; PEFT does not read it
_SAMPLED = 4096  # bytes at each end of a tensor
_PREFIX = "base_model.model."  # before every name in PEFT's files
# Keys of adapter_config.json that do not change what is computed, or that are read below.
_HARMLESS = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "peft_version",
        "r",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
        "megatron_core",
        "qalora_group_size",
    ]
)
_ONLY: dict[str, tuple[object, ...]] = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian")}


class AdapterFolder(Struct, frozen=True):
    """A verified folder: it has A and B of every layer that it names, at their sizes, and nothing else."""

    folder: Path
    shape: ModelSpec
    lora: LoraConfig
    spans: Mapping[str, TensorSpan]  # by our names

    def fill(self, memory: Mapping[str, Tensor], box_of: Callable[[ParameterSpec], Box] = all_of) -> None:
        """Reads the shard of each named adapter into the given memory, whatever its dtype and device."""
        stored = stored_adapters(self.shape, self.lora)
        for name, tensor in memory.items():
            stored[name].read(self.spans[name], tensor.detach(), box_of(stored[name].spec))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds adapters rather than a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def open_adapter(folder: Path, shape: ModelSpec) -> AdapterFolder:
    """Checks a folder of adapters against the base's spec. Reads no weights."""
    config, path = _read_config(folder), folder / WEIGHTS
    if not path.is_file():
        raise ModelError(f"{folder}: no {WEIGHTS}")
    spans = {name.removeprefix(_PREFIX): span for name, span in read_spans(path).items()}
    lora = _checked_lora(folder, config, spans, shape)
    stored = stored_adapters(shape, lora)
    for one in stored.values():
        if one.name not in spans:
            raise ModelError(f"{path}: tensor {_PREFIX}{one.name} is missing")
        if (found := spans[one.name].shape) != one.shape:
            raise ModelError(
                f"{path}: tensor {_PREFIX}{one.name} has shape {list(found)}; this base needs {list(one.shape)}"
            )
    return AdapterFolder(folder, shape, lora, {name: spans[one.name] for name, one in stored.items()})


def _checked_lora(
    folder: Path, config: Mapping[str, Any], spans: Mapping[str, TensorSpan], shape: ModelSpec
) -> LoraConfig:
    """The settings of the adapters; the tensors tell which layers have them."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or not alpha > 0:
        raise ModelError(f"{folder / ADAPTER_CONFIG}: 'r' and 'lora_alpha' must be numbers above 0")
    named = {name.split(".")[-3] for name in spans if name.count(".") > 2}
    targets = tuple(name for name in layer_names(shape) if name in named)
    if not targets:
        raise ModelError(f"{folder / WEIGHTS}: has adapters of no layer of this base ({', '.join(layer_names(shape))})")
    scale = sqrt(rank) if config.get("use_rslora") else 1.0
    lora = LoraConfig(rank=rank, alpha=float(alpha) * scale, targets=targets)
    if surplus := spans.keys() - {one.name for one in stored_adapters(shape, lora).values()}:
        raise ModelError(f"{folder / WEIGHTS}: tensor {_PREFIX}{min(surplus)} belongs to no layer of this base")
    return replace(lora, targets=short_targets(shape, targets))


def short_targets(shape: ModelSpec, targets: tuple[str, ...]) -> str | tuple[str, ...]:
    """The word for a list of layers, where there is one."""
    for word in ("all", "attention", "mlp"):
        try:
            layers = adapted_layers(shape, LoraConfig(rank=1, targets=word))
        except ConfigError:  # no adapters can stand beside some of these layers
            continue
        if {layer_name(one) for one in layers} == set(targets):
            return word
    return targets


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(no_folder(folder))
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ModelError(f"{folder}: no {ADAPTER_CONFIG}; expected the folder of a LoRA adapter, as PEFT writes it")
    config = read_json_object(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: 'peft_type' is {config.get('peft_type')!r}; only LORA is supported")
    for key, value in config.items():
        allowed = value in _ONLY[key] if key in _ONLY else key in _HARMLESS or not value
        if not allowed:
            raise ModelError(f"{path}: '{key}': {json.dumps(value)[:60]} is not supported")
    return config


def base_of(folder: Path) -> Path:
    """Folder of the base model that an adapter folder names. ModelError if it is not on this machine."""
    config = _read_config(folder)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        raise ModelError(f"{folder / ADAPTER_CONFIG}: names no base model ('base_model_name_or_path')")
    if isinstance(revision, str) and revision:
        name = str(HubName(name, revision))
    found = [path for path in (model_folder(name), folder / name) if (path / "config.json").is_file()]
    if not found:
        raise ModelError(
            f"{folder}: adapters of the base model '{name}', which is no model folder here; put it there, or name another "
            f"place in {ADAPTER_CONFIG} (base_model_name_or_path)"
        )
    return found[0]


def base_or_same(folder: Path) -> Path:
    """The folder of the whole model: the base of an adapter folder, and any other folder itself."""
    return base_of(folder) if is_adapter(folder) else folder


def check_same(given: LoraConfig, found: AdapterFolder) -> None:
    """InputError unless settings describe the folder's adapters."""
    shape, lora = found.shape, found.lora
    same_layers = adapter_parameters(shape, given).keys() == adapter_parameters(shape, lora).keys()
    if (given.rank, given.alpha) != (lora.rank, lora.alpha) or not same_layers:
        targets = lora.targets if isinstance(lora.targets, str) else f"[{', '.join(lora.targets)}]"
        raise InputError(
            f"{found.folder}: its adapters have rank {lora.rank}, alpha {lora.alpha:g} and targets {targets}; set "
            f"model.lora.rank={lora.rank} model.lora.alpha={lora.alpha:g} model.lora.targets={targets}"
        )


def fingerprint(base: Path) -> str:
    """Hash of a model's tensors: their names, types and sizes, and some bytes of each. Not of how files hold them."""
    digest = hashlib.blake2b(digest_size=16)
    for name, span in sorted(open_checkpoint(base).spans.items(), key=lambda item: item[0]):
        digest.update(f"{name} {span.dtype} {span.shape}".encode())
        first, last = tensors_of(span)[0], tensors_of(span)[-1]
        for tensor, start in ((first, 0), (last, max(0, last.num_bytes - _SAMPLED))):
            with tensor.path.open("rb") as file:
                file.seek(tensor.offset + start)
                digest.update(file.read(min(_SAMPLED, tensor.num_bytes)))
    return digest.hexdigest()


def check_base_of(folder: Path, base: Path) -> None:
    """ConfigError if adapters were trained on another base than this one, as far as their folder tells."""
    path = folder / FINGERPRINT
    if path.is_file() and path.read_text().strip() != fingerprint(base):
        raise ConfigError(
            f"model.path: the adapters in {folder} were trained on another base than {base} holds now; put its files back"
        )


def save_adapter(tensors: Mapping[str, Tensor], lora: LoraConfig, shape: ModelSpec, folder: Path, base: Path) -> None:
    """Writes a folder that PEFT loads, in fp32; it must not exist yet. The base's tokenizer goes with it."""
    layers = sorted({layer_name(one) for one in adapted_layers(shape, lora) if not one.is_expert})
    of_experts, stored = adapted_parameters(shape, lora), stored_adapters(shape, lora)
    on_hub = name_of_pinned(base, "model")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": on_hub.repo if on_hub else str(base.absolute()),
        "revision": on_hub.commit if on_hub else None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": layers,
        **({"target_parameters": of_experts} if of_experts else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }
    with new_folder(folder) as temporary:
        (temporary / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (temporary / FINGERPRINT).write_text(fingerprint(base) + "\n")
        carry_files(base, temporary)
        files = {_PREFIX + stored[name].name: stored[name].written(one) for name, one in tensors.items()}
        write_tensors(temporary / WEIGHTS, files, torch.float32)


@torch.no_grad()
def load_merged(folder: Path, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> Transformer:
    """The base model of an adapter folder with the adapters merged into its weights; the model itself of another folder.
    Each merged weight is computed in fp32 from the base's numbers as its files hold them, and rounded to `dtype` once."""
    if not is_adapter(folder):
        return load_model(folder, dtype=dtype, device=device)
    base = base_of(folder)
    check_base_of(folder, base)
    model = load_model(base, dtype=dtype, device=device)
    adapter, checkpoint = open_adapter(folder, model.shape), open_checkpoint(base)
    specs = adapter_parameters(model.shape, adapter.lora)
    for weight in adapted_layers(model.shape, adapter.lora):
        target = model.get_parameter(weight.name)
        wide = torch.empty_like(target, dtype=torch.float32)
        checkpoint.fill({weight.name: wide})
        sizes = {name: specs[name].shape for name in adapter_names(weight)}
        pair = {name: torch.empty(size, dtype=torch.float32, device=device) for name, size in sizes.items()}
        adapter.fill(pair)
        for out, base_matrix, a, b in zip(*map(matrices, (target, wide, *pair.values())), strict=True):
            out.copy_(torch.addmm(base_matrix, b, a, alpha=adapter.lora.scale))
    return model


def merge(source: Path, folder: Path, *, dtype: str | None = None) -> None:
    """Writes a model folder of the adapters of a PEFT folder, or of a run's newest snapshot, and their base. Weights are
    written in the given dtype, or in the widest of the base's own."""
    found = source if is_adapter(source) else newest_policy(source) or source
    if not is_adapter(found):
        _read_config(found)  # says what is missing
        raise ModelError(f"{found}: a whole model already; nothing is to be merged")
    base = base_of(found)
    stored = widest_dtype(base) if dtype is None else getattr(torch, dtype)
    save_model(load_merged(found, dtype=torch.float32), folder, dtype=stored, carry_from=base)
