"""Reads and writes model folders: `config.json` and one or many safetensors files.

Reading: all headers are verified before memory is taken. Then each parameter is allocated once, in its final dtype, on its
device and at the size of its shard, and the bytes are read into it: the model is never held twice.
Writing: into a folder beside the target, synced, then renamed, so that a folder with the final name is always whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llamarl.errors import ModelError
from llamarl.families.family import Family, ParameterSpec
from llamarl.families.parameters import family_of, parameters, stored_tensors
from llamarl.io.record_log import sync_path
from llamarl.layout.boxes import Box, shape_of, whole
from llamarl.model.expert_files import (
    Sizes,
    Span,
    as_written,
    found_layout,
    has_layouts,
    read_span,
    span_of,
    tensors_of,
)
from llamarl.model.folders import CARRIED_FILES, no_weights
from llamarl.model.hf_config import carried_config, read_json_object, read_shape
from llamarl.model.linear import joined
from llamarl.model.safetensors_file import TensorSpan, read_spans
from llamarl.model.tensor_io import DTYPES, same_bytes, write_tensors
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec

BoxOf = Callable[[ParameterSpec], Box]  # the part of a parameter that a rank holds

_MAX_THREADS = 8


def all_of(parameter: ParameterSpec) -> Box:
    """The box of a rank that holds everything."""
    return whole(parameter.shape)


class Checkpoint(Struct, frozen=True):
    """A verified folder: it has every parameter of the spec once, at its size, and nothing else."""

    folder: Path
    shape: ModelSpec
    spans: Mapping[str, Span]
    zeros: frozenset[str] = frozenset()
    """Parameters that the folder does not have, and that begin at zero: the head of a new critic."""

    def holds_exactly(self, name: str, dtype: str) -> bool:
        """Whether reading the parameter in this type (a name such as BF16) rounds nothing."""
        return name in self.zeros or self.spans[name].dtypes == {dtype}

    def fill(self, memory: Mapping[str, Tensor], box_of: BoxOf = all_of) -> None:
        """Reads the shard of each named parameter into the given memory, whatever its dtype and device."""
        specs = parameters(self.shape)

        def read(name: str) -> None:
            if name in self.zeros:
                memory[name].detach().zero_()
            else:
                read_span(self.spans[name], memory[name].detach(), box_of(specs[name]))

        # Most of the time is spent in the kernel, which copies and faults pages for one thread at a time. Largest first,
        # so that the threads end together.
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            for _ in pool.map(read, sorted(memory, key=lambda name: -memory[name].nbytes)):
                pass


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    box_of: BoxOf = all_of,
) -> Transformer:
    """The folder's model in the given dtype, on the device; with `box_of`, only this rank's shard of each parameter."""
    checkpoint = open_checkpoint(folder)
    model = empty_model(checkpoint.shape, dtype=dtype, device=device, box_of=box_of)
    checkpoint.fill(dict(model.named_parameters()), box_of)
    return model


def random_model(
    shape: ModelSpec,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Transformer:
    """A model with untrained weights: matrices from N(0, 0.02), neutral norms, biases 0. The seed fixes them on each
    device."""
    model = empty_model(shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            match parameters(shape)[name].kind:
                case "bias":
                    parameter.zero_()
                case "norm" | "head_norm" | "wide_norm":
                    parameter.fill_(0.0 if shape.norm_plus_one else 1.0)
                case _:
                    parameter.normal_(0.0, 0.02, generator=generator)
    return model


def empty_model(
    shape: ModelSpec, *, dtype: torch.dtype, device: str | torch.device, box_of: BoxOf = all_of
) -> Transformer:
    """The model with uninitialized memory for its shard of each parameter."""
    model = meta_model(shape)
    give_memory(model, parameters(shape), dtype=dtype, device=device, box_of=box_of)
    return model


def give_memory(
    model: Transformer, names: Iterable[str], *, dtype: torch.dtype, device: str | torch.device, box_of: BoxOf = all_of
) -> dict[str, Tensor]:
    """Uninitialized memory for a shard of each of these parameters, which become the model's."""
    specs, found = parameters(model.shape), dict[str, Tensor]()
    for name in names:
        found[name] = nn.Parameter(torch.empty(shape_of(box_of(specs[name])), dtype=dtype, device=device))
        setattr(model.get_submodule(specs[name].module), name.rpartition(".")[2], found[name])
    if model.shape.tied_head:
        model.lm_head.weight = model.model.embed_tokens.weight
    return found


