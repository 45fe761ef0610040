"""Jobs with teachers: the KL falls, bytes are the same whatever the engine, deaths and resumes change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.brief import BRIEF
from helpers.cli import llamarl
from helpers.engines import ENGINE
from helpers.fingerprint import fingerprint
from helpers.killing import TINY, KillAt, Killed
from helpers.mortal_roles import FLAG, build_mortal_teacher, build_mortal_trainer
from helpers.small_model import SPEC, small_model
from helpers.stub_teacher import stub_endpoint
from msgspec.structs import replace

from llamarl import Job
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.errors import JobFailed
from llamarl.io.row_file import RowFile
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model_spec import ModelSpec

UPDATES = 6
SMALL = [*TINY, *small_model()]
SHORT = [
    *SMALL,
    f"schedule.updates={UPDATES}",
    "snapshots.every=2",
    "schedule.deterministic=true",
    "evaluate.prompts=8",
]
WIDER = replace(SPEC, hidden_size=48, num_heads=3, num_kv_heads=3)


def save_teacher(folder: Path, seed: int = 1, shape: ModelSpec = WIDER) -> Path:
    save_model(random_model(shape, seed=seed), folder, carry_from=Config().model_folder)
    return folder


Kinds = dict[str, list[str]]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Settings of each kind of teacher."""
    folder = tmp_path_factory.mktemp("teachers")
    one, other = save_teacher(folder / "one"), save_teacher(folder / "other", seed=2, shape=SPEC)
    parts = "[{kind: arithmetic, max_operand: 9, teacher: a}, {kind: arithmetic, max_operand: 99, teacher: b}]"
    path, by_name = f"teacher.path={one}", f"teacher.by_name={{a: {one}, b: {other}}}"
    return {
        "exact": [path, "algo.reward_weight=0"],
        "mixed": [path, "teacher.forward=0.3", "teacher.offload=false"],
        "sampled": [path, "teacher.kl=sampled", "teacher.weight=0.1"],
        "own": [path, "teacher.kl=sampled", "teacher.place=own", "teacher.device=cpu"],
        "own exact": [path, "teacher.place=own", "teacher.device=cpu", "teacher.forward=0.3"],
        "own named": [
            by_name,
            "task.kind=mixture",
            f"task.parts={parts}",
            "teacher.place=own",
            "teacher.offload=false",
        ],
        "named": [by_name, "task.kind=mixture", f"task.parts={parts}"],
    }


def metrics_of(run: Path, role: str = "trainer") -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["role"] == role]


@pytest.fixture(scope="module", params=["exact", "mixed", "sampled", "own", "own exact", "own named", "named"])
def straight(
    request: pytest.FixtureRequest, teachers: Kinds, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path]:
    settings, folder = [*SHORT, *teachers[request.param]], tmp_path_factory.mktemp("straight") / "run"
    Job(load_config(None, [*settings, "engine=inline"])).run(folder)
    return settings, folder


def test_every_update_says_how_far_the_policy_is_from_its_teacher(straight: tuple[list[str], Path]) -> None:
    _, folder = straight
    for row in metrics_of(folder):
        assert row["teacher_tokens"] == row["trained_tokens"] > 0 and row["teacher_kl"] != 0
        assert row["staleness_max"] <= 1 and "reward" in row


def test_killed_and_resumed_equals_never_killed(straight: tuple[list[str], Path], tmp_path: Path) -> None:
    settings, folder = straight
    with pytest.raises(Killed):
        Job(load_config(None, [*settings, "engine=inline"]), builders={"trainer": KillAt(3)}).run(tmp_path / "run")
    Job.resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(folder, UPDATES)


