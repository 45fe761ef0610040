"""AdamW on fp32 master weights, for parameters that are fp32 or bf16, resident or with their state in host memory.

An fp32 parameter is its own master. The master of a bf16 parameter is held in two halves: the parameter itself, which is the
master rounded to the nearest bf16, and 16 bits with the distance of the master from there. Together they are exactly the fp32
master, in the memory of one fp32 number instead of one and a half.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.utils.hooks import RemovableHandle

from llamarl.config import TrainerConfig
from llamarl.model.gpu_paths import Backend, compile_backend, on_gpu, upload
from llamarl.model.spread import is_spread
from llamarl.train.pinned import aligned, pin, unpin

_EPSILON = 1e-8
_AHEAD = 2  # parameters whose state is copied from host memory while another is updated


@dataclass
class Slot:
    """One parameter of this rank and its state. Only bf16 parameters have the state `low`."""

    name: str
    parameter: Tensor  # the tensor that autograd knows
    local: Tensor  # this rank's shard
    decay: float
    state: dict[str, Tensor]

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """Names and types of its state tensors."""
        moments = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
        return moments | ({"low": torch.int16} if self.local.dtype == torch.bfloat16 else {})

    @property
    def grad(self) -> Tensor | None:
        """Gradient of this rank's shard. If its layout differs from the parameter's, this is a collective."""
        grad, parameter = self.parameter.grad, self.parameter
        if not is_spread(grad) or not is_spread(parameter):
            return grad
        if self.laid_out_anew:
            grad = parameter.grad = grad.redistribute(placements=parameter.placements)
        return grad.to_local()

    @property
    def laid_out_anew(self) -> bool:
        """Whether `grad` first changes the layout of the gradient to that of the parameter."""
        grad, parameter = self.parameter.grad, self.parameter
        if not is_spread(grad) or not is_spread(parameter):
            return False
        return bool(grad.placements != parameter.placements)


class AdamW:
    """AdamW. Weight decay applies to matrices only, since norms and biases have their own scale."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: TrainerConfig, *, compiled: bool = False) -> None:
        self._betas, self._compiled = settings.betas, compiled
        self.num_steps = 0
        self.slots = [_make_slot(name, one, settings) for name, one in parameters.items()]
        self._accumulated: dict[str, Tensor] = {}
        device = self.slots[0].local.device
        self._offload = _Offload(self.slots, device) if settings.offload and device.type == "cuda" else None
        if self._offload is None:
            for slot in self.slots:
                slot.state = {key: torch.zeros_like(slot.local, dtype=dtype) for key, dtype in slot.kinds.items()}

    # Gradients

    def zero_grad(self) -> None:
        self._accumulated.clear()
        for slot in self.slots:
            slot.parameter.grad = None

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Adds bf16 gradients to fp32 sums, each as soon as a backward pass has made it: those of a whole model never exist
        at once. For the passes of an update that has several."""
        hooks = [self._sum_when_made(slot) for slot in self.slots if slot.local.dtype != torch.float32]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _sum_when_made(self, slot: Slot) -> RemovableHandle:
        def made(parameter: Tensor) -> None:
            if not slot.laid_out_anew:  # that would be a collective; see `collect`
                self._collect(slot)

        handle: RemovableHandle = slot.parameter.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]
        return handle

    def collect(self) -> None:
        """Adds the bf16 gradients that are left to fp32 sums; called after each of several passes of one update."""
        for slot in self.slots:
            self._collect(slot)

    def _collect(self, slot: Slot) -> None:
        grad = slot.grad
        if grad is None or grad.dtype == torch.float32:
            return  # autograd and FSDP sum fp32 gradients themselves
        if slot.name in self._accumulated:
            self._accumulated[slot.name].add_(grad)
        else:
            self._accumulated[slot.name] = grad.float()
        slot.parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients of the update, by name."""
        found = {slot.name: self._accumulated.get(slot.name, slot.grad) for slot in self.slots}
        return {name: grad for name, grad in found.items() if grad is not None}

    # The step

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor | float = 1.0, sound: Tensor | bool = True) -> bool:
        """Takes a step with gradients times `scale`. Unless `sound`, nothing changes, bit for bit; returns `sound`.

        A step on bf16 parameters is queued at once and tests `sound` on the device; the host waits only at the end.
        """
        grads = self.gradients()
        slots = [slot for slot in self.slots if slot.name in grads]
        whole = [slot for slot in slots if "low" not in slot.state]
        split = [slot for slot in slots if "low" in slot.state]
        if whole and not sound:
            return False
        self.num_steps += 1
        for group in self._resident(whole):
            self._step_whole(group, grads, lr, scale)
        numbers = {decay: self._numbers(lr, decay) for decay in {slot.decay for slot in split}}
        device = self.slots[0].local.device
        factor, go = torch.as_tensor(scale, dtype=torch.float32, device=device), torch.as_tensor(sound, device=device)
        for group in self._resident(split):
            for slot in group:
                self._step_split(slot, grads[slot.name], numbers[slot.decay], factor, go)
        made = bool(go)
        self.num_steps -= not made
        return made

    def _resident(self, slots: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
        """Groups of slots, each with its state on the device until the next group is asked for."""
        if self._offload is not None:
            yield from self._offload.stream(slots)
        elif slots:
            yield slots

    def _step_whole(self, slots: Sequence[Slot], grads: Mapping[str, Tensor], lr: float, scale: Tensor | float) -> None:
        torch._foreach_mul_([grads[slot.name] for slot in slots], scale)
        for decay in dict.fromkeys(slot.decay for slot in slots):
            group = [slot for slot in slots if slot.decay == decay]
            adamw(
                [slot.local for slot in group],
                [grads[slot.name] for slot in group],
                [slot.state["exp_avg"] for slot in group],
                [slot.state["exp_avg_sq"] for slot in group],
                [],
                list(torch.full((len(group),), self.num_steps - 1.0, device=slots[0].local.device).unbind()),
                fused=on_gpu(slots[0].local),
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=lr,
                weight_decay=decay,
                eps=_EPSILON,
                maximize=False,
            )

    def _step_split(self, slot: Slot, grad: Tensor, numbers: Tensor, scale: Tensor, sound: Tensor) -> None:
        step = _compiled(_split_step, compile_backend()) if self._compiled else _split_step
        step(
            _row(slot.local.view(torch.int16)),
            _row(slot.state["low"]),
            _row(slot.state["exp_avg"]),
            _row(slot.state["exp_avg_sq"]),
            _row(grad.contiguous()),
            numbers,
            scale,
            sound,
            *self._betas,
        )

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile the step on numbers of no consequence: for gradients of a single pass and for fp32 sums of several."""
        # torch takes sizes of 0 and 1 for constants, so a graph of those would serve no other.
        split = [slot for slot in self.slots if "low" in slot.kinds and slot.local.numel() > 1]
        if not split or not self._compiled:
            return
        slot = min(split, key=lambda slot: slot.local.numel())
        zeros, device = torch.zeros_like(slot.local), slot.local.device
        numbers, scale = torch.zeros(3, device=device), torch.ones((), device=device)
        for dtype in (slot.local.dtype, torch.float32):
            state = {key: torch.zeros_like(zeros, dtype=kind) for key, kind in slot.kinds.items()}
            made_up = replace(slot, local=zeros, state=state)
            never = torch.zeros((), dtype=torch.bool, device=device)
            self._step_split(made_up, torch.zeros_like(zeros, dtype=dtype), numbers, scale, never)

    def _numbers(self, lr: float, decay: float) -> Tensor:
        """Numbers for `_split_step`: step size, factor of the second moment's root, and the share that decay leaves."""
        beta1, beta2 = self._betas
        values = [lr / (1 - beta1**self.num_steps), (1 - beta2**self.num_steps) ** -0.5, 1 - lr * decay]
        return upload(torch.tensor(values, dtype=torch.float32), self.slots[0].local.device)

    # State

    def state_tensors(self) -> dict[str, Tensor]:
        """Maps `parameter/exp_avg` and the like to tensors; empty before the first step. Masters are saved as weights."""
        if not self.num_steps:
            return {}
        return {f"{slot.name}/{key}": value for slot in self.slots for key, value in slot.state.items() if key != "low"}

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's shard of every parameter, in fp32."""
        for slot in self.slots:
            if "low" in slot.state:
                low = slot.state["low"].to(slot.local.device)
                yield slot.name, join_halves(slot.local.view(torch.int16), low)
            else:
                yield slot.name, slot.local

    @torch.no_grad()
    def set_master(self, name: str, value: Tensor) -> None:
        """Sets the fp32 master of a bf16 parameter."""
        slot = next(slot for slot in self.slots if slot.name == name)
        high, low = split_halves(value)
        slot.local.view(torch.int16).copy_(high)
        slot.state["low"].copy_(low)


def _row(x: Tensor) -> Tensor:
    """The same numbers as one row. Not as a view: torch compiles views of vectors and of matrices apart."""
    return x.view(-1).data


def _make_slot(name: str, parameter: Tensor, settings: TrainerConfig) -> Slot:
    local = parameter.detach()
    local = local.to_local() if is_spread(local) else local
    return Slot(name, parameter, local, settings.weight_decay if parameter.dim() > 1 else 0.0, {})


def split_halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as the bits of the nearest bf16 (ties away from zero) and the signed distance from it, both int16."""
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    return ((high.to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def _split_step(
    high: Tensor,
    low: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    numbers: Tensor,
    scale: Tensor,
    sound: Tensor,
    beta1: float,
    beta2: float,
) -> None:
    """One AdamW step, in place, reading and writing each number once."""
    step_size, root_factor, keep = numbers[0], numbers[1], numbers[2]
    wide_grad = grad.float() * scale
    first = beta1 * exp_avg + (1 - beta1) * wide_grad
    second = beta2 * exp_avg_sq + (1 - beta2) * wide_grad * wide_grad
    master = join_halves(high, low) * keep - step_size * first / (second.sqrt() * root_factor + _EPSILON)
    new_high, new_low = split_halves(master)
    exp_avg.copy_(torch.where(sound, first, exp_avg))
    exp_avg_sq.copy_(torch.where(sound, second, exp_avg_sq))
    high.copy_(torch.where(sound, new_high, high))
    low.copy_(torch.where(sound, new_low, low))


@cache
def _compiled(function: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, backend=backend)


def host_state(slots: Sequence[Slot]) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Zeroed state of all slots in one block of host memory, and that block: exactly as large as needed, and never on the
    device, where a large model leaves no room for it."""
    sizes = [
        (slot, key, dtype, slot.local.numel() * dtype.itemsize) for slot in slots for key, dtype in slot.kinds.items()
    ]
    memory = torch.empty(sum(aligned(size) for *_, size in sizes), dtype=torch.uint8).zero_()
    home: dict[str, dict[str, Tensor]] = {slot.name: {} for slot in slots}
    start = 0
    for slot, key, dtype, size in sizes:
        home[slot.name][key] = memory[start : start + size].view(dtype).view(slot.local.shape)
        start += aligned(size)
    return memory, home


class _Offload:
    """State in pinned host memory, copied to the device and back parameter by parameter, during the steps."""

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        self._device = device
        self._incoming, self._outgoing = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        memory, self._home = host_state(slots)
        pin(memory, "trainer.offload")
        weakref.finalize(self, unpin, memory).atexit = False
        for slot in slots:
            slot.state = self._home[slot.name]

    def stream(self, slots: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
        current = torch.cuda.current_stream(self._device)
        fetched = [self._fetch(slot) for slot in slots[:_AHEAD]]
        for index, slot in enumerate(slots):
            state, arrived = fetched[index]
            current.wait_event(arrived)
            slot.state = state
            yield [slot]
            self._return(slot, current)
            if index + _AHEAD < len(slots):
                fetched.append(self._fetch(slots[index + _AHEAD]))
            fetched[index] = ({}, arrived)
        current.wait_stream(self._outgoing)
        torch.cuda.current_stream(self._device).synchronize()

    def _fetch(self, slot: Slot) -> tuple[dict[str, Tensor], torch.cuda.Event]:
        with torch.cuda.stream(self._incoming):
            state = {key: one.to(self._device, non_blocking=True) for key, one in self._home[slot.name].items()}
            return state, self._incoming.record_event()

    def _return(self, slot: Slot, current: torch.cuda.Stream) -> None:
        self._outgoing.wait_stream(current)
        with torch.cuda.stream(self._outgoing):
            for key, home in self._home[slot.name].items():
                home.copy_(slot.state[key], non_blocking=True)
                slot.state[key].record_stream(self._outgoing)
                slot.state[key].record_stream(current)
        slot.state = self._home[slot.name]


@torch.no_grad()
def gradient_norm(
    grads: Mapping[str, Tensor], counted: Callable[[str], bool], sum_over_ranks: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Gradient norm of the whole update. With several ranks, each adds the squares of the shards that it `counted`."""
    mine = [grad for name, grad in grads.items() if counted(name)]
    if all(grad.dtype == torch.float32 for grad in mine):
        norm = torch.nn.utils.get_total_norm(mine)
    else:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(mine, 2, dtype=torch.float32)))
    return norm if sum_over_ranks is None else sum_over_ranks(norm**2).sqrt()
