"""`llamarl plan` and `llamarl simulate`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cli import llamarl

from llamarl.config.file import load_config
from llamarl.machine import GIB
from llamarl.model.hf_config import write_config
from llamarl.model_spec import SHAPES
from llamarl.plan.search import Plan
from llamarl.plan.workload import Question
from llamarl.rehearse import plans
from llamarl.rehearse.memory import RankMemory, RoleMemory

PLAN = [
    "plan",
    "--model",
    "llama-3.1-8b",
    "--gpus",
    "16",
    "--groups",
    "64",
    "--answer",
    "lognormal:median=300,sigma=1,max=4096",
]
SIMULATE = [
    "simulate",
    "--model",
    "llama-3.2-1b",
    "schedule.updates=6",
    "schedule.groups_per_update=8",
    "generator.max_new_tokens=256",
    "evaluate.prompts=0",
]


def test_a_plan_as_json_has_both_sides_and_the_gain() -> None:
    done = llamarl(*PLAN, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found.keys() == {"sync", "async", "gain", "narrow", "beside_s"}
    for side in ("sync", "async"):
        plan = found[side]
        assert plan.keys() >= {
            "step_s",
            "idle_share",
            "memory_gib",
            "layout",
            "max_staleness",
            "limit",
            "one_more_gpu_s",
        }
        assert plan["idle_share"].keys() == {"trainer", "generator"}
        assert 0 < plan["memory_gib"] < 80
        assert plan["layout"].keys() == {"placement", "trainer", "generator"}
        assert plan["formula_s"] == pytest.approx(plan["step_s"], rel=0.25), "the closed form is near the rehearsal"
    assert found["gain"] == pytest.approx(found["sync"]["step_s"] / found["async"]["step_s"])
    assert found["async"]["layout"]["trainer"]["gpus"] + found["async"]["layout"]["generator"]["gpus"] <= 16


def test_a_plan_has_one_time_for_a_step_in_the_table_and_in_the_job() -> None:
    out = llamarl(*PLAN).out
    (step,) = [line for line in out.splitlines() if line.split()[:1] == ["step"]]
    sync_s, async_s = (word for word in step.split() if word[0].isdigit())
    assert "closed form" not in out
    assert f"split: about {async_s} s an update" in out
    gain = next(line for line in out.splitlines() if line.startswith("gain"))
    assert float(gain.split()[1].rstrip("x")) == pytest.approx(float(sync_s) / float(async_s), abs=0.02)


def test_the_job_that_a_plan_writes_is_accepted_and_can_be_rehearsed(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("model:\n  path: models/llama-3.1-8b\ntrainer:\n  lr: 1e-6\n")
    job = tmp_path / "job.yaml"
    done = llamarl(*PLAN, "--config", base, "--out", job)
    assert done.code == 0, done.err
    config = load_config(job)
    assert config.trainer.lr == 1e-6
    assert config.model.path == "models/llama-3.1-8b"
    assert config.schedule.groups_per_update == 64
    assert config.placement == "split"
    again = llamarl("simulate", job, "schedule.updates=4", "--answer", "fixed:300", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["updates"] == 4


def test_the_plan_is_printed_with_what_limits_it() -> None:
    done = llamarl(*PLAN)
    assert done.code == 0, done.err
    for word in (
        "synchronous, co-located",
        "asynchronous",
        "limited by",
        "one GPU more",
        "waiting",
        "gain",
        "placement: split",
    ):
        assert word in done.out


def test_the_job_of_a_plan_is_the_faster_one() -> None:
    """On one GPU that holds little beside the trainer, taking turns on all of it wins."""
    done = llamarl("plan", "--model", "llama-3.1-8b", "--gpus", "1")
    assert "placement: colocated" in done.out and "gain               0." in done.out
    assert "offload8704" not in done.out


def test_what_does_not_fit_is_one_line_that_says_what_would() -> None:
    done = llamarl("plan", "--model", "llama-3.1-405b", "--gpus", "16")
    assert done.code == 2
    assert done.err.startswith("llamarl: nothing fits")
    assert done.err.endswith("64 GPUs\n")  # the fewest, not twice as many as there are
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--model", "llama-3.1-8c", "--gpus", "8"], "did you mean 'llama-3.1-8b'"),
        (["plan", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h300"], "did you mean"),
        (["plan", "--model", "qwen2.5-7b", "--gpus", "8", "--answer", "fixed:99999"], "has 32768 positions"),
        ([*SIMULATE, "--answer", "fixed:9999"], "generator.max_new_tokens=256"),
        ([*SIMULATE, "--prompt", "99999"], "the job takes at most generator.max_prompt_tokens="),
        (["simulate", "model.path=no/folder"], "name the model's shape with --model"),
        (
            ["simulate", "generator.replicas=0", "engine.join=127.0.0.1:5", "engine=monarch"],
            "0 generators cannot be simulated",
        ),
        ([*SIMULATE, "--timeline", "/no/such/folder/t.json"], "cannot be written"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str) -> None:
    done = llamarl(*arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_a_timeline_has_a_track_for_every_executor(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    assert llamarl(*SIMULATE, "--timeline", path).code == 0
    rows = json.loads(path.read_text())["traceEvents"]
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert names == {"generator/0", "reward/0", "trainer/0"}
    assert {"update", "decode", "publish", "load"} <= {row["name"] for row in rows}


def test_what_does_not_fit_into_memory_is_said() -> None:
    job = [*SIMULATE[:2], "llama-3.1-70b", *SIMULATE[3:]]
    assert "DOES NOT FIT" in llamarl(*job).out
    assert "DOES NOT FIT" not in llamarl(*SIMULATE, "generator.slots=64").out


def test_faults_show_the_share_of_useful_time() -> None:
    done = llamarl(
        *SIMULATE, "schedule.updates=40", "schedule.max_restarts=1000", "--mtbf", "0.003", "--restart", "1", "--json"
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["deaths"] > 0
    assert 0.1 < found["useful_share"] < 1


TINY_PLAN = ["plan", "--model", "qwen2.5-0.5b", "--gpus", "1", "--groups", "8", "--answer", "fixed:64"]


def test_built_ranks_are_json_with_json_and_adapters_are_built_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(plan: Plan, question: Question) -> list[RoleMemory]:
        """What the tests of rehearsals build at length."""
        assert plan.trainers.ranks.lora.rank == plan.generators.replica.lora.rank == 8
        return [RoleMemory("trainer", "", {"weights": 1.0}, [RankMemory(0, {"weights": size * GIB})])]

    monkeypatch.setattr(plans, "rehearse_plan", built)
    for size, code in ((2.0, 0), (200.0, 2)):
        done = llamarl(*TINY_PLAN, "--lora", "8", "--build", "--json")
        assert done.code == code, done.err
        found = json.loads(done.out)
        assert found.keys() == {"sync", "async", "gain", "narrow", "beside_s", "built", "problems"}
        assert found["built"][0]["built_bytes"] == size * GIB
        assert bool(found["problems"]) == bool(code) == ("llamarl: --build: trainer: takes" in done.err)


def test_what_side_by_side_would_take_is_told_where_roles_share_a_gpu(tmp_path: Path) -> None:
    """As `simulate` predicts of the job that is written, with engine.mps."""
    asked = ["plan", "--model", "qwen2.5-1.5b", "--gpu", "h200", "--groups", "32", "--answer", "fixed:256"]
    job = tmp_path / "job.yaml"
    found = json.loads(llamarl(*asked, "--gpus", "1", "--json", "--out", job).out)
    assert found["beside_s"] < 0.95 * found["async"]["step_s"]
    simulated = ["simulate", job, "--model", "qwen2.5-1.5b", "--gpu", "h200", "--gpus", "1", "--answer", "fixed:256"]
    beside = json.loads(llamarl(*simulated, "engine.mps=auto", "--prompt", "512", "--json").out)
    assert beside["update_s"] == pytest.approx(found["beside_s"], rel=0.03)
    assert f"about {found['beside_s']:.2f} s an update: engine.mps=auto" in llamarl(*asked, "--gpus", "1").out
    assert json.loads(llamarl(*asked, "--gpus", "2", "--json").out)["beside_s"] is None


def test_prompts_are_shared_unless_the_user_or_the_job_says_otherwise(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("trainer:\n  share_prompts: 'off'\n")
    asked, without = [*TINY_PLAN, "--prompt", "2048"], ["--share-prompts", "off"]
    shared, apart, kept = (llamarl(*asked, *more).out for more in ([], without, ["--config", job]))
    assert "share_prompts: 'off'" in apart and "share_prompts" not in shared
    times = [json.loads(llamarl(*asked, *more, "--json").out)["sync"]["step_s"] for more in ([], without)]
    assert times[0] < 0.5 * times[1], "2048 of 2112 tokens are the prompt's"
    assert kept.splitlines()[:12] == apart.splitlines()[:12] != shared.splitlines()[:12]
    again = llamarl(*asked, "--config", job, "--share-prompts", "auto").out
    assert again.splitlines()[:12] == shared.splitlines()[:12] and "share_prompts: auto" in again
    job.write_text("trainer:\n  share_prompts: 'on'\n")
    assert "share_prompts: 'on'" in llamarl(*asked, "--config", job).out


def test_a_model_may_be_a_folder_or_a_config_json(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write_config(SHAPES["qwen2.5-0.5b"], folder)
    rest = ["--gpus", "2", "--groups", "8", "--answer", "fixed:64"]
    named = llamarl("plan", "--model", "qwen2.5-0.5b", *rest, "--json")
    for model in (folder, folder / "config.json"):
        assert llamarl("plan", "--model", model, *rest, "--json").out == named.out
        assert f"path: {folder}\n" in llamarl("plan", "--model", model, *rest).out
    assert "path: Qwen/Qwen2.5-0.5B\n" in llamarl("plan", "--model", "Qwen/Qwen2.5-0.5B", *rest).out
    broken = llamarl("plan", "--model", tmp_path / "none.json", *rest)
    assert (broken.code, broken.err.count("\n")) == (2, 1)


def test_help_lists_the_known_models() -> None:
    text = "".join(llamarl("plan", "--help").out.replace("│", " ").split())  # long lines are wrapped
    assert all(name in text for name in SHAPES)