@pytest.mark.parametrize(("kind", "role"), [("own", "teacher"), ("own exact", "teacher"), ("own exact", "trainer")])
def test_a_teacher_that_dies_comes_back_and_changes_no_byte(
    kind: str, role: str, teachers: Kinds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a trainer, whose teacher computes the states of its batches again."""
    settings = [*SHORT, *teachers[kind], f"engine={ENGINE}"]
    monkeypatch.setenv(FLAG, str(tmp_path / "killed"))
    builder = {"teacher": build_mortal_teacher, "trainer": build_mortal_trainer}[role]
    summary = Job(load_config(None, settings), builders={role: builder}).run(tmp_path / "run")
    assert (tmp_path / "killed").exists() and summary.restarts == 1
    assert not (tmp_path / "run/batches").exists(), "states are left behind"
    Job(load_config(None, [*SHORT, *teachers[kind], "engine=inline"])).run(tmp_path / "calm")
    disturbed, calm = fingerprint(tmp_path / "run", UPDATES), fingerprint(tmp_path / "calm", UPDATES)
    for one in (disturbed, calm):
        del one["rollouts"]  # of updates that count anew, kept rollouts have lost the trainer's log-probs
    assert disturbed == calm


def test_ranks_of_its_own_teach_what_the_trainers_do(teachers: Kinds, tmp_path: Path) -> None:
    near = [one for one in teachers["own exact"] if "place" not in one and "device" not in one]
    for name, own in (("own", teachers["own exact"]), ("trainer", near)):
        Job(load_config(None, [*SHORT, *own, "engine=inline"])).run(tmp_path / name)
    for row, other in zip(metrics_of(tmp_path / "own"), metrics_of(tmp_path / "trainer"), strict=True):
        for measure in ("loss", "teacher_kl", "grad_norm"):
            assert row[measure] == pytest.approx(other[measure], rel=1e-5, abs=1e-6), measure
        assert row["teacher_gap_max"] < 1e-4


def test_states_of_other_tokens_end_the_job_with_one_line(
    teachers: Kinds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: every state is that of the next row."""
    take = RowFile.take
    monkeypatch.setattr(RowFile, "take", lambda self, numbers: np.roll(take(self, numbers), 1, axis=0))
    settings = [*SHORT, *teachers["own exact"], "engine=inline"]
    with pytest.raises(JobFailed, match="trainer/0: teacher: in update 0, its states and head give other log-probs"):
        Job(load_config(None, settings)).run(tmp_path / "run")


@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_the_policy_comes_closer_to_its_teacher(kind: str, teachers: Kinds, tmp_path: Path) -> None:
    settings = [*SMALL, *teachers[kind], "algo.reward_weight=0", "engine=inline"]
    settings += ["schedule.updates=20", "trainer.lr=5e-3", "evaluate.prompts=0", "teacher.weight=1"]
    settings += ["schedule.groups_per_update=16", "snapshots.at_end=none", "schedule.max_staleness=0"]
    Job(load_config(None, settings)).run(tmp_path / "run")
    kl = [row["teacher_kl"] for row in metrics_of(tmp_path / "run")]
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3]), kl


def test_the_example_learns_from_any_teacher_with_its_tokenizer(teachers: Kinds, tmp_path: Path) -> None:
    settings = [*BRIEF, "trainer.device=cpu", "generator.device=cpu", "evaluate.every=0", teachers["exact"][0]]
    code, out, err = llamarl("train", "examples/distil.yaml", *settings, "--run", tmp_path / "run")
    assert (code, err) == (0, "") and "KL to the teacher" in out
    assert "by distillation with" in llamarl("push", tmp_path / "run", "ann/sums", "--dry-run").out


def test_a_teacher_may_be_the_same_base_with_other_adapters(tmp_path: Path) -> None:
    """It says what the merged model says, and the trained adapters are back afterwards."""
    lora = [*SMALL, "model.lora.rank=4", "engine=inline", "evaluate.prompts=0", "trainer.lr=1e-2"]
    rows = ["sft.path=examples/data/additions.jsonl", "sft.epochs=0", "schedule.updates=3"]
    Job(load_config(None, [*lora, *rows])).run(tmp_path / "taught")
    adapter, merged = tmp_path / "taught/snapshots/3/policy", tmp_path / "merged"
    assert llamarl("merge", adapter, merged).code == 0
    found = []
    for number, teacher in enumerate([f"teacher.adapter={adapter}", f"teacher.path={merged}"]):
        settings = [*lora, teacher, "schedule.updates=2", "schedule.max_staleness=0", "schedule.deterministic=true"]
        Job(load_config(None, settings)).run(tmp_path / str(number))
        found.append(metrics_of(tmp_path / str(number)))
    for own, other in zip(*found, strict=True):
        assert own["teacher_kl"] == pytest.approx(other["teacher_kl"], rel=1e-3)
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert own["teacher_kl"] > 1e-4


def test_a_teacher_may_have_a_head_of_another_size_or_narrow_weights(teachers: Kinds, tmp_path: Path) -> None:
    """fp8 rounds: the KL is nearly that of the wide teacher, and not the same."""
    save_teacher(tmp_path / "padded", shape=replace(SPEC, vocab_size=20))
    wide = teachers["exact"][0]
    kinds = {"padded": [f"teacher.path={tmp_path / 'padded'}"], "wide": [wide], "fp8": [wide, "teacher.dtype=fp8"]}
    kl = dict[str, float]()
    for name, own in kinds.items():
        settings = [*SMALL, *own, "engine=inline", "schedule.updates=1", "evaluate.prompts=0"]
        Job(load_config(None, settings)).run(tmp_path / f"{name}-run")
        kl[name] = metrics_of(tmp_path / f"{name}-run")[0]["teacher_kl"]
    assert kl["padded"] > 0
    assert kl["fp8"] == pytest.approx(kl["wide"], rel=0.1) and kl["fp8"] != kl["wide"]


