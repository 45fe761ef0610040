"""Converts a GGUF file into a Hugging Face folder: dequantized weights, config, tokenizer and chat template."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from llamarl.errors import InputError, ModelError
from llamarl.families.parameters import parameter_shapes
from llamarl.model.checkpoint import empty_model, save_model
from llamarl.model.gguf_file import KINDS, GGUFFile, GGUFTensor, read_gguf
from llamarl.model.gguf_tokenizer import write_tokenizer
from llamarl.model.hf_config import write_config
from llamarl.model.rope import rope_frequencies
from llamarl.model_spec import SHAPES, ModelSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Fields below `llama.` or `qwen2.` that are read here. Any other could change the maths.
_FIELDS = frozenset(
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "vocab_size",
    ]
)
_ROPE_FACTORS = "rope_freqs.weight"
# Two quantizations of one matrix differ by a few percent; two different matrices by about 140%.
_TIED_DIFFERENCE = 0.3
_TIED_ROWS = 1024


def import_gguf(file: Path, folder: Path, *, dtype: str = "bfloat16") -> None:
    """Writes `folder` from `file` (llama or qwen2 architecture), completely or not at all."""
    dequantize = _dequantizer()
    if dtype not in DTYPES:
        raise InputError(f"dtype '{dtype}' is not supported; supported: {', '.join(DTYPES)}")
    gguf = read_gguf(file)
    weights = _Weights(gguf, dequantize)
    shape = _shape(gguf, weights)
    _check_names(gguf, shape)
    with tempfile.TemporaryDirectory() as temporary:
        beside = Path(temporary)
        write_config(shape, beside, extra=write_tokenizer(gguf, beside))
        model = empty_model(shape, dtype=DTYPES[dtype], device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights.parameter(name, shape))
        save_model(model, folder, carry_from=beside)


def _dequantizer() -> Callable[[NDArray[np.uint8], int], NDArray[np.float32]]:
    gguf = _gguf_package()

    def dequantize(data: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind))
        return numbers

    return dequantize


def _gguf_package() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise InputError("GGUF files need one more package: pip install 'llamarl[gguf]'") from None
    module: ModuleType = gguf
    return module


class _Weights:
    """The file's tensors, dequantized, under Hugging Face names and with rows in Hugging Face order."""

    def __init__(self, gguf: GGUFFile, dequantize: Callable[[NDArray[np.uint8], int], NDArray[np.float32]]) -> None:
        self._gguf, self._dequantize = gguf, dequantize

    def parameter(self, name: str, shape: ModelSpec) -> Tensor:
        theirs = _their_name(name)
        if name == "model.embed_tokens.weight" and shape.tied_head and "output.weight" in self._gguf.tensors:
            theirs = "output.weight"  # the finer of the two copies
        numbers = self.read(theirs)
        if self._gguf.fields["general.architecture"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            return _unpermute(numbers, shape.head_dim)
        return numbers

    def read(self, name: str, max_rows: int | None = None) -> Tensor:
        tensor = self._gguf.tensors[name]
        data = self._bytes(tensor, max_rows)
        return torch.from_numpy(np.ascontiguousarray(self._dequantize(data, tensor.kind)))

    def _bytes(self, tensor: GGUFTensor, max_rows: int | None) -> NDArray[np.uint8]:
        _, block, block_bytes = KINDS[tensor.kind]
        row_bytes = tensor.shape[-1] // block * block_bytes
        num_rows = tensor.num_bytes // row_bytes
        wanted = min(num_rows, max_rows or num_rows) * row_bytes
        data = np.fromfile(self._gguf.path, dtype=np.uint8, count=wanted, offset=tensor.offset)
        if data.size != wanted:
            raise ModelError(f"{self._gguf.path}: became shorter while it was read")
        return data.reshape(*([-1] if len(tensor.shape) > 1 else []), row_bytes)


def _unpermute(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders rows: llama.cpp stores rotary pairs side by side, Hugging Face keeps the halves apart."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _their_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{leaf}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{_LAYER[inner]}.{leaf}"


def _shape(gguf: GGUFFile, weights: _Weights) -> ModelSpec:
    architecture = gguf.fields.get("general.architecture")
    if architecture not in ("llama", "qwen2"):
        raise ModelError(f"{gguf.path}: architecture {architecture!r} is not supported; supported: llama, qwen2")
    prefix = f"{architecture}."
    fields = {name.removeprefix(prefix): value for name, value in gguf.fields.items() if name.startswith(prefix)}
    unknown = fields.keys() - _FIELDS
    if unknown:
        raise ModelError(f"{gguf.path}: field '{prefix}{min(unknown)}' is not known here and could change the maths")
    if "token_embd.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.path}: tensor token_embd.weight is missing")
    heads, hidden = _whole(gguf, fields, "attention.head_count"), _whole(gguf, fields, "embedding_length")
    head_dim = _whole(gguf, fields, "attention.key_length", default=hidden // heads)
    for other in ("attention.value_length", "rope.dimension_count"):
        if fields.get(other, head_dim) != head_dim:
            raise ModelError(f"{gguf.path}: {prefix}{other} {fields[other]} differs from the head size {head_dim}")
    try:
        shape = ModelSpec(
            vocab_size=gguf.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=_whole(gguf, fields, "feed_forward_length"),
            num_layers=_whole(gguf, fields, "block_count", most=len(gguf.tensors)),
            num_heads=heads,
            num_kv_heads=_whole(gguf, fields, "attention.head_count_kv", default=heads),
            head_dim=head_dim,
            max_positions=_whole(gguf, fields, "context_length"),
            rope_theta=_decimal(gguf, fields, "rope.freq_base", default=10_000.0),
            norm_eps=_decimal(gguf, fields, "attention.layer_norm_rms_epsilon", default=1e-5),
            tied_head=_is_tied(gguf, weights),
            qkv_bias=architecture == "qwen2",
            family=architecture,
        )
    except InputError as error:
        raise ModelError(f"{gguf.path}: {error}") from None
    return _with_rope_factors(gguf, weights, shape)


def _whole(
    gguf: GGUFFile, fields: dict[str, Any], name: str, *, default: int | None = None, most: int = 1 << 26
) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ModelError(f"{gguf.path}: field '{name}' must be a whole number from 1 to {most}, is {str(value)[:60]}")
    return value


def _decimal(gguf: GGUFFile, fields: dict[str, Any], name: str, *, default: float) -> float:
    """A field as written by people: GGUF stores fp32, in which 1e-5 is 9.99999974e-06."""
    value = fields.get(name, default)
    if type(value) is not float or not 0 < value < math.inf:
        raise ModelError(f"{gguf.path}: field '{name}' must be a positive number, is {str(value)[:60]}")
    return float(f"{value:.7g}")


def _is_tied(gguf: GGUFFile, weights: _Weights) -> bool:
    """Whether the head is tied. No field says so: a tied file has no output matrix, or the embedding in another encoding."""
    if "output.weight" not in gguf.tensors:
        return True
    if gguf.tensors["output.weight"].shape != gguf.tensors["token_embd.weight"].shape:
        return False
    embedding, output = (weights.read(name, _TIED_ROWS) for name in ("token_embd.weight", "output.weight"))
    return bool((embedding - output).norm() < _TIED_DIFFERENCE * output.norm())


def _with_rope_factors(gguf: GGUFFile, weights: _Weights, shape: ModelSpec) -> ModelSpec:
    """The spec with its RoPE scaling. Files of Llama 3.1 and later contain only its result, so published ones are tried."""
    if _ROPE_FACTORS not in gguf.tensors:
        return shape
    factors = weights.read(_ROPE_FACTORS).flatten()
    for known in (SHAPES["llama-3.1-8b"], SHAPES["llama-3.2-1b"]):
        scaled = replace(shape, rope_scaling=known.rope_scaling)
        expected = rope_frequencies(shape) / rope_frequencies(scaled)
        if expected.shape == factors.shape and torch.allclose(expected, factors, rtol=1e-3):
            return scaled
    raise ModelError(f"{gguf.path}: {_ROPE_FACTORS} is neither Llama 3.1's nor 3.2's scaling")


def _check_names(gguf: GGUFFile, shape: ModelSpec) -> None:
    expected = {_their_name(name): size for name, size in parameter_shapes(shape).items()}
    for name, size in expected.items():
        if name not in gguf.tensors:
            raise ModelError(f"{gguf.path}: tensor {name} is missing")
        if gguf.tensors[name].shape != size:
            found = list(gguf.tensors[name].shape)
            raise ModelError(f"{gguf.path}: tensor {name} has shape {found}; its fields say {list(size)}")
    for name in gguf.tensors.keys() - expected.keys() - {"output.weight", _ROPE_FACTORS}:
        raise ModelError(f"{gguf.path}: tensor {name} is not part of a model of this architecture")