def meta_model(shape: ModelSpec) -> Transformer:
    """The model on the meta device, without memory."""
    with torch.device("meta"), _SkipInit():
        return Transformer(shape)


class _SkipInit(TorchFunctionMode):
    """Skips initialization, which does nothing on the meta device and imports a second's worth of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Checks config, index and headers against one another. Reads no weights, except both copies of a tied head."""
    shape = read_shape(folder)
    return Checkpoint(folder, shape, checked_spans(folder, shape))


def check_headers(folder: Path) -> ModelSpec:
    """Refuses a folder whose weights are missing, cut short or of another shape, before anything starts. Reads no weights."""
    shape = read_shape(folder)
    checked_spans(folder, shape, compare_tied=False)
    return shape


def widest_dtype(folder: Path) -> torch.dtype:
    """Type of a model folder's weights; the widest, where they differ."""
    spans = open_checkpoint(folder).spans.values()
    found = {DTYPES[tensor.dtype] for span in spans for tensor in tensors_of(span)}
    return max(found, key=lambda dtype: dtype.itemsize)


def checked_spans(folder: Path, shape: ModelSpec, *, compare_tied: bool = True) -> dict[str, Span]:
    """Spans of the model's parameters. ModelError if one is missing, mis-shaped or surplus."""
    spans, family, stored = _all_spans(folder), family_of(shape), stored_tensors(shape)
    ways = {one.name: found_layout(one, spans) for parts in stored.values() for one in parts if has_layouts(one)}
    expected = _sizes(stored, ways)
    for name, size in expected.items():
        if name not in spans:
            raise ModelError(f"{folder}: tensor {name} is missing")
        if spans[name].shape != size:
            found = list(spans[name].shape)
            raise ModelError(f"{folder}: tensor {name} has shape {found}; config.json says {list(size)}")
    for name in spans.keys() - expected.keys():
        if name == family.head and shape.tied_head:
            if compare_tied:
                _check_tied_copy(folder, spans, family)
        elif not re.fullmatch(family.derived, name):
            raise ModelError(f"{folder}: tensor {name} is not part of the model that config.json describes")
    own: dict[str, Span] = {}
    for name, parts in stored.items():
        if parts[0].name in ways:
            own[parts[0].name] = span_of(parts[0], spans, ways[parts[0].name])
        else:
            own |= {one.name: span for one, span in _spans_of(spans[name], parts)}
    return own


def _sizes(stored: Mapping[str, list[ParameterSpec]], ways: Mapping[str, Sizes]) -> Sizes:
    """The tensors of a model's files, with their shapes."""
    found: Sizes = {}
    for name, parts in stored.items():
        joined_size = (sum(one.shape[0] for one in parts), *parts[0].shape[1:])
        found |= ways.get(parts[0].name, {name: joined_size})
    return found


def _spans_of(whole: TensorSpan, parts: list[ParameterSpec]) -> Iterator[tuple[ParameterSpec, TensorSpan]]:
    """The place of each parameter in a tensor that holds the rows of all, one behind another."""
    offset, row_bytes = whole.offset, whole.num_bytes // max(1, whole.shape[0])
    for one in parts:
        num_bytes = one.shape[0] * row_bytes
        yield one, TensorSpan(whole.path, whole.dtype, one.shape, offset, num_bytes)
        offset += num_bytes


