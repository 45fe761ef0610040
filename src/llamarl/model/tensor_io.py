"""Reads tensors from safetensors files and writes them, without a second copy of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llamarl.layout.boxes import Box, whole
from llamarl.model.safetensors_file import SegmentReader, TensorSpan, header_bytes

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STAGING_BYTES = 16 << 20
_CACHED_BYTES = 256 << 10  # on a CPU: stays in the cache between reading and converting
_ONE_THREAD = 32_768  # numbers; torch converts so many on the calling thread


def read_tensor(span: TensorSpan, out: Tensor, box: Box | None = None) -> None:
    """Reads a box of a tensor, or all of it, into `out`: in place where the type is the same, else by a small buffer."""
    if not out.is_contiguous():
        raise ValueError("parameters are read into contiguous memory")
    dtype, on_cpu = DTYPES[span.dtype], out.device.type == "cpu"
    with SegmentReader(span, whole(span.shape) if box is None else box) as reader:
        if on_cpu and out.dtype == dtype:
            reader.fill(bytes_of(out))
            return
        num_bytes = _CACHED_BYTES if on_cpu else _STAGING_BYTES
        staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=out.device.type == "cuda").view(dtype)
        flat = out.view(-1)
        for start in range(0, flat.numel(), staging.numel()):
            chunk = staging[: flat.numel() - start]
            reader.fill(bytes_of(chunk))
            _convert(chunk, flat[start : start + chunk.numel()])


def _convert(numbers: Tensor, out: Tensor) -> None:
    """`out.copy_(numbers)`; on a CPU by the calling thread alone, since waking others costs more than a small copy."""
    if out.device.type != "cpu":
        out.copy_(numbers)
    elif (numbers.dtype, out.dtype) == (torch.bfloat16, torch.float32):
        # bf16 is the upper half of fp32
        halves, words = numbers.view(torch.uint16).numpy(), out.view(torch.uint32).numpy()
        np.left_shift(halves, 16, out=words, dtype=np.uint32)
    else:
        for start in range(0, numbers.numel(), _ONE_THREAD):
            out[start : start + _ONE_THREAD].copy_(numbers[start : start + _ONE_THREAD])


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Writes a safetensors file in chunks of bounded size."""
    name_of_dtype = _DTYPE_NAMES[dtype]
    with path.open("wb") as file:
        file.write(header_bytes({name: (name_of_dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}))
        for tensor in tensors.values():
            for chunk in _chunks(tensor, dtype):
                file.write(chunk)


def _chunks(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    flat = tensor.contiguous().view(-1)
    step = _STAGING_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        yield bytes_of(flat[start : start + step].to(device="cpu", dtype=dtype))


def same_bytes(a: TensorSpan, b: TensorSpan) -> bool:
    """Whether two tensors of equal dtype and shape are equal bit for bit."""
    left, right = bytearray(_STAGING_BYTES), bytearray(_STAGING_BYTES)
    with SegmentReader(a, whole(a.shape)) as a_reader, SegmentReader(b, whole(b.shape)) as b_reader:
        for start in range(0, a.num_bytes, _STAGING_BYTES):
            size = min(_STAGING_BYTES, a.num_bytes - start)
            a_reader.fill(memoryview(left)[:size])
            b_reader.fill(memoryview(right)[:size])
            if left[:size] != right[:size]:
                return False
    return True


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
