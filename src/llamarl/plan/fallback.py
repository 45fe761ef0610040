"""What is tried where nothing fits as asked: narrower weights and replicas over two hosts, then optimizer state in host
memory, and at last a mere baseline."""

from __future__ import annotations

from msgspec.structs import replace

from llamarl.machine import GIB
from llamarl.plan.search import Plan, Space, best_sync, near_async
from llamarl.plan.terms import weight_bytes
from llamarl.plan.workload import Question

_HOSTS = 2  # hosts that a replica may span where a model does not fit otherwise


def widened(question: Question) -> Question:
    """The same question with further precisions, and replicas over two hosts."""
    further = tuple(name for name in question.fallbacks if question.saves_memory(name))
    return replace(question, precisions=(*question.precisions, *further), fallbacks=(), hosts=_HOSTS)


def sync_plan(question: Question) -> Plan | None:
    """The best co-located plan: as asked, else widened, else a baseline that no builder accepts, over any hosts."""
    if plan := best_sync(question):
        return plan
    least_bytes, wider = Space(question).least_sync_bytes(), widened(question)
    if least_bytes <= question.memory_bytes:
        return None  # memory is not what is missing
    anyhow = replace(wider, hosts=-(-question.gpus // question.gpu.gpus_per_host), copied_heads=True)
    plan = best_sync(wider) or best_sync(offloaded(wider)) or best_sync(anyhow)
    return replace(plan, note=_why(plan, question, least_bytes)) if plan else None


def async_plan(question: Question) -> Plan | None:
    """The best asynchronous plan: as asked, else widened."""
    return next(iter(async_plans(question)), None)


def async_plans(question: Question) -> list[Plan]:
    """The best asynchronous plan, and those that are nearly as good (see `near_async`): as asked, else widened."""
    if plans := near_async(question):
        return plans
    if question.gpus == 1 and question.lora:
        return _narrow_base_plans(question)
    least_bytes, wider = Space(question).least_async_bytes(), widened(question)
    if least_bytes <= question.memory_bytes:
        return []
    plans = near_async(wider) or near_async(offloaded(wider))
    return [replace(plan, note=_why(plan, question, least_bytes)) for plan in plans]


def _narrow_base_plans(question: Question) -> list[Plan]:
    """The plan of one GPU with adapters on a base in fp8, where a wide base does not fit."""
    possible = question.can_hold("fp8", 1) and not question.shape.experts
    if question.has_narrow_base or "fp8" not in question.fallbacks or not possible:
        return []
    wide, room = weight_bytes(question.shape, "bf16") / GIB, question.memory_bytes / GIB
    why = f"a base in fp8: in bf16 it takes {wide:.0f} GiB of {room:.0f}"
    return [replace(plan, note=why) for plan in near_async(narrow_base(question))]


def offloaded(question: Question) -> Question:
    """The same question, whose optimizer state may be in host memory between updates."""
    return replace(question, offload=not question.gpu.is_cpu)


def narrow_base(question: Question) -> Question:
    return replace(question, base="fp8", precisions=("fp8",), fallbacks=())


def _why(plan: Plan, question: Question, least_bytes: float) -> str:
    """What was chosen, and how much memory the question as asked would take."""
    replica, beside = plan.generators.replica, " beside the trainer" if plan.colocated else ""
    hosts = -(-replica.tp // question.gpu.gpus_per_host)
    over = f" over {hosts} hosts" if hosts > 1 else ""
    needs = f"{least_bytes / GIB:.0f} GiB of {question.memory_bytes / GIB:.0f}{beside}"
    why = (
        f"generators in {replica.precision}{over}: {' or '.join(question.precisions)} inside a host would need {needs}"
    )
    if plan.trainers.ranks.offload:
        host = plan.trainers.ranks.host_bytes / GIB
        why = f"optimizer state in host memory ({host:.0f} GiB for each GPU), {why}"
    if plan.can_be_built:
        return why
    heads = replica.shape.num_kv_heads
    return f"{why}. Only a baseline, which cannot be built: {replica.tp} ranks cannot share {heads} key-value heads"
