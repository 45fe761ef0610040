"""Jobs with a critic: it learns, bytes are the same whatever the engine, deaths and resumes change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.engines import ENGINE
from helpers.fingerprint import fingerprint
from helpers.killing import TINY, KillAt, Killed
from helpers.mortal_roles import FLAG, build_mortal_critic
from helpers.small_model import SPEC, small_model
from msgspec.structs import replace

from llamarl import Job, Run
from llamarl.builders.context import BuildContext
from llamarl.builders.critic import build_critic
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.errors import JobFailed
from llamarl.executors.executor import Executor
from llamarl.messages import BatchResult, Message, Report
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model.classifier import open_classifier
from llamarl.model.transformer import Transformer

UPDATES = 6
SHORT = [
    *TINY,
    *small_model(),
    f"schedule.updates={UPDATES}",
    "snapshots.every=2",
    "schedule.deterministic=true",
    "evaluate.prompts=8",
    "algo.advantage=gae",
    "algo.loss=ppo",
    "critic.lr=5e-3",
]
OWN = ["critic.place=own", "critic.device=cpu", "critic.threads=1"]
KINDS = {
    "hosted": ["schedule.samples_per_group=1", "algo.epochs=2", "algo.minibatches=2", "critic.head_start=2"],
    "own": [*OWN, "critic.gae_lambda=0.9", "critic.epochs=2", "algo.overlong=mask"],
}


def metrics_of(run: Path, role: str = "trainer") -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["role"] == role]


@pytest.fixture(scope="module", params=list(KINDS))
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("straight") / "run"
    Job(load_config(None, [*SHORT, *KINDS[request.param], "engine=inline"])).run(folder)
    return request.param, folder


def test_it_learns_from_every_batch_and_is_in_the_snapshot(straight: tuple[str, Path]) -> None:
    kind, folder = straight
    rows = metrics_of(folder, "critic" if kind == "own" else "trainer")
    assert len(rows) == UPDATES and rows[-1]["value_loss"] < rows[0]["value_loss"]
    assert rows[0]["value_mean"] == 0.0 < rows[-1]["value_mean"], "it begins at zero"
    trained = [row["trained_tokens"] for row in metrics_of(folder)]
    if kind == "hosted":
        assert trained[:2] == [0.0, 0.0] and all(trained[2:]), "it learns two updates before the policy moves"
        assert metrics_of(folder)[2]["optimizer_steps"] == rows[0]["value_steps"] == 4
        assert metrics_of(folder)[2]["lr"] < metrics_of(folder)[3]["lr"], "warm-up begins with the policy"
    else:
        assert all(trained)
    assert open_classifier(folder / f"snapshots/{UPDATES}/critic").shape == replace(
        SPEC, tied_head=False, value_head=True
    )
    kept = [one for group in Run(folder).rollouts.groups(3) for one in group.rollouts if one.status == "trained"]
    assert kept and all({"values"} <= one.columns.keys() for one in kept)
    assert any(one.advantage for one in kept), "the page shows what the critic has said"


def test_killed_and_resumed_equals_never_killed(straight: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = straight
    settings = [*SHORT, *KINDS[kind], "engine=inline"]
    with pytest.raises(Killed):
        Job(load_config(None, settings), builders={"trainer": KillAt(3)}).run(tmp_path / "run")
    Job.resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(folder, UPDATES)


def test_a_critic_that_dies_comes_back_from_the_snapshot_and_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*SHORT, *KINDS["own"]]
    monkeypatch.setenv(FLAG, str(tmp_path / "killed"))
    job = Job(load_config(None, [*settings, f"engine={ENGINE}"]), builders={"critic": build_mortal_critic})
    summary = job.run(tmp_path / "run")
    assert (tmp_path / "killed").exists() and summary.restarts == 1
    Job(load_config(None, [*settings, "engine=inline"])).run(tmp_path / "calm")
    disturbed, calm = fingerprint(tmp_path / "run", UPDATES), fingerprint(tmp_path / "calm", UPDATES)
    for one in (disturbed, calm):
        del one["rollouts"]  # of updates that count anew, kept rollouts have lost the trainer's log-probs
    assert disturbed == calm


def build_forgetful_critic(context: BuildContext) -> Executor:
    """The fault that is looked for: a critic that begins anew instead of coming back from the snapshot."""
    return build_critic(BuildContext(**{**vars(context), "snapshot": None}))


def test_a_critic_that_is_not_rewound_with_the_trainer_ends_the_job(tmp_path: Path) -> None:
    settings = [*SHORT, *KINDS["own"], "engine=inline"]
    with pytest.raises(Killed):
        Job(load_config(None, settings), builders={"trainer": KillAt(3)}).run(tmp_path / "run")
    with pytest.raises(JobFailed, match="critic: it is at update 0, but was given the batch of update 2"):
        Job.resume(tmp_path / "run", builders={"critic": build_forgetful_critic})


class Mute:
    """The fault that is looked for: a critic that leaves batches as they are."""

    def __init__(self, critic: Executor) -> None:
        self._critic = critic

    @property
    def idle(self) -> bool:
        return self._critic.idle

    def handle(self, message: Message) -> Iterable[Report]:
        for report in self._critic.handle(message):
            yield BatchResult(report.update, report.metrics) if isinstance(report, BatchResult) else report

    def work(self) -> Iterable[Report]:
        return self._critic.work()


def build_mute_critic(context: BuildContext) -> Executor:
    return Mute(build_critic(context))


def test_the_trainer_takes_no_other_estimate_where_the_critic_has_said_nothing(tmp_path: Path) -> None:
    job = Job(load_config(None, [*SHORT, *KINDS["own"], "engine=inline"]), builders={"critic": build_mute_critic})
    with pytest.raises(JobFailed, match="no critic has given it advantages"):
        job.run(tmp_path / "run")


def save(folder: Path, model: Transformer) -> Path:
    save_model(model, folder, carry_from=Config().model_folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("critic.path=nowhere", "critic.path: "),
        ("critic.path=OTHER_TOKENS", "critic.path: its tokenizer is another than the policy's (hashes "),
        ("critic.path=OTHER_SIZE", "critic.path: "),
        ("critic.path=SHORT", "critic.path: it has 8 positions, and answers may end at"),
        ("algo.gamma=1.5", "algo.gamma"),
        ("algo.gae_lambda=-1", "algo.gae_lambda"),
        ("critic.head_start=500", "critic.head_start: 500 of schedule.updates="),
        ("critic.data=2", "critic.data: cannot take effect with critic.place=trainer"),
        ("algo.reward_weight=0; teacher.path=tiny", "algo.advantage: gae cannot take effect with algo.reward_weight=0"),
        ("sft.path=examples/data/additions.jsonl", "algo.advantage: gae needs sampled answers"),
        ("model.lora.rank=4; model.adapter=x", "critic.path: a copy of the policy would leave out its adapters"),
        ("algo.advantage=auto; critic.lr=1e-3", "critic.lr: cannot take effect without a critic"),
        ("algo.advantage=auto; algo.gamma=0.9", "algo.gamma: cannot take effect without a critic"),
        ("schedule.samples_per_group=1; schedule.dynamic_sampling=2", "schedule.dynamic_sampling: cannot take effect"),
        ("critic.place=own; critic.tensor=5", "critic.tensor: 5 ranks cannot share"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_before_anything_starts(settings: str, told: str, tmp_path: Path) -> None:
    tokens = save(tmp_path / "tokens", random_model(SPEC)) / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace('"+": 11', '"-": 11').replace('"-": 12', '"+": 12'))
    config = save(tmp_path / "size", random_model(SPEC)) / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 48'))
    save(tmp_path / "short", random_model(replace(SPEC, max_positions=8)))
    for name, folder in (("OTHER_TOKENS", "tokens"), ("OTHER_SIZE", "size"), ("SHORT", "short")):
        settings = settings.replace(f"={name}", f"={tmp_path / folder}")
    given = ["algo.advantage=gae", *settings.split("; ")]
    code, out, err = llamarl("train", *SHORT[:8], *given, "--run", tmp_path / "run")
    assert (code, out, err.count("\n")) == (2, "", 1) and told in err, err
    assert not (tmp_path / "run").exists()
