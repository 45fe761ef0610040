"""Settings that nothing would read: they are refused, so that nobody believes that they have taken effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import fields

from llamarl.config.algo import AlgoConfig
from llamarl.config.section import OwnRanks, changed_settings
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


def _ranks_of(section: str) -> _Rule:
    """Ranks of a model that has none of its own."""
    return _Rule(
        section,
        lambda job: bool(getattr(job, section).place == "own"),
        f"with {section}.place=trainer; set it to own",
        [one.name for one in fields(OwnRanks)],
    )


_RULES = (
    _Rule("model.lora", lambda job: bool(job.model.lora), "without adapters; set model.lora.rank"),
    _Rule("reference", lambda job: job.algo.reference_kl > 0, "without a KL term; set algo.reference_kl"),
    _ranks_of("reference"),
    _Rule("reward_model", lambda job: bool(job.reward_model.path), "without a model; set reward_model.path"),
    _Rule("conversation", lambda job: bool(job.conversation.tool), "without a tool; set conversation.tool"),
    _Rule("agent", lambda job: bool(job.agent), "without an agent; set agent.run, agent.command or agent.environment"),
    _Rule("agent", lambda job: bool(job.agent.environment), "without agent.environment", ("max_turns",)),
    _Rule("sft", lambda job: bool(job.sft), "without data; set sft.path"),
    _Rule("teacher", lambda job: bool(job.teacher), "without a teacher; set teacher.path"),
    _ranks_of("teacher"),
    _Rule("critic", lambda job: job.has_critic, "without a critic; set algo.advantage to gae"),
    _ranks_of("critic"),
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
            for name in changed_settings(attrgetter(rule.section)(config)):
                if not rule.names or name in rule.names:
                    raise _refusal(rule.section, name, rule.otherwise)
    _refuse_clips(config.algo)
    _refuse_of_other_kinds("task", config.task)
    for part in config.task.parts:
        _refuse_of_other_kinds("task.parts", part)


def _scored_by(config: Config, *names: str) -> bool:
    return not config.reward.scorers.isdisjoint(names)


def _refusal(section: str, name: str, otherwise: str) -> ConfigError:
    return ConfigError(f"{section}.{name}: cannot take effect {otherwise}")


def _refuse_clips(algo: AlgoConfig) -> None:
    """Refuses the clip of another loss. One of the user's own may read any."""
    if is_reference(algo.loss):
        return
    for name in changed_settings(algo):
        if algo.loss not in _LOSSES.get(name, (algo.loss,)):
            own = [f"algo.{other}" for other, losses in _LOSSES.items() if algo.loss in losses]
            advice = f"it reads {' and '.join(own)}" if own else "it clips nothing"
            raise _refusal("algo", name, f"with algo.loss={algo.loss}; {advice}")


def _refuse_of_other_kinds(section: str, source: DatasetConfig) -> None:
    """One that is given from Python may read any."""
    if source.kind == "given":
        return
    for name in changed_settings(source):
        kinds = _KINDS.get(name, (source.kind,))
        if source.kind not in kinds:
            raise _refusal(section, name, f"with {section}.kind={source.kind}; it is for {', '.join(kinds)}")
