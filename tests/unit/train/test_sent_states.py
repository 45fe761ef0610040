"""A teacher that sends its states teaches what one on the trainer's ranks does; states of other tokens are noticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.groups import completion, rollout_group
from helpers.models import SHAPE, VOCABULARY, lively_model
from helpers.training import CPU, cpu_learner
from msgspec.structs import replace

from llamarl.algo.batch import make_documents
from llamarl.algo.losses import Loss, aipo_loss, gspo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.model.checkpoint import save_model
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec
from llamarl.train.learner import Learner
from llamarl.train.packing import AnswerPlaces
from llamarl.train.policy import ComputeSettings, Policy, load_policy
from llamarl.train.sent_states import (
    GAP_MAX,
    SentTeachers,
    StateRows,
    StatesDiffer,
    StateSender,
    TeacherHead,
    states_file,
)
from llamarl.train.teacher import HostedTeacher, Teachers
from llamarl.types import Given, RolloutGroup

WIDE = replace(SHAPE, hidden_size=48, num_heads=6, num_kv_heads=3)
TIED = replace(SHAPE, tied_head=True)
PADDED = replace(SHAPE, vocab_size=VOCABULARY + 9)
ALGO = AlgoConfig(gspo_low=0.5, gspo_high=0.5)


def teacher_model(seed: int, shape: ModelSpec) -> Transformer:
    return lively_model(seed, shape)


def batch(names: Sequence[str]) -> list[RolloutGroup]:
    """Groups with teachers, and one that has none. Some answers have replies of tools inside."""
    rng, groups = np.random.default_rng(0), []
    for ordinal, name in enumerate([*names, "", *names]):
        answers = []
        for number in range(3):
            tokens = rng.integers(1, VOCABULARY, int(rng.integers(4, 12))).tolist()
            answer = completion(tokens)
            if number == 1:
                replied = completion(tokens[:-2])
                answer = replace(replied, tokens=answer.tokens, given=(Given(1, 2),))
            answers.append((answer, float(number)))
        group = rollout_group(rng.integers(1, VOCABULARY, 5).tolist(), answers, ordinal=10 + ordinal)
        groups.append(replace(group, prompt=replace(group.prompt, teacher=name)))
    return groups


def learner_with(teachers: Teachers | SentTeachers, policy: Policy, loss: Loss = aipo_loss) -> Learner:
    return Learner(policy, loss, settings=TrainerConfig(lr=1e-3), algo=ALGO, updates=10, teachers=teachers)


class Sent:
    """Teachers in folders, the trainer's heads of them, and what they have sent of a batch."""

    def __init__(self, shapes: Mapping[str, ModelSpec], folder: Path, forward: float = 0.0) -> None:
        self.how, self.folder = ComputeSettings(CPU, torch.float32, temperature=0.7, tokens_per_pack=60), folder
        for seed, (name, shape) in enumerate(shapes.items(), 5):
            save_model(teacher_model(seed, shape), folder / name)
        self.policy = cpu_learner(temperature=0.7, tokens_per_pack=60).policy
        self.frozen = {name: HostedTeacher(load_policy(folder / name, self.how), offload=False) for name in shapes}
        heads = {
            name: TeacherHead.load(folder / name, self.policy, torch.float32, offload=offload)
            for name, offload in zip(shapes, (True, False), strict=False)
        }
        self.sent = SentTeachers(heads, CPU, weight=0.6, forward=forward)
        self.hosted = Teachers(self.frozen, weight=0.6, forward=forward)

    def send(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        found = StateSender(self.frozen).send(groups, self.folder / "batch")
        self.sent.expect(self.folder / "batch", found)
        return found


@pytest.mark.parametrize("loss", [aipo_loss, gspo_loss])
@pytest.mark.parametrize("forward", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shapes", [{"a": WIDE}, {"a": TIED, "b": WIDE}, {"a": PADDED}], ids=["one", "two", "padded"])
def test_it_is_what_a_teacher_on_the_trainers_ranks_teaches(
    shapes: dict[str, ModelSpec], forward: float, loss: Loss, tmp_path: Path
) -> None:
    made = Sent(shapes, tmp_path, forward)
    groups = batch(list(shapes))
    far: list[dict[str, Any]] = []
    near: list[dict[str, Any]] = []
    for teachers, found, given in ((made.sent, far, made.send(groups)), (made.hosted, near, groups)):
        policy = cpu_learner(temperature=0.7, tokens_per_pack=60).policy
        learner = learner_with(teachers, policy, loss)
        found.append(learner.update(0, given).metrics)
        found.append({name: one.detach().clone() for name, one in policy.model.named_parameters()})
    for name in ("loss", "teacher_kl", "grad_norm", "teacher_tokens"):
        assert far[0][name] == pytest.approx(near[0][name], rel=1e-6, abs=1e-6), name
    for name, one in far[1].items():
        assert (one - near[1][name]).abs().max() <= 1e-6, name
    assert far[0][GAP_MAX] < 1e-5 and far[0]["teacher_kl"] > 0.1


def test_gradients_are_the_same_too(tmp_path: Path) -> None:
    made = Sent({"a": WIDE, "b": TIED}, tmp_path, 0.4)
    documents = make_documents(made.send(batch(["a", "b"])), version=0, algo=ALGO)
    far = learner_with(made.sent, cpu_learner(temperature=0.7, tokens_per_pack=60).policy)
    near = learner_with(made.hosted, cpu_learner(temperature=0.7, tokens_per_pack=60).policy)
    chosen = [number for number in range(len(documents)) if number % 3 != 1]
    for some in (None, chosen):
        far.accumulate(documents, chosen=some)
        near.accumulate(documents, chosen=some)
        wanted = near.optimizer.gradients()
        assert max(one.abs().max() for one in wanted.values()) > 1e-2
        for name, one in far.optimizer.gradients().items():
            assert (one - wanted[name]).abs().max() <= 1e-6, name


def test_no_row_is_that_of_a_reply_or_of_a_group_without_teacher() -> None:
    rows = StateRows.of(batch(["a"])[:1])
    sampled = [one.completion.num_tokens for one in batch(["a"])[0].rollouts]
    assert rows.total == sum(sampled) and rows.first == {(10, 0): 0, (10, 1): sampled[0], (10, 2): sum(sampled[:2])}
    places = AnswerPlaces(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2]))
    assert rows.numbers([(10, 2), (10, 1)], places).tolist() == [
        rows.first[10, 2],
        rows.first[10, 2] + 1,
        sampled[0] + 2,
    ]


