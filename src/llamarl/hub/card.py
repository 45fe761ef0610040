"""The card of a pushed model: what it was trained from and on, how, with which results, and what the audit says."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

import llamarl
from llamarl.config import Config
from llamarl.config.file import parse_config, read_config
from llamarl.config.hub_names import parse_hub_name
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import Audit, audit
from llamarl.errors import InputError
from llamarl.observe.rows import read_rows
from llamarl.observe.run_folder import CONFIG, EVALUATIONS, LEDGER, SUMMARY
from llamarl.observe.starts import Starts
from llamarl.observe.summary import Summary
from llamarl.tasks.registry import make_task
from llamarl.tasks.statistics import wilson

ADAPTER = "adapter_config.json"


class RunFacts(Struct, frozen=True):
    """What a run folder says of a run, as far as it is there."""

    config: Config
    version: int  # of the policy that is pushed
    trained_with: str  # version of LlamaRL
    evaluations: list[tuple[int, float]]  # version and score, in order
    num_problems: int  # of an evaluation; 0: unknown
    audit: Audit
    summary: Summary | None


def read_run(run: Path, policy_version: int) -> RunFacts:
    """Read a run folder. The settings are those of its last start."""
    last = Starts(run).last()
    config = parse_config(last.config) if last else read_config(run / CONFIG)
    rows = [row for row in read_rows(run / EVALUATIONS) if row.keys() >= {"version", "accuracy"}]
    summary = None
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        summary = msgspec.json.decode((run / SUMMARY).read_bytes(), type=Summary)
    return RunFacts(
        config=config,
        version=policy_version,
        trained_with=last.llamarl if last else llamarl.__version__,
        evaluations=[(row["version"], row["accuracy"]) for row in rows],
        num_problems=_num_problems(config) if rows else 0,
        audit=audit(read_ledger(run / LEDGER)),
        summary=summary,
    )


def _num_problems(config: Config) -> int:
    """Problems of one evaluation: a small task has fewer than `evaluate.prompts`. 0 if the data are not here any more."""
    with suppress(InputError):
        return len(make_task(config.task, config.seed).evaluation(config.evaluate.prompts, config.evaluate.split))
    return 0


def make_card(name: str, facts: RunFacts, files: Sequence[str], license_name: str = "") -> str:
    """The README.md of a pushed policy or adapter."""
    config = facts.config
    base, data = _shown(config.model.path), _data(config)
    sections = [
        f"# {name.rpartition('/')[2]}",
        f"{'An adapter of' if ADAPTER in files else 'Trained from'} {_link(base)} by {_method(config)} with "
        f"[LlamaRL](https://arxiv.org/abs/2505.24034): version {facts.version}, after as many updates.",
        _section("Results", _results(facts)),
        _section("Data and reward", [f"- data: {data}", f"- reward: `{_reward(config)}`", *_other_streams(config)]),
        _section("Audit", _audit(facts.audit)),
        _section("Settings that differ from the defaults", [_fenced(settings_that_differ(config))]),
        _section("Command", [f"With these settings as `job.yaml`: {_code(f'llamarl {_command(config)} job.yaml')}"]),
        _section("Versions", [f"- {line}" for line in _versions(facts)]),
        _section("License", [_license(license_name, base)]),
    ]
    return f"{_metadata(config, files, license_name)}\n" + "\n\n".join(sections) + "\n"


def settings_that_differ(config: Config) -> str:
    """The settings that are not the defaults, as YAML. Of files and folders only the name is told."""
    found = _different(msgspec.to_builtins(config), msgspec.to_builtins(Config()))
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=False) if found else "{}\n"


def _different(now: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in now.items():
        if isinstance(value, dict) and isinstance(default.get(key), dict) and default[key]:
            if inside := _different(value, default[key]):
                found[key] = inside
        elif value != default.get(key):
            found[key] = _without_folders(value)
    return found


def _without_folders(value: Any) -> Any:
    """The same value with paths cut to their last part: folders of a machine are nobody's business."""
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, dict):
        return {_without_folders(key): _without_folders(inside) for key, inside in value.items()}
    return [_without_folders(inside) for inside in value] if isinstance(value, list) else value


def _shown(text: str) -> str:
    return re.sub(r"^(/|~/|\.\.?/).*/(?=[^/])", "", text)


def _metadata(config: Config, files: Sequence[str], license_name: str) -> str:
    base = parse_hub_name(config.model.path)
    datasets = [found.repo for path in _data_paths(config) if (found := parse_hub_name(path))]
    meta: dict[str, Any] = {
        "library_name": "peft" if ADAPTER in files else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llamarl", *_tags(config)],
    }
    if base:
        meta |= {"base_model": base.repo}
    if datasets:
        meta |= {"datasets": sorted(set(datasets))}
    if license_name:
        meta |= {"license": license_name}
    return f"---\n{yaml.safe_dump(meta, sort_keys=False)}---\n"


