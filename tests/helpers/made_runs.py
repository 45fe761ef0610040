"""Run folders made without training, by the writers of real ones: small for tests, large for benchmarks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import copy

import msgspec
import numpy as np
import tokenizers
import yaml
from msgspec import Struct
from tokenizers.models import WordLevel

from llamarl.config import Config
from llamarl.config.file import parse_config
from llamarl.controller.ledger import Closed, Dropped, Issued, Opened, Passed, Trained, Visible
from llamarl.observe.rollout_log import ROLLOUTS, SavedGroup
from llamarl.observe.run_folder import RunFolder
from llamarl.observe.run_lock import LOCK, Owner
from llamarl.observe.span_rows import SpanRows
from llamarl.observe.starts import Starts
from llamarl.observe.summary import Summary
from llamarl.observe.timeline import Span
from llamarl.types import (
    Completion,
    Given,
    Problem,
    PromptGroup,
    Rollout,
    RolloutGroup,
    VersionRun,
    bytes_to_floats,
    tokens_to_bytes,
)

REASON = "scorer timed out after 5 s"
FOLD_EVERY = 200  # updates; a real job folds its ledger with every snapshot
Texts = Callable[[int, int], Sequence[int]]  # ordinal and sample -> tokens of the answer


class Shape(Struct, frozen=True, kw_only=True):
    """What a made run holds."""

    updates: int = 6
    groups: int = 4  # groups per update
    samples: int = 4
    tokens: int = 12  # mean tokens of an answer
    update_s: float = 2.0
    planned: int = 0  # updates that the job was to make; 0: as many as were made
    finished: bool = True
    deaths: bool = False  # whether an executor dies in the middle
    dropped: bool = False  # whether each update drops a group
    seed: int = 0
    settings: dict[str, dict[str, object]] = {}


def make_run(
    path: Path, shape: Shape, *, model: Path | None = None, texts: Texts | None = None, prompt: str = ""
) -> Path:
    """Write a run folder. `texts` gives the tokens of answers, for a `model` folder with a tokenizer of its own."""
    config = _config(shape, model)
    folder = RunFolder.create(path, settings=config.observe, updates=config.schedule.updates)
    folder.write_config(yaml.safe_dump(msgspec.to_builtins(config)))
    Starts(path).add(config, run=0, version=0, at="2026-11-16T09:00:00+00:00")
    copy(config.model_folder / "tokenizer.json", path / ROLLOUTS)
    _Writer(folder, config, shape, texts, prompt).write()
    folder.close()
    if not shape.finished:
        (path / LOCK).write_bytes(msgspec.json.encode(Owner(socket.gethostname(), 2**22 + 1, "gone")))
    return path


def make_live(path: Path) -> None:
    """Let this process be the owner of the folder, as if it trained."""
    (path / LOCK).write_bytes(msgspec.json.encode(Owner(socket.gethostname(), os.getpid(), "made")))


def make_tokenizer(folder: Path, words: Sequence[str]) -> Path:
    """A tokenizer whose tokens are these words; its text puts spaces between them."""
    folder.mkdir(parents=True)
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizers.Tokenizer(WordLevel(vocabulary, unk_token=words[0])).save(str(folder / "tokenizer.json"))
    return folder


def _config(shape: Shape, model: Path | None) -> Config:
    settings: dict[str, dict[str, object]] = {name: dict(section) for name, section in shape.settings.items()}
    settings.setdefault("schedule", {}).update(
        updates=shape.planned or shape.updates, groups_per_update=shape.groups, samples_per_group=shape.samples
    )
    settings.setdefault("generator", {}).setdefault("max_new_tokens", 4 * shape.tokens)
    settings.setdefault("trainer", {}).setdefault("warmup_updates", 1)
    if model is not None:
        settings["model"] = {"path": str(model)}
    return parse_config(settings)


class _Writer:
    def __init__(self, folder: RunFolder, config: Config, shape: Shape, texts: Texts | None, prompt: str) -> None:
        self._folder, self._config, self._shape = folder, config, shape
        self._texts, self._prompt = texts, prompt
        self._random = np.random.default_rng(shape.seed)
        self._spans = SpanRows(folder.spans, 0, 0.0, config.observe.spans_mb)

    def write(self) -> None:
        shape, folder = self._shape, self._folder
        folder.timings.append_json({"start": 0, "from_version": 0, "unix_s": 1794819600.0})
        folder.ledger.append(Opened((shape.planned or shape.updates) * shape.groups, shape.groups))
        folder.ledger.append(Visible(0))
        folder.evaluations.append_json({"version": 0, "accuracy": 0.25})
        for update in range(shape.updates):
            self._update(update)
        if shape.finished:
            folder.ledger.append(Closed("finished"))
            folder.write_summary(self._summary())
        folder.ledger.sync()

    def _update(self, update: int) -> None:
        shape, folder = self._shape, self._folder
        at_s = (update + 1) * shape.update_s
        ordinals = range(update * shape.groups, (update + 1) * shape.groups)
        dropped = {ordinals[-1]} if shape.dropped else set[int]()
        groups = [self._group(ordinal, update) for ordinal in ordinals]
        for group in groups:
            self._record(group, update, group.ordinal in dropped)
        kept = [group for group in groups if group.ordinal not in dropped]
        self._keep(update, groups, dict.fromkeys(dropped, REASON))
        folder.metrics.add(update, "trainer", self._metrics(update, kept))
        timing = {"update": update, "at_s": at_s, "update_s": shape.update_s, "compute_s": 0.8 * shape.update_s}
        folder.timings.append_json(timing)
        self._work(update, at_s)
        folder.ledger.append(Trained(update, tuple(o for o in ordinals if o not in dropped), tuple(sorted(dropped))))
        folder.ledger.append(Visible(update + 1))
        if shape.deaths and update == shape.updates // 2:
            row = {"executor": "generator/0", "at_s": at_s - 0.3, "died": "killed by signal 9"}
            folder.timings.append_json(row)
            folder.timings.append_json({"executor": "generator/0", "at_s": at_s - 0.1, "restarted": True})
        if (update + 1) % max(1, shape.updates // 5) == 0:
            folder.evaluations.append_json(
                {"version": update + 1, "accuracy": 0.25 + 0.6 * (update + 1) / shape.updates}
            )
            folder.timings.append_json({"snapshot": update + 1, "at_s": at_s})
        if (update + 1) % FOLD_EVERY == 0:
            folder.ledger.fold(update + 1 - FOLD_EVERY)

    def _group(self, ordinal: int, update: int) -> RolloutGroup:
        shape = self._shape
        left, right = (int(number) for number in self._random.integers(0, 99, 2))
        asked = self._prompt or f"{left}+{right}="
        problem = Problem(asked, str(left + right), scorer="exact")
        prompt_tokens = [1, 2, 3] if self._texts else [1 + int(c) if c.isdigit() else 0 for c in asked]
        prompt = PromptGroup(ordinal, problem, tokens_to_bytes(prompt_tokens), self._config.training_sampling)
        right_share = 0.2 + 0.7 * update / max(1, shape.updates)
        rollouts = [self._rollout(ordinal, sample, update, right_share) for sample in range(shape.samples)]
        return RolloutGroup(prompt, tuple(rollouts))

    def _rollout(self, ordinal: int, sample: int, update: int, right_share: float) -> Rollout:
        if self._texts is not None:
            tokens = np.asarray(self._texts(ordinal, sample), dtype="<i4")
        else:
            count = 1 + int(self._random.poisson(self._shape.tokens - 1))
            tokens = self._random.integers(1, 10, count).astype("<i4")
        count = len(tokens)
        given = (Given(count // 2, 1),) if self._texts is not None and count > 4 else ()
        sampled = count - len(given)
        logprobs = -self._random.exponential(0.4, sampled).astype("<f4")
        first = max(0, update - 1)
        runs = (VersionRun(first, sampled - sampled // 3), VersionRun(update, sampled // 3))
        versions = tuple(run for run in runs if run.count)
        completion = Completion(tokens.tobytes(), logprobs.tobytes(), versions, sample == 3, given)
        return Rollout(completion, float(self._random.random() < right_share))

    def _record(self, group: RolloutGroup, update: int, dropped: bool) -> None:
        ledger, ordinal, first = self._folder.ledger, group.ordinal, max(0, update - 1)
        ledger.append(Issued(ordinal, "generator/0", first))
        tokens = sum(rollout.completion.num_tokens for rollout in group.rollouts)
        mean = sum(group.rewards) / len(group.rewards)
        ledger.append(Passed(ordinal, "generated", tokens, first, update, 0.0))
        if dropped:
            ledger.append(Dropped(ordinal, REASON))
        else:
            ledger.append(Passed(ordinal, "scored", tokens, first, update, mean))

    def _keep(self, update: int, groups: Sequence[RolloutGroup], dropped: Mapping[int, str]) -> None:
        rows = []
        for group in groups:
            logprobs = []
            for rollout in group.rollouts:
                behavior = bytes_to_floats(rollout.completion.behavior_logprobs)
                moved = behavior + self._random.normal(0, 0.1, len(behavior)).astype("<f4")
                logprobs.append(np.minimum(moved, 0.0).astype("<f4").tobytes())
            rows.append(SavedGroup(update, group, tuple(logprobs), dropped.get(group.ordinal, "")))
        self._folder.rollouts.add(update, len(groups), rows)

    def _metrics(self, update: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        lengths = [rollout.completion.num_tokens for rollout in rollouts]
        noise = float(self._random.normal(0, 0.02))
        return {
            "trained_tokens": float(sum(lengths)) * 0.6,
            "effective_sample_size": 0.97 + noise / 4,
            "clipped_share": abs(noise) / 4,
            "entropy": 0.5 - 0.3 * update / max(1, self._shape.updates) + noise,
            "kl_behavior": 0.01 + abs(noise) / 5,
            "logprob_gap": 0.002 + abs(noise) / 50,
            "staleness_mean": 0.95,
            "staleness_max": 1.0,
            "groups": float(len(groups)),
            "completions": float(len(rollouts)),
            "reward": sum(rollout.reward for rollout in rollouts) / max(1, len(rollouts)),
            "zero_variance_share": sum(len(set(group.rewards)) == 1 for group in groups) / max(1, len(groups)),
            "answer_tokens": sum(lengths) / max(1, len(lengths)),
            "truncated_share": sum(one.completion.truncated for one in rollouts) / max(1, len(rollouts)),
            "loss": -0.05 + noise,
            "grad_norm": 5.0 + 20 * abs(noise),
            "lr": 1e-5,
            "skipped": 0.0,
        }

    def _work(self, update: int, at_s: float) -> None:
        length = self._shape.update_s
        start = at_s - length
        pieces = 20
        slices = [
            Span("work", "slice", start + length * n / pieces, start + length * (n + 0.7) / pieces)
            for n in range(pieces)
        ]
        self._spans.add(
            "generator/0", [*slices[:-1], Span("weights", "LoadWeights", at_s - length / 25, at_s - length / 40)]
        )
        self._spans.add("reward/0", [Span("work", "WorkOnGroup", start + length / 2, start + length * 0.52)])
        busy = Span("work", "WorkOnBatch", start + length * 0.05, start + length * 0.85)
        self._spans.add("trainer/0", [busy, Span("weights", "PublishWeights", busy.end_s, busy.end_s + length / 50)])
        self._spans.flush()

    def _summary(self) -> Summary:
        shape = self._shape
        return Summary(
            outcome="finished",
            eval_before=0.25,
            eval_after=0.85,
            updates=shape.updates,
            groups_trained=shape.updates * shape.groups,
            groups_dropped=shape.updates * shape.dropped,
            skipped=0,
            staleness_mean=0.95,
            staleness_max=1,
            reward_first=0.2,
            reward_last=0.9,
            idle_share={"generator": 0.3, "reward": 0.98, "trainer": 0.18},
            started_at=1794819600.0,
            wall_s=shape.updates * shape.update_s,
            train_s=shape.updates * shape.update_s,
            tokens_generated=shape.updates * shape.groups * shape.samples * shape.tokens,
            tokens_trained=shape.updates * shape.groups * shape.samples * shape.tokens // 2,
            restarts=int(shape.deaths),
            policy="",
        )
