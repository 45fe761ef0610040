"""Activations in host memory: what blocks keep for their backward pass is copied away, and fetched again before it is needed.

Copies run beside the computation: those of a block while the next ones compute, forward; and those of the block before it
while a block computes, backward. The last blocks' are needed at once and stay. If copies are slower than computing, blocks
wait for them, so the device never holds more than a few blocks' activations.

It is applied to blocks from outside, around compiled code, by autograd's hooks for saved tensors: every number is that of a
pass which keeps them on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from llamarl.model.spread import is_spread
from llamarl.model.transformer import Transformer
from llamarl.train.pinned import HostArena

SETTING = "trainer.recompute"
_LEAST_BYTES = 1 << 20  # smaller tensors stay on the device
_AT_ONCE = 2  # blocks whose copies may still be under way while the next one computes
_STAY = 1  # last blocks, whose activations are needed first

Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


class ActivationOffload:
    """The activations of all blocks of a model, one pass at a time."""

    def __init__(self, num_blocks: int, least_bytes: int = _LEAST_BYTES) -> None:
        self._num_blocks, self.least_bytes = num_blocks, least_bytes
        self._copies: _Copies | None = None
        self._blocks: list[_BlockActivations] = []
        self.moved_bytes = 0  # that were copied to host memory so far

    def begin_block(self, number: int, device: torch.device, stays: Iterable[Tensor]) -> _BlockActivations:
        """A block's forward pass begins. What is in the memory of `stays` is not its own."""
        if self._copies is None:
            self._copies = _Copies(device)
        if number == 0:
            self._copies.begin_pass()
            self._blocks = []
        least_bytes = self.least_bytes if number < self._num_blocks - _STAY else None
        before = self._blocks[-1] if self._blocks else None
        block = _BlockActivations(self._copies, {_memory_of(one) for one in stays}, before, least_bytes)
        self._blocks.append(block)
        return block

    def end_block(self, block: _BlockActivations) -> None:
        self.moved_bytes += block.moved_bytes
        for earlier in self._blocks[-1 - _AT_ONCE :: -1]:
            if not earlier.let_go():
                break


