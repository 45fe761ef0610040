"""A backend of `torch.compile` for rehearsals: cuts and decomposes graphs as Inductor does, then runs them node by node.

So what the forward pass keeps for the backward pass is what it would keep on a GPU, and what Inductor would fuse is not
counted as memory. All layers share their graphs: a graph runs once, and then only its results and its peak are repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llamarl.rehearse.tracking import MemoryTracker


def fused_backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], **options: Any) -> Callable[..., Any]:
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=_compile,
        bw_compiler=_compile,
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        keep_inference_input_mutations=True,
    )(graph, inputs)
    return compiled


@dataclass(frozen=True)
class _Result:
    """A tensor that a graph returns: new, or a view of an argument or of an earlier result."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    source: tuple[str, int] | None  # ("argument" or "result", its number)


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[[list[Any]], Any]:
    fused = _FusedGraph(graph)

    def run(args: list[Any]) -> Any:
        return fused(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # it frees its arguments as soon as they were read
    return run


class _FusedGraph:
    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self._graph = graph
        self._known: dict[Hashable, tuple[int, list[Any]]] = {}  # by the arguments' sizes: peak, and results

    def __call__(self, args: list[Any]) -> Any:
        tracker, key = MemoryTracker.active, tuple(_described(one) for one in args)
        if tracker is None:
            return torch.fx.Interpreter(self._graph).boxed_run(args)
        if key not in self._known:
            return self._first_run(tracker, key, args)
        spike_bytes, results = self._known[key]
        tracker.spike(spike_bytes)
        return _repeated(results, args)

    def _first_run(self, tracker: MemoryTracker, key: Hashable, args: list[Any]) -> Any:
        storages = [(number, one.untyped_storage()) for number, one in enumerate(args) if isinstance(one, Tensor)]
        alive = weakref.WeakKeyDictionary({storage: number for number, storage in storages})
        del storages
        with tracker.fused_graph() as graph:
            found = torch.fx.Interpreter(self._graph).boxed_run(args)
            tracker.keep(found)
        self._known[key] = graph.spike_bytes, _results(found, alive)
        return found


def _described(one: Any) -> Hashable:
    return (tuple(one.shape), one.dtype) if isinstance(one, Tensor) else one


def _results(found: Sequence[Any], arguments: Mapping[torch.UntypedStorage, int]) -> list[Any]:
    made: dict[torch.UntypedStorage, int] = {}
    results: list[Any] = []
    for number, one in enumerate(found):
        if not isinstance(one, Tensor):
            results.append(one)
            continue
        key = one.untyped_storage()
        source = ("argument", arguments[key]) if key in arguments else ("result", made[key]) if key in made else None
        made.setdefault(key, number)
        results.append(_Result(tuple(one.shape), one.stride(), one.dtype, int(one.storage_offset()), source))
    return results


def _repeated(results: Sequence[Any], args: list[Any]) -> list[Any]:
    arguments, found = list(args), list[Any]()
    kept = {one.source[1] for one in results if isinstance(one, _Result) and one.source and one.source[0] == "argument"}
    for number in range(len(arguments)):
        if number not in kept:
            arguments[number] = None
    args.clear()
    for one in results:
        if not isinstance(one, _Result):
            found.append(one)
        elif one.source is None:
            found.append(torch.empty_strided(one.size, one.stride, dtype=one.dtype))
        else:
            of = {"argument": arguments, "result": found}[one.source[0]][one.source[1]]
            of = of if of.dtype == one.dtype else of.view(one.dtype)
            same = (of.shape, of.stride(), of.storage_offset()) == (one.size, one.stride, one.offset)
            found.append(of if same else of.as_strided(one.size, one.stride, one.offset))
    return found
