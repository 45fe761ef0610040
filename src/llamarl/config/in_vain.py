"""Settings that nothing would read: they are refused, so that nobody believes that they have taken effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import fields

from llamarl.config.algo import AlgoConfig
from llamarl.config.lora import LoraConfig
from llamarl.config.section import OwnRanks, Section, changed_settings
from llamarl.config.task import DatasetConfig
from llamarl.errors import ConfigError
from llamarl.plugins import is_reference

if TYPE_CHECKING:
    from llamarl.config.job import Config


class _Rule(Struct, frozen=True):
    """Settings of a section that are read only where something else is set. No names: all settings of the section."""

    section: str
    read: Callable[[Config], bool]
    otherwise: str
    names: Sequence[str] = ()


_RANKS = tuple(one.name for one in fields(OwnRanks))
_PLACED = "with {0}.place=trainer; set it to own"
_RULES = (
    _Rule("reference", lambda job: job.algo.reference_kl > 0, "without a KL term; set algo.reference_kl"),
    _Rule("reference", lambda job: job.reference.place == "own", _PLACED.format("reference"), _RANKS),
    _Rule("reward_model", lambda job: bool(job.reward_model.path), "without a model; set reward_model.path"),
    _Rule("conversation", lambda job: bool(job.conversation.tool), "without a tool; set conversation.tool"),
    _Rule("agent", lambda job: bool(job.agent), "without an agent; set agent.run, agent.command or agent.environment"),
    _Rule("agent", lambda job: bool(job.agent.environment), "without agent.environment", ("max_turns",)),
    _Rule("sft", lambda job: bool(job.sft), "without data; set sft.path"),
    _Rule("teacher", lambda job: bool(job.teacher), "without a teacher; set teacher.path"),
    _Rule("teacher", lambda job: job.teacher.place == "own", _PLACED.format("teacher"), _RANKS),
    _Rule("critic", lambda job: job.has_critic, "without a critic; set algo.advantage to gae"),
    _Rule("critic", lambda job: job.critic.place == "own", _PLACED.format("critic"), _RANKS),
    _Rule(
        "algo",
        lambda job: job.has_critic,
        "without a critic; set algo.advantage to gae",
        ("gamma", "gae_lambda", "whiten"),
    ),
    _Rule(
        "algo", lambda job: job.algo.overlong == "penalize", "unless algo.overlong is penalize", ("overlong_penalty",)
    ),
    _Rule("task", lambda job: job.task.curriculum, "without task.curriculum=true", ("solved_from", "hard_up_to")),
    _Rule("llm_judge", lambda job: _scored_by(job, "llm_judge"), "without reward.scorer=llm_judge"),
    _Rule("reward", lambda job: _scored_by(job, "regex"), "without reward.scorer=regex", ("pattern",)),
    _Rule("reward", lambda job: _scored_by(job, "format"), "without reward.scorer=format", ("format",)),
    _Rule("reward", lambda job: _scored_by(job, "length"), "without reward.scorer=length", ("max_chars",)),
    _Rule("reward", lambda job: _scored_by(job, "code", "auto"), "without reward.scorer=code", ("tests",)),
    _Rule(
        "reward",
        lambda job: _scored_by(job, "numeric", "math", "reasoning_gym", "auto"),
        "without a scorer that reads numbers: numeric, math or reasoning_gym",
        ("answer_from",),
    ),
    _Rule(
        "reward",
        lambda job: _scored_by(job, "auto") or any(map(is_reference, job.reward.scorers)),
        "without a scorer of your own, as FILE.py:FUNCTION",
        ("concurrency",),
    ),
    _Rule(
        "engine",
        lambda job: job.engine.kind == "monarch",
        "on one machine; set engine=monarch",
        ("hosts", "join", "certs", "host_s", "trusted_network"),
    ),
)

_LOSSES = {
    "rho": ("aipo",),
    "clip_low": ("ppo", "grpo"),
    "clip_high": ("ppo", "grpo"),
    "cispo_high": ("cispo",),
    "gspo_low": ("gspo",),
    "gspo_high": ("gspo",),
}  # that read these clips

_FILES = ("gsm8k", "math", "svamp", "dataset", "jsonl", "code")
_KINDS = {
    "max_operand": ("arithmetic",),
    "size": ("reasoning_gym", "verifiers"),
    "prompt_field": ("dataset", "jsonl", "code"),
    "answer_field": ("dataset", "jsonl", "code"),
    "solution_field": ("dataset", "jsonl", "code"),
    "config": _FILES,
    "split": _FILES,
    "test_split": _FILES,
}  # of tasks that read these settings


def refuse_settings_in_vain(config: Config) -> None:
    """ConfigError for the first setting that was changed and that this job would not read."""
    for rule in _RULES:
        if not rule.read(config):
            _refuse(rule.section, getattr(config, rule.section), rule.names, rule.otherwise)
    _refuse_lora(config.model.lora)
    _refuse_clips(config.algo)
    _refuse_of_other_kinds("task", config.task)
    for part in config.task.parts:
        _refuse_of_other_kinds("task.parts", part)


def _scored_by(config: Config, *names: str) -> bool:
    return not config.reward.scorers.isdisjoint(names)


def _refuse(section: str, settings: Section, names: Sequence[str], otherwise: str) -> None:
    for name in changed_settings(settings):
        if not names or name in names:
            raise ConfigError(f"{section}.{name}: cannot take effect {otherwise}")


def _refuse_lora(lora: LoraConfig) -> None:
    if not lora:
        _refuse("model.lora", lora, (), "without adapters; set model.lora.rank")


def _refuse_clips(algo: AlgoConfig) -> None:
    """Refuses the clip of another loss. One of the user's own may read any."""
    if is_reference(algo.loss):
        return
    own = [f"algo.{name}" for name, losses in _LOSSES.items() if algo.loss in losses]
    others = [name for name, losses in _LOSSES.items() if algo.loss not in losses]
    advice = f"it reads {' and '.join(own)}" if own else "it clips nothing"
    _refuse("algo", algo, others, f"with algo.loss={algo.loss}; {advice}")


def _refuse_of_other_kinds(section: str, source: DatasetConfig) -> None:
    """One that is given from Python may read any."""
    if source.kind == "given":
        return
    for name, kinds in _KINDS.items():
        if source.kind not in kinds:
            _refuse(section, source, (name,), f"with {section}.kind={source.kind}; it is for {', '.join(kinds)}")