class OffloadedBlock:
    """The forward pass of a block whose activations are in host memory until its backward pass."""

    def __init__(self, block: nn.Module, number: int, offload: ActivationOffload) -> None:
        self._forward: Callable[..., Tensor] = block.forward
        self._block, self._number, self.offload = block, number, offload

    def __call__(self, x_RTC: Tensor, rope: tuple[Tensor, Tensor], attend: object, *routes: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self._forward(x_RTC, rope, attend, *routes)
        masks = [one for one in vars(attend).values() if isinstance(one, Tensor)]
        stays = [*self._block.parameters(), *self._block.buffers(), *rope, *masks]
        kept = self.offload.begin_block(self._number, x_RTC.device, stays)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            out = self._forward(x_RTC, rope, attend, *routes)
        self.offload.end_block(kept)
        return out


def offload_activations(model: Transformer) -> None:
    """Puts the activations of all blocks into host memory. For blocks that are compiled already."""
    offload = ActivationOffload(len(model.model.layers))
    block: Any
    for number, block in enumerate(model.model.layers):
        block.forward = OffloadedBlock(block, number, offload)


def moved_bytes(model: Transformer) -> int | None:
    """Bytes of activations that were copied to host memory so far; None where they stay on the device."""
    forward: Any = model.model.layers[0].forward
    return forward.offload.moved_bytes if isinstance(forward, OffloadedBlock) else None


class _BlockActivations:
    """What a block keeps: tensors in host memory, and those that stay. Its parts are moved together."""

    def __init__(
        self, copies: _Copies, stays: set[int], before: _BlockActivations | None, least_bytes: int | None
    ) -> None:
        self._copies, self._stays, self._before, self._least_bytes = copies, stays, before, least_bytes
        # Autograd holds them until they were used.
        self._moved: WeakValueDictionary[Key, _Moved] = WeakValueDictionary()
        self._fetched = False
        self.moved_bytes = 0

    def pack(self, tensor: Tensor) -> _Moved | Tensor:
        local = tensor.to_local() if is_spread(tensor) else tensor
        if not self._can_move(local):
            return tensor.detach()
        key = (_memory_of(local), int(local.storage_offset()), tuple(local.shape), tuple(local.stride()))
        kept = self._moved.get(key)
        if kept is None:  # several operations may keep the same tensor
            kept = self._moved[key] = _Moved(local.detach(), tensor, self._copies)
            self.moved_bytes += local.nbytes
        return kept

    def _can_move(self, tensor: Tensor) -> bool:
        if self._least_bytes is None or tensor.nbytes < self._least_bytes or _memory_of(tensor) in self._stays:
            return False
        return not isinstance(tensor, AsyncCollectiveTensor) and _is_dense(tensor)

    def unpack(self, kept: _Moved | Tensor) -> Tensor:
        self.fetch()
        if self._before is not None:
            self._before.fetch()
        return kept.get(self._copies) if isinstance(kept, _Moved) else kept

    def fetch(self) -> None:
        """Begins to copy everything back."""
        if not self._fetched:
            self._fetched = True
            for one in list(self._moved.values()):
                one.fetch(self._copies)

    def let_go(self) -> bool:
        """Waits for the copies to host memory, so that the device's memory is free; False if that was done before."""
        return any([one.let_go(self._copies) for one in list(self._moved.values())])


class _Moved:
    """A tensor in host memory: its bytes, and how they lay on the device."""

    def __init__(self, local: Tensor, tensor: Tensor, copies: _Copies) -> None:
        self._shape, self._stride = local.shape, local.stride()
        self._spread = (
            (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()) if is_spread(tensor) else None
        )
        self._source: Tensor | None = local.as_strided((local.numel(),), (1,))
        self._host, self._gone = copies.send(self._source)
        self._device: Tensor | None = None
        self._there: torch.cuda.Event | None = None

    def let_go(self, copies: _Copies) -> bool:
        if self._source is None:
            return False
        copies.wait(self._gone)
        self._source = None
        return True

    def fetch(self, copies: _Copies) -> None:
        if self._source is not None:  # it is still there
            self._device = self._source
        else:
            self._device, self._there = copies.bring(self._host)

    def get(self, copies: _Copies) -> Tensor:
        assert self._device is not None
        copies.wait(self._there)
        local = self._device.as_strided(self._shape, self._stride)
        if self._spread is None:
            return local
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self._spread
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class _Copies:
    """Copies between device and pinned host memory, on streams of their own; on a CPU, plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, on_gpu = device, device.type == "cuda"
        self._arena = HostArena(f"{SETTING}=offload", pinned=on_gpu)
        self._out, self._back = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))  # type: ignore[no-untyped-call]

    def begin_pass(self) -> None:
        """The memory of the pass before is taken again, once everything was fetched from it."""
        self._arena.reset()
        if self._out is not None and self._back is not None:
            self._out.wait_stream(self._back)

    def send(self, flat: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        host = self._arena.take(flat.nbytes).view(flat.dtype)
        if self._out is None:
            host.copy_(flat)
            return host, None
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(flat, non_blocking=True)
            return host, self._out.record_event()

    def bring(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        flat = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        if self._back is None:
            return flat.copy_(host), None
        self._back.wait_stream(torch.cuda.current_stream(self._device))  # which may still read this memory
        with torch.cuda.stream(self._back):
            flat.copy_(host, non_blocking=True)
            return flat, self._back.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def _memory_of(tensor: Tensor) -> int:
    local = tensor.to_local() if is_spread(tensor) else tensor
    return int(local.untyped_storage()._cdata)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory without gaps, in whatever order."""
    expected = 1
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in steps if size > 1):
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