def _check_tied_copy(folder: Path, spans: Mapping[str, TensorSpan], family: Family) -> None:
    """A checkpoint of a tied model may contain the head too, if it equals the embedding."""
    head, embedding = spans[family.head], spans[family.embedding]
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if not same or not same_bytes(head, embedding):
        raise ModelError(
            f"{folder}: {family.head} differs from {family.embedding}, but config.json says tie_word_embeddings"
        )


def _all_spans(folder: Path) -> dict[str, TensorSpan]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() and index.is_file():
        raise ModelError(f"{folder}: has both model.safetensors and an index of several; remove one")
    if single.is_file():
        return read_spans(single)
    if index.is_file():
        return _indexed_spans(folder, _weight_map(index))
    raise ModelError(no_weights(folder))


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: 'weight_map' must name a file for every tensor")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{index}: {json.dumps(file)[:60]} is not the name of a .safetensors file in this folder")
    return weight_map


def _indexed_spans(folder: Path, weight_map: Mapping[str, str]) -> dict[str, TensorSpan]:
    spans: dict[str, TensorSpan] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise ModelError(f"{folder}: the index names {json.dumps(file)}, which is not there")
        for name, span in read_spans(folder / file).items():
            if weight_map.get(name) != file:
                raise ModelError(f"{folder}: tensor {name} is in {file}, but the index puts it elsewhere or nowhere")
            spans[name] = span
    missing = weight_map.keys() - spans.keys()
    if missing:
        name = min(missing)
        raise ModelError(f"{folder}: the index puts {json.dumps(name)} in {weight_map[name]}, which does not have it")
    return spans


def save_model(
    model: Transformer,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    carry_from: Path | None = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes a folder that transformers loads, in the model's dtype or the given one; it must not exist yet.

    With `carry_from`, the tokenizer, chat template and generation config of that folder are copied.
    """
    tensors = _as_stored(model)
    chosen = dtype or next(iter(tensors.values())).dtype
    if chosen not in DTYPES.values():
        raise ModelError(f"{folder}: cannot save a model in {chosen}; expected one of {', '.join(DTYPES)}")
    with new_folder(folder) as temporary:
        config = carried_config(model.shape, carry_from, dtype=str(chosen).removeprefix("torch."))
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if carry_from:
            carry_files(carry_from, temporary)
        _write_weights(temporary, tensors, chosen, max_shard_bytes)


def _as_stored(model: Transformer) -> dict[str, Tensor]:
    """The model's tensors as its family's files hold them, in the model's order."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = dict[str, Tensor]()
    for name, parts in stored_tensors(model.shape).items():
        if has_layouts(parts[0]):
            found |= as_written(parts[0], own[parts[0].name])
            continue
        rows = [own[one.name] for one in parts]
        found[name] = joined(rows) if len(rows) > 1 else rows[0]
    return found


def carry_files(source: Path, folder: Path) -> None:
    for name in CARRIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, max_shard_bytes: int) -> None:
    groups = _split(tensors, dtype.itemsize, max_shard_bytes)
    if len(groups) == 1:
        write_tensors(folder / "model.safetensors", groups[0], dtype)
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        write_tensors(folder / file, group, dtype)
        weight_map |= dict.fromkeys(group, file)
    total_bytes = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _split(tensors: Mapping[str, Tensor], item_bytes: int, max_shard_bytes: int) -> list[dict[str, Tensor]]:
    """Tensors in order, as many to a file as the limit allows; a tensor above the limit has its own file."""
    groups: list[dict[str, Tensor]] = []
    num_bytes = max_shard_bytes + 1
    for name, tensor in tensors.items():
        size = tensor.numel() * item_bytes
        if num_bytes + size > max_shard_bytes:
            groups.append({})
            num_bytes = 0
        groups[-1][name] = tensor
        num_bytes += size
    return groups


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` once it is complete and on disk, or removed."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ModelError(f"{folder}: already exists; choose another folder or remove this one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            yield temporary
            for path in (*temporary.iterdir(), temporary):
                sync_path(path)
            temporary.chmod(0o755)
            temporary.rename(folder)
            sync_path(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written ({error.strerror})") from None
