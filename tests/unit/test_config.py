"""A mistake in the settings is told in one line that names the place; what is right comes back unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamarl.config import (
    Config,
    ModelConfig,
    RewardConfig,
    ScheduleConfig,
    Section,
    TaskConfig,
    TrainerConfig,
    renamed,
)
from llamarl.config.file import config_to_yaml, describe, load_config, parse_config, read_config
from llamarl.config.in_vain import _KINDS, _LOSSES, _RULES, _SCORERS
from llamarl.config.other_names import NO_SETTINGS, OTHER_NAMES
from llamarl.errors import ConfigError
from llamarl.tasks.registry import _habits


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def load_text(path: Path, text: str, *overrides: str) -> Config:
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def refusal(path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def override_refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


@pytest.mark.parametrize("text", ["model:\n", "trainer: {}\n"])
def test_what_is_not_given_has_its_default(job: Path, text: str) -> None:
    assert load_text(job, text) == Config()


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_on_and_off_are_words_for_settings_that_know_them(job: Path, word: str) -> None:
    """YAML reads them as true and false."""
    job.write_text(f"trainer: {{share_prompts: {word}}}")
    assert load_config(job).trainer.share_prompts == word
    assert load_config(None, [f"trainer.compile={word}"]).trainer.compile == word


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\nmodel: [\n", 3),
        ("seed: 1\ntrainer:\n\tlr: 0.1\n", 3),
        ("seed: 1\nmodel: a: b\n", 2),
        ("seed: *nobody\n", 1),
        ("seed: 1\n---\nseed: 2\n", 2),
        ("seed: !!python/object:os.system ls\n", 1),
    ],
)
def test_malformed_yaml_is_named_with_its_line(job: Path, text: str, line: int) -> None:
    assert refusal(job, text).startswith(f"{job}:{line}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  lr: 0.1\n  lr: 0.2\n", "job.yaml:3: 'lr' is given twice"),
        ("1: 2\n", "job.yaml:1: key 1 is not text"),
        ("? [seed]\n: 2\n", "job.yaml:1: key ['seed'] is not text"),
        ("", "holds no settings"),
        ("# to be written\n", "holds no settings; `llamarl config > job.yaml` writes all of them to start from"),
        ("{}\n", "holds no settings"),
        ("- seed\n", "expected `key: value` lines, got a list"),
        ("seed\n", "expected `key: value` lines, got 'seed'"),
    ],
)
def test_what_is_no_mapping_of_distinct_names_is_refused(job: Path, text: str, message: str) -> None:
    assert message in refusal(job, text)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("trainer: {lrr: 0.1}", "trainer.lr"),
        ("schedule: {update: 3}", "schedule.updates"),
        ("shedule: {updates: 3}", "schedule.updates"),
        ("wholly_different: 3", ""),
        ("updates: 3", "schedule.updates"),
        ("max_staleness: 0", "schedule.max_staleness"),
        ("generator: {max_staleness: 0}", "schedule.max_staleness"),
        ("sed: 3", "seed"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(job: Path, text: str, nearest: str) -> None:
    message = refusal(job, text)
    assert "unknown key" in message
    assert (f"did you mean '{nearest}'?" if nearest else "`llamarl config` lists all keys") in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.learning_rate", "'trainer.lr'"),
        ("learning_rate", "'trainer.lr'"),
        ("algo.beta", "'algo.reference_kl'"),
        ("trainer.beta", "'algo.reference_kl' or 'trainer.betas'"),
        ("algo.epsilon", "'algo.clip_low'"),
        ("schedule.num_generations", "'schedule.samples_per_group'"),
        ("schedule.batch_size", "'schedule.groups_per_update'"),
        ("generator.max_completion_length", "'generator.max_new_tokens'"),
        ("temperature", "'generator.temperature'"),
        ("generator.max_new_token", "'generator.max_new_tokens'"),
        ("trainer.warmup", "'trainer.warmup_updates'"),
        ("trainer.learningrate", "'trainer.lr'"),
        ("actor_rollout_ref.rollout.n", "'schedule.samples_per_group'"),
        ("actor.optim.lr", "'trainer.lr'"),
        ("trainer.optim.lr", "'trainer.lr'"),
        ("critic.optim.lr", "'critic.lr'"),
        ("trainer.model.lora.rank", "'model.lora.rank'"),
        ("algorithm.gamma", "'algo.gamma'"),
    ],
)
def test_a_name_from_elsewhere_leads_to_the_setting_that_is_meant(key: str, meant: str) -> None:
    assert f"command line: {key}: unknown key; did you mean {meant}?" in override_refusal(f"{key}=1")


def test_a_name_that_no_setting_stands_for_is_answered_with_what_to_do() -> None:
    known = {key.rpartition(".")[2] for key, _, _ in describe()}
    for name, told in NO_SETTINGS.items():
        assert name not in known and name not in OTHER_NAMES
        assert override_refusal(f"{name}=1").endswith(f"{name}: unknown key; {told}")


@pytest.mark.parametrize(
    ("loss", "setting", "told"),
    [
        ("gspo", "clip_low=0.1", "it reads algo.gspo_low and algo.gspo_high"),
        ("aipo", "clip_high=0.28", "it reads algo.rho"),
        ("grpo", "rho=2", "it reads algo.clip_low and algo.clip_high"),
        ("reinforce", "cispo_high=1", "it clips nothing"),
    ],
)
def test_the_clip_of_another_loss_is_refused(loss: str, setting: str, told: str) -> None:
    name = setting.partition("=")[0]
    refused = override_refusal(f"algo.loss={loss}", f"algo.{setting}")
    assert refused.endswith(f"algo.{name}: cannot take effect with algo.loss={loss}; {told}")
    load_config(None, ["algo.loss=mine.py:loss", f"algo.{setting}"])


def test_a_word_that_is_none_of_the_choices_is_answered_with_them() -> None:
    assert "algo.overlong: expected keep | mask | penalize (given: True)" in override_refusal("algo.overlong=true")


def test_every_other_name_leads_to_a_setting_and_is_none_itself() -> None:
    known = {key for key, _, _ in describe()}
    for theirs, ours in OTHER_NAMES.items():
        assert ours in known
        assert ours.rpartition(".")[2] != theirs
        section = ours.rpartition(".")[0]
        assert f"{section}.{theirs}" not in known, f"{theirs} is a setting"


def test_a_mistake_is_blamed_on_the_place_where_it_was_made(job: Path) -> None:
    assert refusal(job, "trainer: {lr: abc}").startswith(f"{job}: trainer.lr: ")
    assert refusal(job, "trainer: {lr: abc}", "seed=3").startswith(f"{job}: trainer.lr: ")
    assert refusal(job, "trainer: {lr: 0.1}", "trainer.lr=abc").startswith("command line: trainer.lr: ")
    assert refusal(job, "trainer: {lr: abc}", "trainer.betas=[0.9, x]").startswith(f"{job}: trainer.lr: ")
    assert refusal(job, "seed: 1", "trainer={lr: abc}").startswith("command line: trainer.lr: ")
    assert refusal(job, "seed: 1", "trainer.betas=[0.9, x]").startswith("command line: trainer.betas[1]: ")
    assert refusal(job, "seed: 1", "tariner.lr=1").startswith("command line: tariner.lr: unknown key")
    assert refusal(job, "seed: 1", "trainer.lr=[").startswith("command line: 'trainer.lr=['")
    assert refusal(job, "seed: 1", "trainer.lr").startswith("command line: 'trainer.lr'")


def test_settings_that_do_not_go_together_are_blamed_on_whoever_made_them_so(job: Path) -> None:
    alone = "generator: {slots: 4}"
    assert refusal(job, alone).startswith(f"{job}: generator.slots: ")
    fitting = "generator: {slots: 8}\nschedule: {samples_per_group: 8}"
    assert refusal(job, fitting, "schedule.samples_per_group=16").startswith("command line: generator.slots: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule: {updates: ten}", "schedule.updates: expected int, got str (given: 'ten')"),
        ("schedule: {updates: 10.5}", "schedule.updates: expected int, got float (given: 10.5)"),
        ("schedule: {updates: yes}", "schedule.updates: expected int, got bool (given: True)"),
        ("schedule: {updates: [1]}", "schedule.updates: expected int, got array (given: [1])"),
        ("schedule: {updates: {a: 1}}", "schedule.updates: expected int, got object"),
        ("schedule: {updates: }", "schedule.updates: expected int, got null"),
        ("trainer: {lr: '1e-5'}", "trainer.lr: expected float, got str (given: '1e-5')"),
        ("trainer: {betas: [0.9]}", "trainer.betas: expected array of length 2, got 1"),
        ("trainer: {betas: [0.9, x]}", "trainer.betas[1]: expected float, got str (given: 'x')"),
        ("model: {path: 5}", "model.path: expected str, got int (given: 5)"),
        ("model: {path: 2020-01-01}", "model.path: expected str, got date"),
        ("task: {template: {question}}", "task.template: expected str, got object; put text with braces in quotes"),
        ("trainer: 5", "trainer: is a section with keys of its own, got 5"),
        ("algo: {zero_variance: maybe}", "algo.zero_variance: expected keep | skip (given: 'maybe')"),
        ("algo: {zero_variance: ' - at `$.x`'}", "algo.zero_variance: expected keep | skip"),
        ("engine: banana", "engine.kind: expected "),
        ("schedule: {updates: 010}", "expected int, got str (given: '010')"),  # not the octal 8
        ("schedule: {updates: 1:30}", "expected int, got str (given: '1:30')"),  # not 90 minutes' worth
    ],
)
def test_a_wrong_type_is_named_with_what_was_given(job: Path, text: str, message: str) -> None:
    assert message in refusal(job, text)


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "1.e-5", "0.00001", "+1e-5", "10e-6", ".1e-4"])
def test_a_learning_rate_may_be_written_as_people_write_it(job: Path, text: str) -> None:
    assert load_text(job, f"trainer: {{lr: {text}}}").trainer.lr == pytest.approx(1e-5)
    assert load_config(None, [f"trainer.lr={text}"]).trainer.lr == pytest.approx(1e-5)


@pytest.mark.parametrize("text", [".nan", ".NaN", ".inf", "-.inf", "1e999"])
def test_a_number_that_is_none_is_refused(job: Path, text: str) -> None:
    assert "trainer.lr: must be a finite number" in refusal(job, f"trainer: {{lr: {text}}}")
    assert "trainer.betas: must be a finite number" in refusal(job, f"trainer: {{betas: [0.9, {text}]}}")
    assert "algo.rho: must be a finite number" in override_refusal(f"algo.rho={text}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.lr=0", "trainer.lr: expected float > 0.0 (given: 0)"),
        ("trainer.lr=-1e-5", "trainer.lr: expected float > 0.0"),
        ("schedule.updates=0", "schedule.updates: expected int >= 1"),
        ("schedule.samples_per_group=1", "schedule.samples_per_group: the reward of a single answer has nothing"),
        ("schedule.max_staleness=-1", "schedule.max_staleness: expected int >= 0"),
        ("generator.temperature=0", "generator.temperature: expected float >= 0.01"),
        ("task.held_out=1", "task.held_out: expected float < 1.0"),
        ("seed=-1", "seed: expected int >= 0"),
        (f"seed={10**30}", "seed: expected int <="),
        ("seed=" + "9" * 5000, "not valid YAML"),
        ("trainer.betas=[0.9, 1.0]", "trainer.betas: each must lie in [0, 1)"),
    ],
)
def test_a_value_out_of_range_is_refused(override: str, message: str) -> None:
    assert message in override_refusal(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluate.every=5", "evaluate.prompts=0"], "evaluate.every: cannot take effect with evaluate.prompts=0"),
        (["schedule.window=5", "schedule.groups_per_update=2"], "schedule.window: 5 cannot take effect"),
        (["algo.minibatches=4000"], "algo.minibatches: 4000 parts need as many answers"),
        (["generator.slots=7"], "generator.slots: 7 slots cannot hold one group of schedule.samples_per_group=8"),
    ],
)
def test_a_setting_that_cannot_take_effect_is_refused(overrides: list[str], message: str) -> None:
    assert message in override_refusal(*overrides)


IN_VAIN = {
    "model.lora.targets=mlp": "without adapters; set model.lora.rank",
    "model.lora.alpha=64": "without adapters; set model.lora.rank",
    "reference.tensor=2": "without a KL term; set algo.reference_kl",
    "reference.place=trainer": "without a KL term; set algo.reference_kl",
    "reference.data=2 algo.reference_kl=0.1 reference.place=trainer": "with reference.place=trainer; set it to own",
    "reward_model.weight=2": "without a model; set reward_model.path",
    "conversation.max_turns=9": "without a tool; set conversation.tool",
    "agent.replicas=3": "without an agent; set agent.run, agent.command or agent.environment",
    "agent.max_turns=3 agent.run=mine.py:play": "without a class as agent.environment",
    "reward.scorer=math agent.run=mine.py:play": "with agent.reward=agent; set that to scorer",
    "conversation.begin=call conversation.tool=mine.py:reply": (
        "with a tool that finds its calls itself; it is for calculator, python"
    ),
    "teacher.key_env=KEY teacher.path=tiny": "without teacher.url",
    "sandbox.cpu_s=9": "without programs to run; set reward.scorer=code, or a tool",
    "reward.answer_from=boxed": "without a scorer that reads numbers: numeric, math or reasoning_gym",
    "reward.answer_from=boxed task.kind=dataset task.path=x": (
        "without a scorer that reads numbers: numeric, math or reasoning_gym"
    ),
    "reward.tests=share": "without reward.scorer=code",
    "task.answer_field=sol task.kind=code task.path=x": "with task.kind=code; it is for dataset, jsonl",
    "task.min_chars=5": "with task.kind=arithmetic; it is for gsm8k, math, svamp, dataset, jsonl, code",
    "sft.weight=2": "without data; set sft.path",
    "teacher.weight=2": "without a teacher; set teacher.path",
    "critic.lr=1e-3": "without a critic; set algo.advantage to gae",
    "critic.data=2 algo.advantage=gae": "with critic.place=trainer; set it to own",
    "algo.gamma=0.9": "without a critic; set algo.advantage to gae",
    "algo.overlong_penalty=3": "unless algo.overlong is penalize",
    "algo.overlong_penalty=3 algo.overlong=mask": "unless algo.overlong is penalize",
    "task.solved_from=0.5": "without task.curriculum=true",
    "llm_judge.model=x": "without reward.scorer=llm_judge",
    "reward.pattern=abc": "without reward.scorer=regex",
    "reward.format=think": "without reward.scorer=format",
    "reward.max_chars=10": "without reward.scorer=length",
    "reward.tests=share reward.scorer=exact": "without reward.scorer=code",
    "reward.answer_from=boxed reward.scorer=exact": "without a scorer that reads numbers: numeric, math or reasoning_gym",
    "reward.concurrency=3 reward.scorer=exact": "without a scorer of your own, as FILE.py:FUNCTION",
    "engine.certs=/c": "on one machine; set engine=monarch",
    "engine.trusted_network=eth9": "on one machine; set engine=monarch",
    "task.prompt_field=foo": "with task.kind=arithmetic; it is for dataset, jsonl, code",
    "task.size=20": "with task.kind=arithmetic; it is for reasoning_gym, verifiers",
    "task.split=foo": "with task.kind=arithmetic; it is for gsm8k, math, svamp, dataset, jsonl, code",
    "task.max_operand=20 task.kind=gsm8k": "with task.kind=gsm8k; it is for arithmetic",
}


@pytest.mark.parametrize("settings", IN_VAIN)
def test_a_setting_that_nothing_reads_is_refused(settings: str) -> None:
    first, *others = settings.split()
    assert override_refusal(first, *others).endswith(
        f"{first.partition('=')[0]}: cannot take effect {IN_VAIN[settings]}"
    )


@pytest.mark.parametrize(
    "settings",
    [
        "model.lora.targets=mlp model.lora.rank=8",
        "reference.tensor=2 algo.reference_kl=0.1",
        "agent.max_turns=3 agent.environment=mine.py:Maze",
        "algo.overlong_penalty=3 algo.overlong=penalize",
        "task.solved_from=0.5 task.curriculum=true",
        "reward.pattern=abc reward.scorer=regex",
        "reward.tests=share task.kind=code task.path=mine.jsonl",
        "reward.answer_from=boxed task.kind=gsm8k",
        "reward.pattern=abc task.kind=given",
        "reward.scorer=math agent.run=mine.py:play agent.reward=scorer",
        "algo.overlong_penalty=3 algo.loss=mine.py:loss",
        "sandbox.cpu_s=9 conversation.tool=python",
        "reward.concurrency=3 reward.scorer=mine.py:score",
        "engine.host_s=5 engine.kind=monarch",
        "task.prompt_field=question task.kind=dataset task.path=mine.csv",
    ],
)
def test_a_setting_that_is_read_is_not_refused(settings: str) -> None:
    load_config(None, settings.split())


def test_what_a_run_was_recorded_with_does_not_keep_it_from_going_on(job: Path) -> None:
    job.write_text("conversation: {max_turns: 8}")  # without a tool, which an earlier release took
    recorded = read_config(job)
    assert load_config(job, ["schedule.updates=9"], recorded=recorded).conversation.max_turns == 8
    with pytest.raises(ConfigError, match=r"reward\.pattern: cannot take effect"):
        load_config(job, ["reward.pattern=x"], recorded=recorded)
    with pytest.raises(ConfigError, match=r"conversation\.max_turns: cannot take effect"):
        load_config(job)


def test_auto_is_the_scorer_that_each_kind_of_task_has() -> None:
    kinds = set(get_args(get_type_hints(TaskConfig)["kind"])) - {"mixture", "given"}
    assert {kind: _habits(kind)[1] for kind in kinds} == _SCORERS


def test_the_rules_of_settings_in_vain_name_settings_that_exist() -> None:
    known = {key for key, _, _ in describe()}
    named = {f"{rule.section}.{name}" for rule in _RULES for name in rule.names}
    named |= {f"algo.{name}" for name in _LOSSES} | {f"task.{name}" for name in _KINDS}
    assert not named - known


def test_a_key_with_dots_in_a_file_is_told_how_to_be_written(job: Path) -> None:
    assert refusal(job, "trainer.lr: 1e-4").endswith(
        "trainer.lr: in a file, keys stand inside their section: trainer: {lr: ...}"
    )
    assert "keys stand inside" in refusal(job, "model: {lora.rank: 8}")


def test_a_section_that_is_no_section_is_the_files_fault_beside_an_override_too(job: Path) -> None:
    alone = refusal(job, "trainer: 3")
    assert refusal(job, "trainer: 3", "trainer.lr=1e-4") == alone and "is a section with keys of its own" in alone


def test_a_section_may_be_written_as_its_kind(job: Path) -> None:
    assert load_text(job, "engine: inline") == load_text(job, "engine: {kind: inline}")
    assert load_text(job, "engine: inline").engine.kind == "inline"


def test_overrides_win_over_the_file_and_leave_its_other_keys(job: Path) -> None:
    config = load_text(job, "seed: 3\ntrainer: {lr: 0.1, weight_decay: 0.5}", "trainer.lr=0.2", "seed=4")
    assert (config.seed, config.trainer.lr, config.trainer.weight_decay) == (4, 0.2, 0.5)


def test_the_last_override_of_a_key_wins() -> None:
    assert load_config(None, ["seed=1", "seed=2"]).seed == 2


def test_an_override_of_a_kind_keeps_the_sections_other_keys(job: Path) -> None:
    config = load_text(job, "task: {held_out: 0.25}", "task=arithmetic")
    assert (config.task.kind, config.task.held_out) == ("arithmetic", 0.25)


def test_an_override_below_a_shorthand_keeps_the_kind(job: Path) -> None:
    config = load_text(job, "task: arithmetic", "task.held_out=0.25")
    assert (config.task.kind, config.task.held_out) == ("arithmetic", 0.25)


def test_an_override_may_hold_a_whole_section_and_text_with_an_equals_sign() -> None:
    assert load_config(None, ["trainer={lr: 1e-3}"]).trainer == TrainerConfig(lr=1e-3)
    assert load_config(None, ["model.path=a=b"]).model.path == "a=b"


@pytest.mark.parametrize("override", ["trainer.lr", "=3", "", "=", "three"])
def test_an_override_that_is_no_assignment_is_refused(override: str) -> None:
    assert "overrides are written key=value" in override_refusal(override)


@pytest.mark.parametrize("override", [".=1", "trainer.=1", "trainer..lr=1", "seed.x=1", "trainer.betas.x=1", "seed=["])
def test_an_override_of_no_setting_is_refused(override: str) -> None:
    assert override_refusal(override)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in [
        (tmp_path / "missing.yaml", "no such file; `llamarl config > job.yaml` writes one"),
        (tmp_path, "cannot be read"),
        (binary, "cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_config(path)


def test_a_refusal_is_one_short_line_whatever_was_given(job: Path) -> None:
    bomb = ", ".join(["&a0 [1]", *(f"&a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 100))])
    deep = ", ".join(["&a0 [1]", *(f"&a{i} [*a{i - 1}]" for i in range(1, 3000))])
    for text in (f"seed: [{bomb}]", f"seed: [{deep}]", f"seed: {'x' * 100_000}", f"{'x' * 100_000}: 1"):
        assert len(refusal(job, text)) < 1200
    for text in ('"two\\nlines": 1', '"\\e[31mred": 1', 'seed: "two\\nlines"'):
        assert refusal(job, text).isprintable()


# Names and values that are near the truth, so that random files reach every check.
_names = st.sampled_from([key.rpartition(".")[2] for key, _, _ in describe()] + list(Config.__struct_fields__))
_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["inline", "local", "arithmetic", "keep", "skip", "1e-5", "010", "tiny", "auto"])
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names | st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=120)
@given(st.dictionaries(_names | st.text(max_size=8), _values, max_size=5))
def test_any_mapping_is_either_a_config_or_refused_in_one_line(raw: dict[str, Any]) -> None:
    try:
        assert isinstance(parse_config(raw), Config)
    except ConfigError as error:
        assert str(error).isprintable()


@settings(max_examples=60)
@given(st.text(alphabet=st.sampled_from(list("abse:d{}[]-?!&*#|>'\"%@`,. \n\t01=\\~<")) | st.characters(), max_size=40))
@example("seed: !!bool maybe")
@example("seed: !!timestamp never")
@example("seed: !!int one")
@example("? !!float x\n: 1")
@example("seed: 2001-13-45")
@example("[" * 500)
@example("&a {model: *a}")
@example("&a [*a]")
@example("trainer: &a {betas: [*a, *a]}")
@example("<<: {seed: 1}")
@example("=: 1")
def test_any_text_is_either_a_config_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    for file, overrides in ((path, []), (None, [f"seed={text}"])):
        try:
            assert isinstance(load_config(file, overrides), Config)
        except ConfigError as error:
            assert str(error).isprintable()


@settings(max_examples=60)
@given(
    path=st.text(max_size=20),
    scorer=st.text(max_size=20),
    lr=st.floats(1e-12, 1.0, exclude_min=True),
    seed=st.integers(0, 2**62),
    staleness=st.integers(0, 5),
)
@example(path="1e-5", scorer="010", lr=1e-5, seed=0, staleness=0)
@example(path="no", scorer="~", lr=1e-5, seed=0, staleness=0)
@example(path="1:30", scorer="0x1F", lr=1e-5, seed=0, staleness=0)
@example(path=".5e3", scorer="1_000", lr=1e-5, seed=0, staleness=0)
@example(path="\x85", scorer="\u2028\ufeff\r\n", lr=1e-5, seed=0, staleness=0)
def test_a_config_written_as_yaml_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, path: str, scorer: str, lr: float, seed: int, staleness: int
) -> None:
    config = Config(
        seed=seed,
        model=ModelConfig(path=path),
        reward=RewardConfig(scorer=scorer),
        trainer=TrainerConfig(lr=lr),
        schedule=ScheduleConfig(max_staleness=staleness),
    )
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    assert load_text(file, config_to_yaml(config)) == config


def test_every_setting_has_a_meaning_and_its_true_default() -> None:
    described = list(describe())
    raw: dict[str, Any] = {}
    for key, default, meaning in described:
        assert meaning.strip(), key
        *sections, name = key.split(".")
        node = raw
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = yaml.safe_load(default)
    assert parse_config(raw) == Config()
    assert [key for key, _, _ in described] == list(setting_names(Config()))


def setting_names(section: Section, prefix: str = "") -> Iterator[str]:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from setting_names(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_the_staleness_bound_is_that_of_the_design() -> None:
    """((S+1)*P + W - 2) // P; S when batches are in order."""
    assert [ScheduleConfig(max_staleness=s, groups_per_update=4).staleness_bound for s in range(4)] == [0, 1, 2, 3]
    assert ScheduleConfig(max_staleness=0, groups_per_update=4, window=2).staleness_bound == 1
    assert ScheduleConfig(max_staleness=1, groups_per_update=4, window=5).staleness_bound == 2
    assert ScheduleConfig(max_staleness=1, groups_per_update=4, window=6).staleness_bound == 3
    assert ScheduleConfig(max_staleness=2, groups_per_update=1, window=3).staleness_bound == 4