def test_a_teacher_may_be_asked_over_http(tmp_path: Path) -> None:
    with stub_endpoint() as server:
        settings = [*SMALL, f"teacher.url={server.url}", "teacher.kl=sampled", "teacher.place=own", "engine=inline"]
        Job(load_config(None, [*settings, "schedule.updates=2", "evaluate.prompts=0"])).run(tmp_path / "run")
    first, *_ = metrics_of(tmp_path / "run")
    assert first["teacher_tokens"] == first["trained_tokens"] and first["teacher_kl"] > 0
    assert len(server.asked) == 1 + 2 * 16, "one before anything starts, then one for each answer"


def test_rows_may_name_their_teachers(teachers: Kinds, tmp_path: Path) -> None:
    one = teachers["exact"][0].removeprefix("teacher.path=")
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}", "by": "{"a" * (n % 2)}"}}\n' for n in range(40))
    )
    settings = [*SMALL, "engine=inline", "task.kind=dataset", f"task.path={data}", f"teacher.by_name={{a: {one}}}"]
    settings += ["teacher.column=by", "schedule.updates=2", "evaluate.prompts=0", "algo.zero_variance=keep"]
    Job(load_config(None, settings)).run(tmp_path / "run")
    for row in metrics_of(tmp_path / "run"):
        assert 0 < row["teacher_tokens"] < row["trained_tokens"]
    code, _, err = llamarl("train", *settings, f"teacher.by_name={{b: {one}}}", "--run", tmp_path / "refused")
    assert code == 2 and "teacher.column: a row names 'a', but teacher.by_name has only b" in err


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("teacher.path=nowhere", "teacher.path: "),
        ("teacher.path=OTHER_TOKENS", "teacher.path: its tokenizer is another than the policy's (hashes "),
        ("teacher.path=OTHER_SIZE; trainer.tensor=2", "teacher.path: its head has 20 rows, the policy's 17"),
        ("teacher.path=tiny; teacher.dtype=fp8; trainer.data=2", "teacher.dtype: an fp8 teacher is whole on one rank"),
        (
            "teacher.path=tiny; teacher.data=2",
            "teacher.data: cannot take effect with teacher.place=trainer; set it to own",
        ),
        ("teacher.weight=2", "teacher.weight: cannot take effect without a teacher"),
        ("algo.reward_weight=0", "algo.reward_weight: 0 leaves nothing to learn from"),
        ("teacher.adapter=x; teacher.place=own", "teacher.place: adapters are applied to the trainer's base"),
        ("teacher.url=http://127.0.0.1:9; teacher.place=own", "teacher.url: gives log-probs of sampled tokens"),
        ("teacher.path=tiny; teacher.kl=sampled; teacher.forward=1", "teacher.forward: cannot take effect"),
        ("teacher.url=http://127.0.0.1:9", "teacher.url: gives log-probs of sampled tokens; set teacher.kl=sampled"),
        ("teacher.adapter=x", "teacher.adapter: needs adapters of the same layers in the policy"),
        ("teacher.by_name={a: tiny}", "teacher.by_name: nothing names these teachers"),
        ("teacher.by_name={a: tiny}; task.teacher=b", "task.teacher: 'b' is no name in teacher.by_name"),
        (
            "teacher.path=tiny; sft.path=examples/data/additions.jsonl",
            "teacher.path: teaches tokens that the policy samples",
        ),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_before_anything_starts(settings: str, told: str, tmp_path: Path) -> None:
    save_teacher(tmp_path / "size", shape=replace(SPEC, vocab_size=20))
    tokens = save_teacher(tmp_path / "tokens") / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace('"+": 11', '"-": 11').replace('"-": 12', '"+": 12'))
    settings = settings.replace("OTHER_TOKENS", str(tmp_path / "tokens")).replace("OTHER_SIZE", str(tmp_path / "size"))
    code, out, err = llamarl("train", *SMALL[:8], *settings.split("; "), "--run", tmp_path / "run")
    assert (code, out, err.count("\n")) == (2, "", 1) and told in err, err
    assert not (tmp_path / "run").exists()
