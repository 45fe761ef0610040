"""Device memory that processes share by file descriptor: the CUDA driver's virtual memory calls, through ctypes.

Exported memory lives as long as any process maps it or any descriptor of it is open, so it outlives the process that made it.
(Memory behind a cudaIpc handle goes with its maker.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from functools import cache
from uuid import UUID

import torch
from torch import Tensor

from llamarl.errors import LlamaRLError

_PINNED, _POSIX_FD, _DEVICE, _READ, _READ_WRITE, _RECOMMENDED = 1, 1, 1, 1, 3, 1
_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED, since CUDA 12.4
_SLOTS = "two slots; weights.transport=memfd would take host memory"


class CudaRefused(LlamaRLError):
    """A call of the driver failed; the message has its name and the reason."""


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaRefused(f"weights: no CUDA driver here ({error})") from None


def _call(name: str, *args: object) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        reason = ctypes.c_char_p()
        _driver().cuGetErrorString(code, byref(reason))
        raise CudaRefused(f"weights: {name} failed: {(reason.value or b'unknown error').decode()} ({code})")


def total_memory(device: int) -> int:
    """Bytes of a device's memory. Makes no context there, so it takes no memory itself."""
    handle, size = c_int(), c_size_t()
    _call("cuInit", c_int(0))
    _call("cuDeviceGet", byref(handle), c_int(device))
    _call("cuDeviceTotalMem_v2", byref(size), handle)
    return size.value


def _wake(device: int) -> None:
    """Initializes CUDA by a first tensor of torch, as the driver's calls need it."""
    torch.zeros(1, device=torch.device("cuda", device))


def _properties(device: int) -> _Properties:
    return _Properties(_PINNED, _POSIX_FD, _Location(_DEVICE, device), None, _Flags())


def allocate(device: int, num_bytes: int, what: str = _SLOTS) -> int:
    """New memory on a device, as a descriptor. It is freed when that is closed and no process maps it. `what` it is for is
    told where there is too little."""
    _wake(device)
    properties, handle, fd = _properties(device), c_uint64(), c_int(-1)
    try:
        _call("cuMemCreate", byref(handle), c_size_t(_rounded(device, num_bytes)), byref(properties), c_uint64(0))
    except CudaRefused as error:
        raise CudaRefused(f"{error}: {num_bytes / 1e9:.1f} GB for {what}") from None
    try:
        _call("cuMemExportToShareableHandle", byref(fd), handle, c_int(_POSIX_FD), c_uint64(0))
    finally:
        _call("cuMemRelease", handle)
    return fd.value


def _rounded(device: int, num_bytes: int) -> int:
    step, properties = c_size_t(), _properties(device)
    _call("cuMemGetAllocationGranularity", byref(step), byref(properties), c_int(_RECOMMENDED))
    return max(1, -(-num_bytes // step.value)) * step.value


class Mapping:
    """Memory of a descriptor, mapped into this process. `users` are the devices that may access it, or only read it."""

    def __init__(self, fd: int, device: int, num_bytes: int, users: Sequence[int], *, read_only: bool = False) -> None:
        _wake(device)
        self._size, self.num_bytes = _rounded(device, num_bytes), num_bytes
        handle, address = c_uint64(), c_uint64()
        _call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(_POSIX_FD))
        try:
            size, none = c_size_t(self._size), c_uint64(0)
            _call("cuMemAddressReserve", byref(address), size, c_size_t(0), none, none)
            _call("cuMemMap", address, size, c_size_t(0), handle, none)
        finally:
            _call("cuMemRelease", handle)
        rights = _READ if read_only else _READ_WRITE
        access = (_Access * len(users))(*(_Access(_Location(_DEVICE, user), rights) for user in users))
        _call("cuMemSetAccess", address, c_size_t(self._size), access, c_size_t(len(users)))
        self.address = address.value

    def tensor(self) -> Tensor:
        """All of the memory, as bytes. Valid while this object exists."""
        seen: Tensor = torch.as_tensor(_Bytes(self.address, self.num_bytes))
        return seen

    def close(self) -> None:
        if self.address:
            _call("cuMemUnmap", c_uint64(self.address), c_size_t(self._size))
            _call("cuMemAddressFree", c_uint64(self.address), c_size_t(self._size))
            self.address = 0


class _Bytes:
    """Array interface by which torch uses memory that it did not allocate."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_uuids() -> list[str]:
    """The names of all devices that this process sees, in order, by which any process finds them."""
    _call("cuInit", 0)
    count, found = c_int(), list[str]()
    _call("cuDeviceGetCount", byref(count))
    for device in range(count.value):
        raw = (c_ubyte * 16)()
        _call("cuDeviceGetUuid", byref(raw), c_int(device))
        found.append(f"GPU-{UUID(bytes=bytes(raw))}")
    return found


def mps_enabled(device: int) -> bool | None:
    """Whether contexts on the device are shared through NVIDIA's MPS; None if the driver is too old to tell."""
    enabled = c_int()
    code = _driver().cuDeviceGetAttribute(byref(enabled), _MPS_ENABLED, c_int(device))
    return None if code else bool(enabled.value)
