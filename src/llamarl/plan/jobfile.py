"""Writes a plan as job settings for `llamarl train` and `llamarl simulate`."""

from __future__ import annotations

from typing import Any

import yaml

from llamarl.plan.search import Plan
from llamarl.plan.workload import Question

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def job_settings(plan: Plan, question: Question) -> dict[str, Any]:
    """The settings that the plan decides; all others are the user's."""
    work, trainer, replica = question.work, plan.trainers.ranks, plan.generators.replica
    narrow = bool(question.lora) and trainer.base == "fp8"
    targets = {} if question.lora.targets == "all" else {"targets": question.lora.targets}
    adapters = {"lora": {"rank": question.lora.rank, **targets}, **({"base": "fp8"} if narrow else {})}
    return {
        **({"model": adapters} if question.lora else {}),
        "placement": "colocated" if plan.colocated else "split",
        "generator": {
            "replicas": int(plan.generators.replicas),
            "tensor": replica.tp,
            **({"expert": replica.expert} if replica.expert > 1 else {}),
            "dtype": DTYPES.get(replica.precision, "bfloat16"),
            "quantize": "fp8" if replica.precision == "fp8" and not narrow else "none",
            "slots": replica.slots,
            "max_prompt_tokens": work.prompt,
            "max_new_tokens": work.answers.longest,
        },
        "trainer": {
            "replicate": trainer.replicate,
            "data": trainer.data,
            "context": trainer.context,
            "tensor": trainer.tp,
            **({"expert": trainer.expert} if trainer.expert > 1 else {}),
            "dtype": DTYPES[trainer.precision],
            "recompute": trainer.recompute,
            "tokens_per_pack": trainer.tokens_per_pack,
            **({"offload": True} if trainer.offload else {}),
            **({} if work.share_prompts else {"share_prompts": "off"}),
        },
        "schedule": {
            "groups_per_update": work.groups,
            "samples_per_group": work.samples,
            "max_staleness": plan.max_staleness,
        },
    }


def merged(base: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
    """The user's settings, overridden by the plan's section by section."""
    sections = {
        name: {**base.get(name, {}), **value} if isinstance(value, dict) else value for name, value in planned.items()
    }
    found = {**base, **sections}
    if "share_prompts" not in planned["trainer"] and found["trainer"].get("share_prompts") in ("off", False):
        found["trainer"]["share_prompts"] = "auto"  # the plan shares
    return found


def job_yaml(settings: dict[str, Any], head: str) -> str:
    """The settings as YAML, with `head` as a comment on top."""
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + yaml.safe_dump(settings, sort_keys=False)