def test_deterministic_conversations_need_pages_for_all() -> None:
    settings = ["schedule.deterministic=true", "conversation.tool=calculator"]
    load_config(None, settings)
    with pytest.raises(ConfigError, match=r"generator\.kv_pages: with 100 pages, timing decides"):
        load_config(None, [*settings, "generator.kv_pages=100"])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "accuracy"),
        (["task=gsm8k"], "accuracy"),
        (["reward.scorer=math"], "accuracy"),
        (["task=code"], "accuracy"),
        (["task=code", "reward.tests=share"], "mean reward"),
        (["reward.scorer=length"], "mean reward"),
        (["reward.scorer=format"], "mean reward"),
        (["reward.scorer=mine.py:score"], "mean reward"),
        (["reward.combine={math: 1, length: 0.1}"], "mean reward"),
        (["reward_model.path=folder"], "mean reward"),
    ],
)
def test_an_evaluation_is_an_accuracy_only_where_answers_are_right_or_wrong(settings: list[str], name: str) -> None:
    assert load_config(None, settings).score_name == name


@pytest.mark.parametrize("where", ["file", "override", "file and override"])
def test_old_spellings_are_read_for_one_release_and_said_once(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed._tell.cache_clear()
    old, file = ["generator.quantise=fp8", "algo.overlong=penalise"], tmp_path / "job.yaml"
    file.write_text("generator: {quantise: fp8}\nalgo: {overlong: penalise}\n" if "file" in where else "seed: 0\n")
    config = load_config(file, {"file": [], "override": old, "file and override": ["generator.quantize=int8"]}[where])
    load_config(file)
    assert config.generator.quantize == ("int8" if "and" in where else "fp8") and config.algo.overlong == "penalize"
    assert capsys.readouterr().err.splitlines() == [
        "generator.quantise is now generator.quantize; the old name is read for one more release",
        "algo.overlong=penalise is now algo.overlong=penalize; the old spelling is read for one more release",
    ]


def test_a_setting_under_both_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("generator: {quantise: fp8, quantize: int8}\n")
    with pytest.raises(ConfigError, match=r"generator\.quantise: unknown key; did you mean 'generator\.quantize'"):
        load_config(tmp_path / "job.yaml")