def _method(config: Config) -> str:
    """What the policy was trained by, in words."""
    if config.supervised:
        return "supervised fine-tuning"
    taught = ["distillation"] if config.teacher else []
    rewarded = ["reinforcement learning"] if config.algo.reward_weight else []
    return " and ".join([*rewarded, *taught, *(["supervised fine-tuning"] if config.sft else [])])


def _tags(config: Config) -> list[str]:
    named = {"reinforcement learning": "reinforcement-learning", "supervised fine-tuning": "sft"}
    return [named.get(one, one) for one in _method(config).split(" and ")]


def _command(config: Config) -> str:
    return "sft" if config.supervised else "train"


def _other_streams(config: Config) -> list[str]:
    """What was learned from besides rewards."""
    rows = [f"- answers from data: {_link(_shown(config.sft.path), 'datasets/')}"] if config.sft else []
    named = [path for path in (config.teacher.path, *config.teacher.by_name.values(), config.teacher.adapter) if path]
    return [*rows, *(f"- teacher: {_link(_shown(path))}" for path in named)]


def _data_paths(config: Config) -> list[str]:
    of_task = [path for part in (config.task, *config.task.parts) for path in (part.path, part.test_path)]
    return [path for path in (*of_task, config.sft.path) if path]


def _data(config: Config) -> str:
    named = [f"{_link(_shown(path), 'datasets/')}" for path in _data_paths(config)]
    return f"`{config.task.kind}`" + (f", {', '.join(named)}" if named else "")


def _reward(config: Config) -> str:
    return ", ".join(f"{share:g} x {_shown(name)}" for name, share in config.reward.combine.items()) or _shown(
        config.reward.scorer
    )


def _link(path: str, prefix: str = "") -> str:
    name = parse_hub_name(path)
    return f"[{name}](https://huggingface.co/{prefix}{name.repo})" if name else f"`{path}`"


def _results(facts: RunFacts) -> list[str]:
    score, split = facts.config.score_name, facts.config.evaluate.split
    if not facts.evaluations:
        return ["It was not evaluated during training."]
    lines = [f"| version | {score} | 95% interval |", "|---|---|---|"]
    for number, value in facts.evaluations:
        known = score == "accuracy" and facts.num_problems
        low, high = wilson(value * facts.num_problems, facts.num_problems) if known else (0.0, 0.0)
        lines.append(f"| {number} | {value:.3f} | {f'{low:.3f} to {high:.3f}' if known else 'not known'} |")
    asked = f"{facts.num_problems} problems" if facts.num_problems else "problems"
    which = "held out from the training data" if split == "held_out" else "of the task's test split"
    return ["\n".join(lines), "", f"{asked} {which}, each answered once, greedily; intervals are Wilson's."]


def _audit(found: Audit) -> list[str]:
    verdict = (
        "clean" if found.clean else "clean so far, but the run is unfinished" if found.only_unfinished else "NOT clean"
    )
    lines = [
        f"- {verdict}: {found.num_groups} groups, {found.trained} trained exactly once, {found.updates} updates",
        f"- at most {found.max_staleness} versions stale",
    ]
    lines += [f"- {count} dropped: {_code(reason)}" for reason, count in found.dropped.items()]
    return [*lines, f"- digest of what was trained: `{found.digest}`"] if found.digest else lines


def _versions(facts: RunFacts) -> list[str]:
    lines = [f"trained with LlamaRL {facts.trained_with}"]
    if facts.summary is not None and not facts.summary.updates_before:
        lines.append(f"{facts.summary.updates} updates in {facts.summary.wall_s / 60:.1f} minutes")
    here = [f"Python {platform.python_version()}", f"LlamaRL {llamarl.__version__}"]
    for package in ("torch", "tokenizers", "huggingface_hub"):
        with suppress(PackageNotFoundError):
            here.append(f"{package} {version(package)}")
    return [*lines, f"pushed with {', '.join(here)}"]


def _license(name: str, base: str) -> str:
    return f"{name}, that of {_link(base)}." if name else f"That of {_link(base)}, which is not known here."


def _section(title: str, lines: Sequence[str]) -> str:
    return f"## {title}\n\n" + "\n".join(lines)


def _code(text: str) -> str:
    """Text of anybody as code in one line."""
    plain = " ".join(text.split()).replace("`", "'")
    return f"`{''.join(char if char.isprintable() else ascii(char)[1:-1] for char in plain)}`"


def _fenced(text: str) -> str:
    """A block of text, in a fence that nothing inside can close."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}yaml\n{text}{fence}"
