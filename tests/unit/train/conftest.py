"""What compiles in tests of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._dynamo
from torch._dynamo.utils import counters

from llamarl.train import compiler, lm_head, optimizer


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced and differentiated as for a GPU, but run by plain PyTorch: no C++ compiler, and seconds instead of minutes."""
    for module in (compiler, lm_head, optimizer):
        monkeypatch.setattr(module, "compile_backend", lambda: "aot_eager")
    _forget()
    yield
    generated = dict(counters["inductor"])
    _forget()
    assert not generated, "something was compiled by another backend"


def _forget() -> None:
    lm_head._compiled.cache_clear()
    optimizer._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
