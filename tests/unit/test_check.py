"""What `llamarl check` says of a machine and of a job on it, for machines that are made up."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.cli import llamarl
from msgspec.structs import replace

from llamarl.check.finding import Finding, has_problem
from llamarl.check.forecast import describe_machine, forecast
from llamarl.check.job import check_job, check_places, prepared
from llamarl.check.machine import EXTRAS, GpuFacts, MachineFacts, judge_machine, machine_facts
from llamarl.config.file import load_config
from llamarl.jobs.memory_check import MemoryItem
from llamarl.machine import FreeMemory
from llamarl.plan.gpus import GPUS

GIB = 1 << 30
CPU = ["generator.device=cpu", "trainer.device=cpu"]
FINE = MachineFacts(
    python="3.12.1",
    torch="2.11.0",
    cuda="12.8",
    driver="570.86.15",
    gpus=(GpuFacts("NVIDIA H200", 140 * GIB, 139 * GIB),),
    cores=16,
    memory=FreeMemory(128 * GIB, 100 * GIB),
    shared=FreeMemory(64 * GIB, 64 * GIB),
    disk_folder="/data",
    disk_free_bytes=1000 * GIB,
    open_files=1 << 16,
    interfaces=("eth0",),
    extras=("wandb",),
)


def judged(what: str, **changes: Any) -> Finding:
    (found,) = [one for one in judge_machine(replace(FINE, **changes)) if one.what == what]
    return found


def test_a_machine_that_is_ready_has_no_complaints() -> None:
    found = list(judge_machine(FINE))
    assert {one.state for one in found} == {"ok"}
    assert {one.what for one in found} >= {
        "torch",
        "cuda:0",
        "CPU",
        "memory",
        "shared",
        "disk",
        "open files",
        "network",
    }
    assert judged("extras").told.startswith("installed: wandb; not installed: tensorboard, ")


@pytest.mark.parametrize(
    ("what", "state", "changes", "advice"),
    [
        ("torch", "problem", {"torch": "", "cuda_error": "libcudart.so"}, "pip install"),
        ("GPU", "warning", {"cuda": "", "gpus": ()}, "CUDA build"),
        ("GPU", "problem", {"gpus": (), "cuda_error": "driver too old"}, "nvidia-smi"),
        ("GPU", "ok", {"driver": "", "cuda": "", "gpus": ()}, ""),
        ("cuda:0", "warning", {"gpus": (GpuFacts("V100", 32 * GIB, 32 * GIB, (7, 0)),)}, "bf16"),
        ("cuda:0", "warning", {"gpus": (GpuFacts("H200", 140 * GIB, 20 * GIB),)}, "nvidia-smi"),
        ("memory", "warning", {"memory": FreeMemory(8 * GIB, 1 * GIB)}, "end other programs"),
        ("shared", "warning", {"shared": FreeMemory(64 << 20, 32 << 20)}, "--shm-size"),
        ("disk", "warning", {"disk_free_bytes": GIB}, "snapshots"),
        ("disk", "problem", {"disk_writable": False}, "--run DIR"),
        ("open files", "warning", {"open_files": 256}, "ulimit -n"),
        ("network", "ok", {"interfaces": ()}, ""),
    ],
)
def test_what_is_wrong_with_a_machine_is_told_with_what_to_do(
    what: str, state: str, changes: dict[str, Any], advice: str
) -> None:
    found = judged(what, **changes)
    assert found.state == state and advice in found.advice and found.line().startswith(state)


def test_this_machine_can_be_described(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path / "runs" / "new")
    assert facts.disk_folder == str(tmp_path) and facts.disk_free_bytes > 0 and facts.torch and facts.cores > 0
    assert set(facts.extras) <= EXTRAS.keys()


def test_every_extra_of_the_package_is_looked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == project["optional-dependencies"].keys() - {"dev", "docs"}


def places(*parts: tuple[str, float, bool], room: float, total: float | None = None) -> Finding:
    """The finding about a GPU with `room` GiB free, for parts of so many GiB that are sure or not."""
    items = [MemoryItem(what, "cuda:0", size * GIB, f"lower {what}", sure) for what, size, sure in parts]
    facts = replace(FINE, gpus=(GpuFacts("H200", (total or room) * GIB, room * GIB),))
    return next(one for one in check_places(load_config(None), items, facts) if one.what == "fits cuda:0")


def test_memory_is_compared_with_what_is_free() -> None:
    parts = (("weights", 10.0, True), ("activations", 5.0, False))
    assert places(*parts, room=20).state == "ok"
    assert places(*parts, room=12).state == "warning"
    held = places(*parts, room=8, total=80)
    assert held.state == "problem" and "(80.0 GiB in all)" in held.told and held.advice.endswith("lower weights")
    assert places(*parts, room=8).told == "DOES NOT FIT: takes 10.0 GiB at least and 15.0 GiB at most, of 8.0 GiB free"


def states(settings: list[str], run: Path | None = None, **changes: Any) -> dict[str, str]:
    config = load_config(None, [*CPU, *settings])
    _, refusal = prepared(config)
    found = check_job(config, replace(FINE, **changes), run, refusal)
    return {one.what: one.state for one in found}


def test_a_job_is_held_against_memory_disk_and_open_files(tmp_path: Path) -> None:
    fine = {"settings": "ok", "fits memory": "ok", "fits disk": "ok", "fits files": "ok"}
    assert states([]) == fine
    assert states([], tmp_path / "new") == fine
    assert states([], memory=FreeMemory(8 * GIB, 300 << 20)) == fine | {"fits memory": "problem"}
    assert states([], memory=FreeMemory(8 * GIB, 700 << 20)) == fine | {"fits memory": "warning"}
    assert states([], disk_free_bytes=1 << 20) == fine | {"fits disk": "problem"}
    assert states([], disk_free_bytes=13 << 20) == fine | {"fits disk": "warning"}
    nothing_saved = ["snapshots.every=0", "snapshots.at_end=none"]
    assert states(nothing_saved, disk_free_bytes=1 << 20) == fine
    assert states([], open_files=32) == fine | {"fits files": "problem"}
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert states([], tmp_path / "used") == fine | {"run folder": "problem"}
    assert states(["model.path=/nowhere"]) == {"settings": "problem"}
    assert states(["observe.loggers=nobody"])["settings"] == "problem"
    hosts = ["engine.kind=monarch", "engine.hosts=[127.0.0.1:1]"]
    assert states(hosts)["fits"] == "warning"


def test_states_of_teachers_are_held_against_the_disk() -> None:
    taught = [
        "teacher.path=tiny",
        "teacher.place=own",
        "algo.reward_weight=0",
        "snapshots.every=0",
        "snapshots.at_end=none",
    ]
    assert states(taught)["fits states"] == "ok"
    assert states(taught, disk_free_bytes=1 << 20)["fits states"] == "warning"
    assert "fits states" not in states([*taught, "teacher.kl=sampled"], disk_free_bytes=1 << 20)


def test_text_that_the_model_cannot_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text('{"prompt": "sort 31", "answer": "13"}\n' * 4)
    settings = ["task.kind=dataset", f"task.path={tmp_path}/words.jsonl", "evaluate.prompts=0", "schedule.updates=2"]
    config = load_config(None, [*CPU, *settings])
    job, refusal = prepared(config)
    assert job is not None
    found = [one for one in check_job(config, FINE, None, refusal, job.notes) if one.what == "note"]
    assert [one.state for one in found] == ["warning"] * len(found)
    assert any("has no token for, such as 's'" in one.told for one in found)


def test_times_are_predicted_by_a_description_of_the_machine() -> None:
    config = load_config(None, ["generator.tensor=1"])
    job, _ = prepared(load_config(None, CPU))
    assert job is not None
    time, better = forecast(config, FINE, job.prompts, None, "")
    assert time.state == "ok" and "s an update" in time.told and "datasheet of h200" in time.told
    assert "bench --calibrate" in time.advice and better.what == "better"
    measured = replace(GPUS["h200"], source="measured")
    exact, _ = forecast(config, FINE, job.prompts, measured, "fixed:8")
    assert "by the calibration of h200" in exact.told and not exact.advice and " to " not in exact.told
    (wrong,) = forecast(config, FINE, job.prompts, measured, "fixed:4000")
    assert wrong.state == "warning" and wrong.told.startswith("not predicted: --answer")


@pytest.mark.parametrize(
    "settings",
    [["evaluate.every=5"], ["model.lora.rank=8"], ["model.lora.rank=8", "model.base=fp8"]],
    ids=["evaluations", "LoRA", "fp8"],
)
def test_times_of_other_jobs_are_predicted_too(settings: list[str]) -> None:
    job, _ = prepared(load_config(None, CPU))
    assert job is not None
    time, better = forecast(load_config(None, settings), FINE, job.prompts, GPUS["h200"], "fixed:8")
    assert (time.state, better.what) == ("ok", "better"), (time, better)


def test_narrow_weights_that_do_not_pay_are_told() -> None:
    job, _ = prepared(load_config(None, CPU))
    assert job is not None
    narrow = load_config(None, ["generator.quantize=fp8"])
    found = {one.what: one for one in forecast(narrow, FINE, job.prompts, GPUS["h200"], "fixed:8")}
    assert found["precision"].state == "warning" and "do not pay below 8B" in found["precision"].told
    assert "generator.quantize=none" in found["precision"].advice


def test_a_machine_without_a_gpu_is_described_by_its_measured_limits() -> None:
    found = describe_machine(load_config(None, ["trainer.threads=1"]), replace(FINE, gpus=(), driver="", cuda=""))
    assert found.is_cpu and found.source == "limits" and found.threads == 1


def test_the_command_prints_lines_or_json_and_ends_with_its_verdict(tmp_path: Path) -> None:
    code, out, err = llamarl("check", "--run", tmp_path / "run")
    assert (code, err) == (0, "") and out.splitlines()[0] == "this machine" and out.splitlines()[-1] == "fine"
    code, out, _ = llamarl("check", "model.path=/nowhere", "--json")
    told = json.loads(out)
    assert code == 1 and told["fine"] is False
    assert told["job"] == [
        {
            "what": "settings",
            "state": "problem",
            "told": "model.path: no folder /nowhere; expected config.json and *.safetensors inside",
        }
    ]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["nothing.yaml"], "nothing.yaml: no such file"),
        (["trainer.lrr=1"], "trainer.lrr: unknown key"),
        (["seed=0", "--gpu", "h1000"], "--gpu h1000: unknown"),
        (["--gpu", "h100"], "--gpu: is about a job"),
        (["--answer", "fixed:8"], "--answer: is about a job"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args: list[str], told: str) -> None:
    code, out, err = llamarl("check", *args)
    assert code == 2 and out == "" and told in err and len(err.splitlines()) == 1


def test_a_problem_of_the_machine_alone_is_one_for_scripts() -> None:
    assert not has_problem(list(judge_machine(FINE)))
    with patch("llamarl.check.machine.os.access", return_value=False):
        assert llamarl("check").code == 1
