"""The answer when no plan fits: how much memory is missing, and what would fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from msgspec.structs import replace

from llamarl.machine import GIB
from llamarl.plan.gpus import GPUS
from llamarl.plan.search import Space
from llamarl.plan.workload import Question

_MORE = 32  # times the GPUs that are there


def why_nothing_fits(question: Question) -> str:
    """One line with the least memory that each role needs, and changes that would make the job fit."""
    room = question.memory_bytes / GIB
    return (
        f"nothing fits: of {room:.0f} GiB on each of {question.gpus} {question.gpu.name}, {_least(question)}. "
        f"{_what_would(question)}"
    )


def _least(question: Question) -> str:
    train, generate = (min(found) for found in zip(*_needs(question), strict=True))
    return f"training needs at least {train / GIB:.0f} GiB and generating {generate / GIB:.0f} GiB"


def _needs(question: Question) -> Iterator[tuple[float, float]]:
    """Yield the least bytes of a trainer and of a generator: first with both on all GPUs, then for every split."""
    space = Space(question)
    for trainer_gpus, generator_gpus in [
        (question.gpus, question.gpus),
        *((n, question.gpus - n) for n in space.splits),
    ]:
        yield space.least_trainer_bytes(trainer_gpus), space.least_generator_bytes(generator_gpus)


def _fits(question: Question) -> bool:
    space = Space(question)
    return space.fits(space.least_sync_bytes()) or space.fits(space.least_async_bytes())


def _what_would(question: Question) -> str:
    found = [name for name, other in _changes(question) if _fits(other)][:3]
    if more := _fewest_gpus(question):
        found = [*found[:2], f"{more} GPUs"]
    return f"Would fit: {'; '.join(found)}" if found else "Shorter answers, or a smaller model, might fit"


def _changes(question: Question) -> list[tuple[str, Question]]:
    larger = [
        (f"{question.gpus} {gpu.name}", replace(question, gpu=gpu))
        for gpu in sorted(GPUS.values(), key=lambda one: one.memory_gib)
        if gpu.memory_gib > question.gpu.memory_gib and not question.gpu.is_cpu
    ]
    others = [
        (f"generators in {name}", replace(question, precisions=(name,)))
        for name in ("bf16", "fp8")
        if name in question.gpu.precisions and name not in question.precisions
        if name == "bf16" or question.saves_memory(name)
    ]
    return [*others, *larger]


def _fewest_gpus(question: Question) -> int:
    """The fewest GPUs that would hold the job, in whole hosts where it takes several; 0: more than `_MORE` times as many."""
    host = question.gpu.gpus_per_host
    if question.gpus < host and _fits(replace(question, gpus=host)):
        grain, last = 1, host
    else:
        grain, last = host, _MORE * question.gpus // host
        if not last or not _fits(replace(question, gpus=last * host)):
            return 0
    first = question.gpus // grain + 1
    index = bisect_left(range(first, last), True, key=lambda count: _fits(replace(question, gpus=count * grain)))
    return (first + index) * grain
