"""Recognizes executors that died for lack of memory, and names the settings that help."""

from __future__ import annotations

from llamarl.controller.line import role_of

KILLED = "killed by SIGKILL"
_SIGNS = (
    "outofmemoryerror",
    "memoryerror",
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
)
_REMEDIES = {
    "generator": "lower generator.slots, generator.kv_pages or generator.max_new_tokens",
    "trainer": "lower trainer.tokens_per_pack, or set trainer.recompute=full, trainer.offload=true or, for sequences too "
    "long for one GPU, trainer.context",
    "reference": "lower trainer.tokens_per_pack, or set reference.place=trainer",
    "reward": "lower reward.workers or reward.memory_mb",
    "reward_model": "lower schedule.samples_per_group, or set reward_model.dtype=bfloat16",
}


def is_out_of_memory(reason: str) -> bool:
    """Whether this text is how torch, Python or the kernel say that there is no memory left."""
    return any(sign in reason.lower() for sign in _SIGNS)


def explain_death(executor: str, reason: str, *, killed_for_memory: bool) -> str:
    """The reason of a death; for a lack of memory, with the settings to lower."""
    if not is_out_of_memory(reason) and not (killed_for_memory and reason == KILLED):
        return reason
    remedy = _REMEDIES.get(role_of(executor), "lower what it holds")
    cause = "killed by the kernel" if reason == KILLED else reason
    return f"out of memory: {remedy} ({cause})"
