"""Rewards that models give, end to end: a tiny reward model on the line, and an LLM judge behind an endpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.cli import llamarl
from helpers.groups import completion, rollout_group
from helpers.killing import KillAt, Killed
from helpers.stub_judge import Request, stub_judge
from safetensors.torch import load_file, save_file

from llamarl import Job
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.engine.group_store import GroupStore
from llamarl.model.classifier import load_classifier
from llamarl.model.tokenizer import Tokenizer
from llamarl.types import RolloutGroup, bytes_to_tokens

SMALL = [
    "schedule.groups_per_update=4",
    "schedule.samples_per_group=4",
    "schedule.updates=2",
    "generator.slots=16",
    "evaluate.prompts=4",
    "trainer.warmup_updates=0",
    "schedule.probe_every=0",
]


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """The shipped model with a score instead of its head."""
    folder = tmp_path / "reward_model"
    shutil.copytree(Config().model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    save_file({**weights, "score.weight": torch.randn(1, 128, generator=generator)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_reward_model_judges_a_job(reward_model: Path, engine: str, tmp_path: Path) -> None:
    """What is trained on is what the model gives when it is asked again; the scorer's part is added to it."""
    weigh = ["reward_model.weight=0.5", "reward.combine={exact: 2.0}"]
    settings = [f"engine={engine}", f"reward_model.path={reward_model}", *weigh, "snapshots.every=0", *SMALL]
    settings += ["schedule.max_staleness=0"]
    summary = Job(load_config(None, settings)).run(tmp_path / "run")
    assert (summary.outcome, summary.updates, summary.groups_dropped) == ("finished", 2, 0)
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean
    found = groups_in(tmp_path / "run")
    assert found
    classifier, tokenizer = (
        load_classifier(reward_model, dtype=torch.float32, device=torch.device("cpu")),
        Tokenizer.load(reward_model),
    )
    for group in found:
        for rollout in group.rollouts:
            text = tokenizer.decode(bytes_to_tokens(rollout.completion.tokens).tolist())
            (score,) = classifier.scores([tokenizer.encode(group.prompt.problem.prompt + text)])
            right = 2.0 * (text.strip() == group.prompt.problem.answer)
            assert rollout.reward == pytest.approx(right + 0.5 * score, abs=1e-4)


def groups_in(folder: Path) -> list[RolloutGroup]:
    store = GroupStore(folder / "groups")
    try:
        return [store.get(ordinal) for ordinal in range(8) if ordinal in store]  # type: ignore[misc]
    finally:
        store.close()


def test_a_job_with_a_reward_model_is_resumed_bit_for_bit(reward_model: Path, tmp_path: Path) -> None:
    """What the scorer had judged and the model had not is never taken for judged."""
    settings = [
        "engine=inline",
        f"reward_model.path={reward_model}",
        "reward_model.squash=true",
        "snapshots.every=1",
        *SMALL,
    ]
    config = load_config(None, [*settings, "schedule.updates=4", "schedule.deterministic=true"])
    Job(config).run(tmp_path / "straight")
    with pytest.raises(Killed):
        Job(config, builders={"trainer": KillAt(2)}).run(tmp_path / "killed")
    Job.resume(tmp_path / "killed")
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("straight", "killed")]
    assert metrics[0] == metrics[1]


def test_only_what_the_last_role_has_judged_goes_to_disk(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    store.put(rollout_group([1], [(completion([2]), 1.0)], ordinal=0), passing=True)
    store.put(rollout_group([1], [(completion([2]), 1.0)], ordinal=1))
    store.close()
    assert GroupStore(tmp_path).scored == {1}


def test_what_is_no_reward_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = llamarl("train", f"reward_model.path={Config().model_folder}", "--run", tmp_path / "run")
    assert done.code == 2
    assert "reward_model.path" in done.err and "is no reward model" in done.err
    assert not (tmp_path / "run").exists()


def test_an_llm_judges_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a point for every digit; now and then it says something else, and that is no verdict but a counted failure."""
    rubric, asked = tmp_path / "rubric.md", 0
    rubric.write_text("Long numbers are good numbers.")
    monkeypatch.setenv("JUDGE_KEY", "sk-not-to-be-seen")

    def behave(request: Request) -> str:
        nonlocal asked
        asked += 1
        return "Hm." if asked % 7 == 3 else f"SCORE-{request.nonce}: {min(10, 5 * len(request.answer))}"

    with stub_judge(behave) as (url, seen):
        settings = [
            "engine=inline",
            "reward.scorer=llm_judge",
            "reward.workers=2",
            f"llm_judge.url={url}",
            "llm_judge.model=stub",
            f"llm_judge.rubric={rubric}",
            "llm_judge.key_env=JUDGE_KEY",
            *SMALL,
        ]
        summary = Job(load_config(None, settings)).run(tmp_path / "run")
    assert (summary.outcome, summary.updates) == ("finished", 2)
    assert summary.score_failures > 0 and summary.groups_trained + summary.groups_dropped == 8
    assert {request.key for request in seen} == {"Bearer sk-not-to-be-seen"}
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"sk-not-to-be-seen" not in written
    assert 0.0 < summary.reward_last <= 1.0
