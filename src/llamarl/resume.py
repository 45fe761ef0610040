"""Going on with a run: which settings may differ, and what is still there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llamarl.config import Config
from llamarl.controller.events import Began, Resumed
from llamarl.controller.ledger import Passed, Record, read_ledger
from llamarl.controller.recovery import resumption
from llamarl.engine.snapshots import Snapshots
from llamarl.engine.store import GroupStore
from llamarl.errors import ConfigError, InputError
from llamarl.model.training_state import POLICY, keeps_policy_only
from llamarl.observe.run_folder import EVALUATIONS, GROUPS, LEDGER, METRICS, SNAPSHOTS, read_rows
from llamarl.segments import segment_files

# These change where and how fast a run goes on, not what it means.
FREE = (
    "engine",
    "placement",
    "observe",
    "snapshots",
    "weights",
    "generator.replicas",
    "generator.device",
    "generator.tensor",
    "generator.kv_pages",
    "generator.burst",
    "generator.threads",
    "trainer.device",
    "trainer.threads",
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
    "conversation.workers",
    "conversation.timeout_s",
    "conversation.memory_mb",
    "conversation.retries",
    "conversation.max_failure_share",
    "schedule.max_restarts",
    "schedule.max_attempts",
    "schedule.max_skipped",
)


class Recovered(Struct, frozen=True):
    """What a run folder still holds, as of its newest whole snapshot."""

    version: int
    problems: tuple[str, ...]  # newer snapshots that cannot be used, and why
    begin: Began | Resumed
    store: GroupStore
    metrics: tuple[dict[str, Any], ...]  # of the updates that count
    evaluations: dict[int, float]
    tokens_generated: int


def recover(folder: Path, config: Config, settled_state: str) -> Recovered:
    version, problems = Snapshots(folder / SNAPSHOTS, config.snapshots.keep).newest_whole()
    records: list[Record] = list(read_ledger(folder / LEDGER)) if segment_files(folder / LEDGER) else []
    store = GroupStore(folder / GROUPS)
    evaluated = {
        row["version"]: row["accuracy"] for row in read_rows(folder / EVALUATIONS) if row["version"] <= version
    }
    begin: Began | Resumed = Began()  # killed before anything was on disk
    needed: tuple[int, ...] = ()
    if records:
        begin = resumption(records, store.scored, version, sorted(evaluated), settled_state)
        needed = begin.settled + tuple(ordinal for batch in begin.batches for ordinal in batch)
    store.keep_only(needed)
    tokens = {record.ordinal: record.num_tokens for record in records if isinstance(record, Passed)}
    return Recovered(
        version=version,
        problems=tuple(problems),
        begin=begin,
        store=store,
        metrics=tuple(row for row in read_rows(folder / METRICS) if row["update"] < version),
        evaluations=evaluated,
        tokens_generated=sum(tokens.values()),
    )


def refuse_ended(folder: Path) -> None:
    """A run that kept its policy alone has nothing to go on from."""
    snapshots = Snapshots(folder / SNAPSHOTS, keep=1)
    for version in snapshots.versions()[-1:]:
        if keeps_policy_only(snapshots.path(version)):
            raise InputError(
                f"--resume: {folder} ended after update {version} and kept its policy only (snapshots.at_end=policy); "
                f"a new run can begin with it: model.path={snapshots.path(version) / POLICY}"
            )


def refuse_other_meaning(before: Config, now: Config) -> None:
    """A resumed run must be the same run: settings that would change what it means are refused by name."""
    old, new = _flat(msgspec.to_builtins(before)), _flat(msgspec.to_builtins(now))
    for key, value in new.items():
        free = any(key == prefix or key.startswith(f"{prefix}.") for prefix in FREE)
        if not free and old.get(key) != value:
            raise ConfigError(
                f"--resume: {key} was {old.get(key)!r} and is now {value!r}, which would make it another run; "
                "leave it, or start a new one"
            )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
