"""Which settings may change when a run is resumed."""

from __future__ import annotations

from llamarl.config import Config, ScheduleConfig
from llamarl.config.flat import flat_settings
from llamarl.errors import ConfigError

# These change where and how fast a run goes on, what is recorded of it, or how it learns from here on. docs/durability.md has
# the same list.
FREE = (
    "engine",
    "placement",
    "observe",
    "snapshots",
    "evaluate",
    "weights",
    "generator.replicas",
    "generator.device",
    "generator.tensor",
    "generator.expert",
    "generator.slots",
    "generator.kv_pages",
    "generator.burst",
    "generator.prefill_tokens",
    "generator.prefill_beside",
    "generator.draft",
    "generator.threads",
    "trainer.lr",
    "trainer.final_lr_share",
    "trainer.replicate",
    "trainer.data",
    "trainer.context",
    "trainer.tensor",
    "trainer.expert",
    "trainer.tokens_per_pack",
    "trainer.share_prompts",
    "trainer.cudnn_from",
    "trainer.recompute",
    "trainer.compile",
    "trainer.offload",
    "trainer.device",
    "trainer.threads",
    "reference.data",
    "reference.tensor",
    "reference.device",
    "reference.threads",
    "critic.lr",
    "critic.data",
    "critic.tensor",
    "critic.device",
    "critic.threads",
    "sft.epochs",
    "teacher.offload",
    "teacher.data",
    "teacher.tensor",
    "teacher.device",
    "teacher.threads",
    "reward.workers",
    "reward.trusted",
    "reward.concurrency",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.retries",
    "reward.max_failure_share",
    "reward_model.device",
    "reward_model.threads",
    "llm_judge.url",
    "llm_judge.key_env",
    "llm_judge.timeout_s",
    "llm_judge.retries",
    "agent.workers",
    "agent.replicas",
    "agent.timeout_s",
    "agent.memory_mb",
    "agent.retries",
    "agent.max_failure_share",
    "conversation.workers",
    "conversation.timeout_s",
    "conversation.memory_mb",
    "conversation.retries",
    "conversation.max_failure_share",
    "schedule.max_restarts",
    "schedule.max_attempts",
    "schedule.max_skipped",
    "schedule.updates",
)


def describe_changes(before: Config, now: Config) -> list[str]:
    """One line for each setting that changed. Changes that would make it another run are refused, all in one line."""
    old, new = flat_settings(before), flat_settings(now)
    changed = [key for key in [*sorted(old.keys() - new.keys()), *new] if old.get(key) != new.get(key)]
    refused = [key for key in changed if not _may_change(key)]
    if refused:
        told = ", ".join(f"{key} was {old.get(key)!r} and is now {new.get(key)!r}" for key in refused)
        raise ConfigError(
            f"--resume: {told}, which would make it another run; "
            f"leave {'it' if len(refused) == 1 else 'them'}, or start a new one"
        )
    return [f"{key}: {old.get(key)!r} so far, {new.get(key)!r} from here on" for key in changed]


def _may_change(key: str) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in FREE)


def refuse_other_length(before: int, schedule: ScheduleConfig, version: int) -> None:
    """Refuse fewer updates than are made already, and more than `before` if the versions that must sample them are gone."""
    if schedule.updates < version:
        raise ConfigError(f"--resume: schedule.updates={schedule.updates}, but {version} updates are already made")
    if schedule.deterministic and schedule.updates > before < version + schedule.max_staleness:
        raise ConfigError(
            f"--resume: schedule.updates={schedule.updates}, but with schedule.deterministic, update {before} is sampled "
            f"by version {before - schedule.max_staleness}, which is gone; it can be made longer before its end, or with "
            "schedule.max_staleness=0"
        )
