"""torch's compiler takes seconds to import, in which nothing is computed: time to load weights and to publish them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from llamarl.model.gpu_paths import compile_backend
from llamarl.processes import imports_undisturbed


@cache
def import_beside() -> Future[ModuleType]:
    """Begin to import the compiler in a thread. Whoever needs it first waits for that. Its first half is imported at once,
    unless the fork server has it: the thread that loads weights may ask for it, and of a module that two threads import
    either may see half."""
    with imports_undisturbed():
        import_module("torch._dynamo")
    pool = ThreadPoolExecutor(1, "compiler")
    imported = pool.submit(_import)
    pool.shutdown(wait=False)
    return imported


def _import() -> ModuleType:
    with imports_undisturbed():
        return import_module("torch._inductor.compile_fx")


def compiled_when_called(function: Callable[..., Any], *, dynamic: bool | None) -> Callable[..., Any]:
    """The function, compiled at its first call: `torch.compile` itself would wait for the compiler to be imported."""
    made: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        if made is None:
            backend = compile_backend()
            if backend == "inductor":
                import_beside().result()
            made = torch.compile(function, backend=backend, dynamic=dynamic)
        return made(*args, **kwargs)

    return call
