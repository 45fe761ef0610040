"""Settings that nothing would read: they are refused, so that nobody believes that they have taken effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def _is_judged(config: Config) -> bool:
    return not config.agent or config.agent.reward == "scorer"


def scored_by(config: Config, *names: str) -> bool:
    """Whether one of these scorers judges answers. That of a task from Python is not known before the task is."""
    kinds = {part.kind for part in config.task.parts} or {config.task.kind}
    asked = config.reward.scorers
    if "auto" in asked:
        asked = asked | {_SCORERS.get(kind, "") for kind in kinds}
    return _is_judged(config) and ("" in asked or not asked.isdisjoint(names))


_RULES = (
    _Rule("model.lora", lambda job: bool(job.model.lora), "without adapters; set model.lora.rank"),
    _Rule("reference", lambda job: job.algo.reference_kl > 0, "without a KL term; set algo.reference_kl"),
    _ranks_of("reference"),
    _Rule("reward_model", lambda job: bool(job.reward_model.path), "without a model; set reward_model.path"),
    _Rule("conversation", lambda job: bool(job.conversation.tool), "without a tool; set conversation.tool"),
    _Rule(
        "conversation",
        lambda job: job.conversation.tool in ("calculator", "python"),
        "with a tool that finds its calls itself; it is for calculator, python",
        ("begin", "end"),
    ),
    _Rule("agent", lambda job: bool(job.agent), "without an agent; set agent.run, agent.command or agent.environment"),
    _Rule(
        "agent",
        lambda job: job.agent.environment not in ("", "verifiers"),
        "without a class as agent.environment",
        ("max_turns",),
    ),
    _Rule("sft", lambda job: bool(job.sft), "without data; set sft.path"),
    _Rule("teacher", lambda job: bool(job.teacher), "without a teacher; set teacher.path"),
    _Rule("teacher", lambda job: bool(job.teacher.url), "without teacher.url", ("key_env",)),
    _ranks_of("teacher"),
    _Rule("critic", lambda job: job.has_critic, "without a critic; set algo.advantage to gae"),
    _ranks_of("critic"),
    _Rule(
        "algo",
        lambda job: job.has_critic or is_reference(job.algo.loss),
        "without a critic; set algo.advantage to gae",
        ("gamma", "gae_lambda", "whiten"),
    ),
    _Rule(
        "algo",
        lambda job: job.algo.overlong == "penalize" or is_reference(job.algo.loss),
        "unless algo.overlong is penalize",
        ("overlong_penalty",),
    ),
    _Rule("task", lambda job: job.task.curriculum, "without task.curriculum=true", ("solved_from", "hard_up_to")),
    _Rule("reward", _is_judged, "with agent.reward=agent; set that to scorer"),
    _Rule("llm_judge", lambda job: scored_by(job, "llm_judge"), "without reward.scorer=llm_judge"),
    _Rule("reward", lambda job: scored_by(job, "regex"), "without reward.scorer=regex", ("pattern",)),
    _Rule("reward", lambda job: scored_by(job, "format"), "without reward.scorer=format", ("format",)),
    _Rule("reward", lambda job: scored_by(job, "length"), "without reward.scorer=length", ("max_chars",)),
    _Rule("reward", lambda job: scored_by(job, "code"), "without reward.scorer=code", ("tests",)),
    _Rule(
        "reward",
        lambda job: scored_by(job, "numeric", "math", "reasoning_gym"),
        "without a scorer that reads numbers: numeric, math or reasoning_gym",
        ("answer_from",),
    ),
    _Rule(
        "reward",
        lambda job: any(map(is_reference, job.reward.scorers)),
        "without a scorer of your own, as FILE.py:FUNCTION",
        ("concurrency",),
    ),
    _Rule(
        "sandbox",
        lambda job: scored_by(job, "code") or bool(job.conversation.tool),
        "without programs to run; set reward.scorer=code, or a tool",
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
    "answer_field": ("dataset", "jsonl"),
    "solution_field": ("dataset", "jsonl", "code"),
    "config": _FILES,
    "split": _FILES,
    "test_split": _FILES,
    "min_chars": _FILES,
    "max_chars": _FILES,
}  # of tasks that read these settings

_SCORERS = {
    "arithmetic": "exact",
    "gsm8k": "numeric",
    "math": "math",
    "svamp": "numeric",
    "dataset": "exact",
    "jsonl": "exact",
    "code": "code",
    "reasoning_gym": "reasoning_gym",
    "verifiers": "exact",
}  # that `reward.scorer: auto` is for each kind of task


def refuse_settings_in_vain(config: Config, recorded: Config | None = None) -> None:
    """ConfigError for the first setting that was changed and that this job would not read. A run that goes on may keep those
    that it was `recorded` with: an earlier release may have taken them."""
    kept = {str(error) for error in _settings_in_vain(recorded)} if recorded else set()
    for error in _settings_in_vain(config):
        if str(error) not in kept:
            raise error


def _settings_in_vain(config: Config) -> Iterator[ConfigError]:
    for rule in _RULES:
        if not rule.read(config):
            for name in changed_settings(attrgetter(rule.section)(config)):
                if not rule.names or name in rule.names:
                    yield _refusal(rule.section, name, rule.otherwise)
    yield from _clips_of_others(config.algo)
    yield from _of_other_kinds("task", config.task)
    for part in config.task.parts:
        yield from _of_other_kinds("task.parts", part)
    if not config.agent:  # sessions may branch into any number of documents
        yield from _parts_of_nothing(config)


def _refusal(section: str, name: str, otherwise: str) -> ConfigError:
    return ConfigError(f"{section}.{name}: cannot take effect {otherwise}")


def _clips_of_others(algo: AlgoConfig) -> Iterator[ConfigError]:
    """Clips of another loss. One of the user's own may read any."""
    if is_reference(algo.loss):
        return
    for name in changed_settings(algo):
        if algo.loss not in _LOSSES.get(name, (algo.loss,)):
            own = [f"algo.{other}" for other, losses in _LOSSES.items() if algo.loss in losses]
            advice = f"it reads {' and '.join(own)}" if own else "it clips nothing"
            yield _refusal("algo", name, f"with algo.loss={algo.loss}; {advice}")


def _of_other_kinds(section: str, source: DatasetConfig) -> Iterator[ConfigError]:
    """Settings of other kinds of tasks. One that is given from Python may read any."""
    if source.kind == "given":
        return
    for name in changed_settings(source):
        kinds = _KINDS.get(name, (source.kind,))
        if source.kind not in kinds:
            yield _refusal(section, name, f"with {section}.kind={source.kind}; it is for {', '.join(kinds)}")


def _parts_of_nothing(config: Config) -> Iterator[ConfigError]:
    """More optimizer steps than an update has answers."""
    schedule = config.schedule
    answers = schedule.groups_per_update * (1 if config.supervised else schedule.samples_per_group)
    for section, number in (("algo", config.algo.minibatches), ("critic", config.critic.minibatches)):
        if number > answers:
            yield ConfigError(
                f"{section}.minibatches: {number} parts need as many answers, and an update has {answers}; lower it, or "
                "raise schedule.groups_per_update"
            )
