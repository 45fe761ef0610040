"""`llamarl sft`: the same line, run folder and bytes as any job; rows instead of rollouts, alone or beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.engines import ENGINE
from helpers.fingerprint import fingerprint
from helpers.killing import TINY, KillAt, Killed
from helpers.small_model import small_model

from llamarl import Job, Run
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import InputError

ROWS = "sft.path=examples/data/additions.jsonl"
SHORT = [
    *TINY,
    *small_model(),
    ROWS,
    "sft.epochs=0",
    "schedule.updates=6",
    "snapshots.every=2",
    "schedule.deterministic=true",
]
ALONE = [*SHORT, "evaluate.prompts=0"]
EVALUATED = [*SHORT, "evaluate.prompts=8", "evaluate.every=3", "schedule.probe_every=2"]
BESIDE = [*EVALUATED, "sft.share=0.5", "sft.weight=0.5"]
LORA = [*EVALUATED, "model.lora.rank=4", "trainer.lr=1e-3"]


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=[ALONE, EVALUATED, BESIDE, LORA], ids=["alone", "evaluated", "beside", "lora"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("straight") / "run"
    Job(load_config(None, [*request.param, "engine=inline"])).run(folder)
    return request.param, folder


def test_every_row_is_accounted_for_and_none_is_staler_than_a_rollout_may_be(straight: tuple[list[str], Path]) -> None:
    settings, folder = straight
    found = audit(read_ledger(folder / "ledger"))
    assert found.clean and found.trained == 24 and found.max_staleness <= 1
    if settings is BESIDE:
        assert all(0 < row["sft_rows"] < 4 for row in metrics_of(folder))
    else:
        assert all(row["sft_rows"] == 4 and row["sft_share"] == 1 for row in metrics_of(folder))
    assert all(("reward" in row) == (settings is BESIDE) for row in metrics_of(folder))
    assert all(row["sft_loss"] > 0 and row["skipped"] == 0 for row in metrics_of(folder))


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_rows_have_their_share_of_the_learned_tokens(share: float, tmp_path: Path) -> None:
    """Answers of four samples are longer than a row, and end by chance."""
    settings = [*SHORT, "evaluate.prompts=0", f"sft.share={share}", "schedule.updates=12", "engine=inline"]
    settings += ["schedule.groups_per_update=16", "schedule.samples_per_group=4", "algo.zero_variance=keep"]
    Job(load_config(None, settings)).run(tmp_path / "run")
    late = metrics_of(tmp_path / "run")[4:]
    assert sum(row["sft_share"] for row in late) / len(late) == pytest.approx(share, abs=0.06)
    assert all(row["sft_tokens"] / row["trained_tokens"] == pytest.approx(row["sft_share"]) for row in late)


def test_the_engine_changes_no_byte(straight: tuple[list[str], Path], tmp_path: Path) -> None:
    settings, folder = straight
    if settings in (EVALUATED, LORA):
        pytest.skip("the other two have all its parts")
    Job(load_config(None, [*settings, f"engine={ENGINE}"])).run(tmp_path / "run")
    assert fingerprint(tmp_path / "run", 6) == fingerprint(folder, 6)


@pytest.mark.parametrize("cut", [1, 3])
def test_killed_and_resumed_equals_never_killed(straight: tuple[list[str], Path], cut: int, tmp_path: Path) -> None:
    settings, folder = straight
    with pytest.raises(Killed):
        Job(load_config(None, [*settings, "engine=inline"]), builders={"trainer": KillAt(cut)}).run(tmp_path / "run")
    Job.resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run", 6) == fingerprint(folder, 6)


def test_a_run_without_the_record_of_its_rows_is_not_resumed_with_other_ones(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        Job(load_config(None, [*BESIDE, "engine=inline"]), builders={"trainer": KillAt(3)}).run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "row_share")
    with pytest.raises(InputError, match="begun by a version in which"):
        Job.resume(tmp_path / "run")


def test_rows_can_be_read_back_and_say_that_they_were_trained(straight: tuple[list[str], Path]) -> None:
    _, folder = straight
    rows = [group for group in Run(folder).rollouts.groups(5) if len(group.rollouts) == 1]
    assert rows and all(group.rollouts[0].status == "trained" for group in rows)
    assert all(eval_sum(group.prompt) == group.rollouts[0].text for group in rows)


def eval_sum(prompt: str) -> str:
    first, _, second = prompt.removesuffix("=").partition("+")
    return str(int(first) + int(second))


def test_the_card_of_its_policy_says_how_it_was_trained(straight: tuple[list[str], Path]) -> None:
    settings, folder = straight
    card = llamarl("push", folder, "ann/sums", "--dry-run").out
    method = "reinforcement learning and supervised fine-tuning" if settings is BESIDE else "supervised fine-tuning"
    assert f" by {method} with " in card and "- answers from data: `additions.jsonl`" in card
    assert f"llamarl {'train' if settings is BESIDE else 'sft'} job.yaml" in card


def some_rows(folder: Path, count: int) -> str:
    data = folder / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": "{n}+1=", "completion": "{n + 1}"}}\n' for n in range(count)))
    return f"sft.path={data}"


def test_the_loss_falls_and_the_command_ends_with_its_report(tmp_path: Path) -> None:
    settings = ["engine=inline", "evaluate.prompts=0", "evaluate.every=0", "trainer.device=cpu"]
    settings += [some_rows(tmp_path, 8), "sft.epochs=12", "schedule.groups_per_update=8"]
    code, out, err = llamarl("sft", "examples/sft.yaml", *settings, "--run", tmp_path / "run")
    assert (code, err) == (0, "") and "loss on the rows" in out and "reward  " not in out
    losses = [row["sft_loss"] for row in metrics_of(tmp_path / "run")]
    assert len(losses) == 12 and losses[-1] < 0.5 * losses[0]


def test_the_report_and_the_settings_say_how_many_updates_the_epochs_made(tmp_path: Path) -> None:
    settings = [*TINY, some_rows(tmp_path, 10), "sft.epochs=2", "engine=inline", "evaluate.prompts=0"]
    job = Job(load_config(None, settings))
    assert job.config.schedule.updates == 5
    assert job.run(tmp_path / "run").updates == 5
    assert load_config(tmp_path / "run" / "config.yaml").schedule.updates == 5
    assert audit(read_ledger(tmp_path / "run" / "ledger")).trained == 20


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "llamarl: sft.path: name the data, such as sft.path=chats.jsonl"),
        ([ROWS, "sft.share=0.5"], "llamarl: sft.share: 0.5 mixes rows into rollouts, which is `llamarl train`"),
        (["sft.weight=2"], "sft.weight: cannot take effect without data; set sft.path"),
        ([ROWS, "task.curriculum=true"], "sft.path: a curriculum counts groups of its own problems"),
        ([ROWS, "algo.reference_kl=1"], "algo.reference_kl: cannot take effect with sft.share=1"),
        ([ROWS, "schedule.window=4"], "sft.share: 1 trains rows in their order"),
        ([ROWS, "sft.messages_field=prompt"], "additions.jsonl:1: 'prompt' must be a list of {role, content}"),
        ([ROWS, "schedule.updates=7"], "llamarl: schedule.updates: 7, but sft.epochs=1 makes 21 updates of 96 rows"),
        (["sft.path=none.jsonl"], "sft.path: no file or folder"),
        ([ROWS, "sft.chat=true"], "the model has no chat template"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_before_anything_starts(
    settings: list[str], told: str, tmp_path: Path
) -> None:
    code, out, err = llamarl("sft", *settings, "--run", tmp_path / "run")
    assert (code, out, err.count("\n")) == (2, "", 1) and told in err, err
    assert not (tmp_path / "run").exists()