# Planted faults


def shifted(path: Path) -> None:
    """The states of the token behind each: off by one row."""
    data = path.read_bytes()
    width = 4 * WIDE.hidden_size
    path.write_bytes(data[:24] + data[24 + width :] + data[24 : 24 + width])


@pytest.mark.parametrize("fault", ["shifted", "other head", "missing", "of another batch", "no log-probs"])
def test_states_of_other_tokens_or_another_head_end_the_job(fault: str, tmp_path: Path) -> None:
    made = Sent({"a": WIDE}, tmp_path)
    groups = made.send(batch(["a"]))
    path, told = (
        states_file(tmp_path / "batch", 0),
        "its states and head give other log-probs than it has sent, by up to",
    )
    if fault == "shifted":
        shifted(path)
    elif fault == "other head":
        save_model(teacher_model(9, WIDE), tmp_path / "other")
        made.sent = SentTeachers(
            {"a": TeacherHead.load(tmp_path / "other", made.policy, torch.float32, offload=True)}, CPU
        )
        made.sent.expect(tmp_path / "batch", groups)
    elif fault == "missing":
        path.unlink()
        told = "its states of this batch cannot be read"
    elif fault == "of another batch":
        StateSender(made.frozen).send(groups[:1], tmp_path / "batch")
        told = "its states of this batch cannot be read"
    else:
        with pytest.raises(StatesDiffer, match="group 10 came without the teacher's log-probs"):
            made.sent.expect(tmp_path / "batch", batch(["a"]))
        return
    with pytest.raises(StatesDiffer, match=told) as stopped:
        learner_with(made.sent, made.policy).update(0, groups)
    assert "\n" not in str(stopped.value)


def test_a_group_of_an_unknown_teacher_is_not_passed_over(tmp_path: Path) -> None:
    made = Sent({"a": WIDE}, tmp_path)
    with pytest.raises(LookupError, match="no teacher is named 'b'"):
        made.send(batch(["b"]))
