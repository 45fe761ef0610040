"""Counts the memory that a program's tensors take, by kind, at every operation; fake tensors count as real ones would.

What is counted are storages: views share one, and a storage that FSDP shrinks to nothing counts as nothing. On a GPU some
results are never stored, since one kernel computes them and what reads them. So inside *fused* code a result counts only once
something outside reads it: code is fused if it is the plain twin of a kernel, or runs as a compiled graph.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SMALL_BYTES = 1 << 16  # smaller results are counted wherever they are made
_FSDP = "torch.distributed.fsdp."
_SHAPES_ONLY = (
    "torch.distributed.tensor._sharding_prop"  # asks operations for the shapes of results, of all ranks together
)
_ASKED_BY_HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
_REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "var_mean", "prod", "any", "all"}
_FUSED_TOO = {"full", "full_like", "iota", "arange", "scalar_tensor", "empty", "zeros", "ones"}
_FUSED_TOO |= {"convert_element_type", "copy", "copy_", "clone", "cat", "gather", "select_scatter"}


@dataclass
class _Block:
    """A live storage."""

    kind: str
    num_bytes: int
    fused: object | None  # call of fused code that made it and still hides it; None: it is counted


@dataclass
class GraphRun:
    """A run of a compiled graph: how far memory rose above what was taken before."""

    before_bytes: int
    spike_bytes: int = 0


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while it is entered. Not for several threads."""

    active: ClassVar[MemoryTracker | None] = None
    supports_higher_order_operators = True

    def __init__(
        self,
        kind: str,
        *,
        twins: Iterable[Callable[..., Any]] = (),
        owners: Mapping[Callable[..., Any], str] = MappingProxyType({}),
        opened: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        """`kind`: of everything that nobody says otherwise about. `twins`: plain functions that stand for one kernel each on
        a GPU. `owners`: functions, and the kind of all memory that they make. `opened`: operations that take memory inside,
        and the functions that they run."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._twins: dict[CodeType, str] = {twin.__code__: twin.__qualname__ for twin in twins}
        self._blocks: dict[int, _Block] = {}
        self._kind, self._calls = kind, 0
        self._owners = {owner.__code__: kind for owner, kind in owners.items()}
        self._graph: GraphRun | None = None
        self._opened, self._is_inside = opened, False
        self.now: Counter[str] = Counter()  # bytes by kind
        self.at_peak: Counter[str] = Counter()
        self.total = self.peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise nothing would be compiled

    @contextmanager
    def kind(self, name: str) -> Iterator[None]:
        """What is made inside counts as this kind."""
        before, self._kind = self._kind, name
        try:
            yield
        finally:
            self._kind = before

    @contextmanager
    def fused_graph(self) -> Iterator[GraphRun]:
        """Runs a compiled graph: of what fits into one kernel, only what others read is stored. Results of the graph must
        be kept (`keep`)."""
        self._graph = GraphRun(self.total)
        self._calls += 1
        try:
            yield self._graph
        finally:
            self._graph = None

    def spike(self, num_bytes: int) -> None:
        """Counts memory that is taken and freed again at once."""
        if self.total + num_bytes > self.peak:
            self.peak = self.total + num_bytes
            self.at_peak = self.now + Counter({self._kind: num_bytes})

    def keep(self, tensors: Iterable[Any]) -> None:
        """Counts these tensors from now on, if fused code hid them."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._store(_local(tensor))

    def relabel(self, tensor: Tensor, kind: str) -> None:
        """Counts a tensor as another kind from now on."""
        block = self._blocks.get(_local(tensor).untyped_storage()._cdata)
        if block is not None and block.fused is None:
            self._add(block, -block.num_bytes)
            block.kind = kind
            self._add(block, block.num_bytes)

    def forget_peak(self) -> None:
        """Begins a new peak, at what is held now."""
        self.peak, self.at_peak = self.total, Counter(self.now)

    # The mode

    def __enter__(self) -> MemoryTracker:
        MemoryTracker.active = self
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized()  # type: ignore[method-assign, assignment]  # no operation announces it
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        MemoryTracker.active = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it does with its local tensors is counted
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked so often that the way through the fake mode would take minutes
        if getattr(func, "is_view", False):  # takes no memory
            return func(*args, **kwargs)
        if func in _ASKED_BY_HOST and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].dtype.is_floating_point else 1  # numbers that the host asks for
        if func in self._opened:
            return self._run_inside(func, args, kwargs)
        call = self._fused_call(func)
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor):
                self._read(one, call)
        found = func(*args, **kwargs)
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                self._made(one, call)
        return found

    def _run_inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs what an operation does, each step of it counted; the compiler fuses none of them."""
        self._calls += 1
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor):
                self._read(one, None)
        before, self._is_inside = self._is_inside, True
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return self._opened[func](*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_inside = before

    def _fused_call(self, func: Any) -> object | None:
        """The call of fused code that this operation is part of; None: it is a kernel of its own."""
        if self._graph and not self._is_inside:
            return self._calls if _is_fusible(func) else None
        frame: FrameType | None = sys._getframe(2)
        found: tuple[int, str] | None = None
        while frame is not None:
            if frame.f_code in self._twins:
                found = id(frame), self._twins[frame.f_code]  # the outermost one is the kernel
            frame = frame.f_back
        if found is None:
            self._calls += 1
            return None
        return *found, self._calls

    def _read(self, tensor: Tensor, call: object | None) -> None:
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is not None and block.fused is not None and block.fused != call:
            self._store(tensor)

    def _made(self, tensor: Tensor, call: object | None) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._blocks or tensor.device.type == "meta":
            return
        kind = self._kind if num_bytes <= _SMALL_BYTES or self._graph else self._kind_here()
        if kind is None:
            return
        block = self._blocks[key] = _Block(kind, num_bytes, call if num_bytes > _SMALL_BYTES else None)
        weakref.finalize(storage, self._freed, key).atexit = False
        if block.fused is None:
            self._add(block, num_bytes)

    def _kind_here(self) -> str | None:
        """Kind of what is made here; None if it would not be made on a GPU."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            if frame.f_code in self._owners:
                return self._owners[frame.f_code]
            name = frame.f_globals.get("__name__", "")
            if name == _SHAPES_ONLY:
                return None
            if name.startswith(_FSDP):
                return "gathered"  # parameters, and gradients to be reduced
            frame = frame.f_back
        return self._kind

    def _store(self, tensor: Tensor) -> None:
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is not None and block.fused is not None:
            block.fused = None
            self._add(block, block.num_bytes)

    def _resized(self) -> Callable[[torch.UntypedStorage, int], Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._resize(storage, size)
            block = self._blocks.get(storage._cdata)
            if block is not None:
                grown, block.num_bytes = size - block.num_bytes, size
                if block.fused is None:
                    self._add(block, grown)
            return done

        return resize

    def _freed(self, key: int) -> None:
        block = self._blocks.pop(key)
        if block.fused is None:
            self._add(block, -block.num_bytes)

    def _add(self, block: _Block, num_bytes: int) -> None:
        self.now[block.kind] += num_bytes
        self.total += num_bytes
        if self._graph is not None:
            self._graph.spike_bytes = max(self._graph.spike_bytes, self.total - self._graph.before_bytes)
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, Counter(self.now)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_fusible(func: Any) -> bool:
    """Whether a compiler makes it part of the kernel that reads or makes its neighbors: elementwise work and reductions."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._schema.name.partition("::")[2]
    return torch.Tag.pointwise in func.tags or name in _REDUCTIONS or name in _FUSED_TOO
