"""CUDA graphs, one for each shape of a computation. On a CPU the computation itself runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

import torch

Body = Callable[[], object]
_WORTH = 16  # uses after which a capture pays; it takes as long as about ten bursts, and everything waits for it


class Graphs:
    """Captures each computation once, when first needed. All graphs share one memory pool, since they never overlap."""

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._wanted: Counter[Hashable] = Counter()
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def worth(self, key: Hashable) -> bool:
        """Whether this shape has been asked for often enough that its capture pays. Rare shapes, as when a job starts or
        ends, then never hold up the others."""
        self._wanted[key] += 1
        return not self.enabled or key in self._captured or self._wanted[key] > _WORTH

    def of(self, key: Hashable, body: Body, blank: Body) -> Body:
        """A function that runs the body, captured on first use. Inputs must be tensors that stay in place; `blank` sets them
        so that the run of the capture changes nothing."""
        if not self.enabled:
            return body
        if key not in self._captured:
            blank()
            self._captured[key] = self._capture(body)
        return self._captured[key].replay

    def _capture(self, body: Body) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            body()  # compiles kernels and lets libraries choose theirs, which is impossible during a capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            body()
        return graph
