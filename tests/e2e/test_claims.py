"""The scripts behind docs/results.md run from end to end, share their runs, and read them rightly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers.brief import BRIEF, ROOT, TINY

from llamarl.observe.run_lock import RunLock

SETTINGS = [
    *BRIEF,
    *TINY,
    f"task.path={ROOT / 'tests' / 'data' / 'gsm8k'}",
    "reward.scorer=length",
    "reward.answer_from=auto",
    "schedule.updates=9",
    "schedule.groups_per_update=1",
    "evaluate.prompts=4",
    "evaluate.every=8",
]


def claim(name: str, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    where = ["--runs", str(folder / "runs"), "--results", str(folder / "results")]
    command = [sys.executable, str(ROOT / "benchmarks" / "claims" / f"{name}.py"), *where, *SETTINGS, *settings]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_claims_run_read_and_share_their_arms(tmp_path: Path) -> None:
    names = ["learns", "against_trl", "weight_sync", "async_against_sync"]
    ended = {name: claim(name, tmp_path) for name in names}
    assert {name: run.returncode for name, run in ended.items()} == dict.fromkeys(names, 0), ended
    assert [name for name, run in ended.items() if "== async:" in run.stdout] == ["learns"]
    figures = {name: json.loads((tmp_path / "results" / f"{name}.json").read_text()) for name in names}
    for name in names:
        assert ElementTree.parse(tmp_path / "results" / f"{name}.svg").getroot().tag.endswith("svg")
        assert figures[name]["command"].startswith(f"python {ROOT / 'benchmarks' / 'claims' / name}.py engine=inline")
    assert [len(figures["learns"]["accuracy"]), figures["learns"]["met"]] == [3, False]  # versions 0, 8 and 9
    assert figures["against_trl"]["window"]["last"] == 7, "updates with an evaluation among them were taken for steady"
    assert figures["async_against_sync"]["sync"]["trainer_waits"] > 0.1
    assert figures["async_against_sync"]["async"]["gpu_idle"] is None
    assert 0 < figures["weight_sync"]["share"] < 1
    made_on = tmp_path / "runs" / "sync.made_on.json"
    made_on.write_text(json.dumps({**json.loads(made_on.read_text()), "gpu": "another"}))
    (tmp_path / "runs" / "async.made_on.json").write_text(made_on.read_text())
    claim("async_against_sync", tmp_path)
    told = json.loads((tmp_path / "results" / "async_against_sync.json").read_text())
    assert told == {**figures["async_against_sync"], "gpu": "another"}, "what was made elsewhere counts as made here"
    other = claim("learns", tmp_path, "seed=1")
    assert (other.returncode, "was made with other settings" in other.stderr) == (1, True)


BESIDE = ["--beside", "2", "--math", str(ROOT / "tests" / "data" / "math")]


def test_of_several_arms_at_a_time_each_line_has_its_name_and_one_that_fails_leaves_the_others(tmp_path: Path) -> None:
    """The small MATH of the tests has no test problems, so it cannot be asked."""
    ended = claim("on_par", tmp_path, *BESIDE, "--at-most", "4", "schedule.updates=1", "schedule.max_staleness=0")
    assert ended.returncode == 1
    assert ".MATH-500: the model could not be asked\n" in ended.stderr
    assert "is the next to be made; the same command goes on with it" in ended.stderr
    first = tmp_path / "runs" / "on_par" / "S0-0"
    assert json.loads((first / "summary.json").read_text())["policy"] == "snapshots/1/policy"
    assert not (first / "snapshots" / "1" / "trainer").exists()
    assert first.with_name("S0-0.beside").read_text() == "2\n"
    begun = [line for line in ended.stdout.splitlines() if not line.startswith(("==", "on_par/"))]
    assert not begun, "a line that says not whose it is"


def test_predictions_are_held_against_runs_that_had_the_gpu_to_themselves(tmp_path: Path) -> None:
    runs = [ROOT / "benchmarks" / "runs" / name for name in ("h200_sync", "h200_async")]
    script = ROOT / "benchmarks" / "claims" / "predicted.py"
    command = [sys.executable, str(script), "--model", "qwen2.5-1.5b", "--results", str(tmp_path), *map(str, runs)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads((tmp_path / "predicted.json").read_text())
    assert figures["met"] and figures["largest"] < 0.08
    assert "planned_s" in figures["runs"]["h200_sync"] and "planned_s" not in figures["runs"]["h200_async"]


def test_a_run_that_was_broken_off_is_made_anew(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "async"
    run.mkdir(parents=True)
    (run / "left").touch()
    brief = ("schedule.updates=1", "evaluate.every=0")
    (tmp_path / "runs" / "async.settings.json").write_text(json.dumps([*SETTINGS, *brief]))
    lock = RunLock(run)
    busy = claim("learns", tmp_path, *brief)
    assert (busy.returncode, "another process is making this run" in busy.stderr) == (1, True)
    lock.release()
    ended = claim("learns", tmp_path, *brief)
    assert ended.returncode == 0, ended.stderr
    assert f"== {run}: was broken off; it is made anew\n" in ended.stdout and "== async: took " in ended.stdout
    assert not (run / "left").exists()


def test_what_is_left_is_told_by_the_runs_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    import arms

    options = arms.Options(tmp_path, tmp_path, (), 9, tmp_path)
    options.expect("one", "two", "three")
    options.ended("one", 60.0)
    options.ended("two", 120.0)
    options.ended("three", 1.0)
    assert capsys.readouterr().out.splitlines() == [
        "== one: took 1 min 00 s; 2 more, about 2 min 00 s left",
        "== two: took 2 min 00 s; 1 more, about 1 min 30 s left",
        "== three: took 1 s",
    ]


def test_a_claim_is_tried_with_the_tiny_model_and_leaves_the_results_alone(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "claims" / "learns.py"
    settings = ["engine=inline", "schedule.updates=1"]
    command = [sys.executable, str(script), "--tiny", *settings]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "runs" / "tiny" / "learns.json").read_text())
    assert found["command"] == f"python {script} --tiny {' '.join(settings)}" and found["summary"]["updates"] == 1


def test_a_series_of_runs_can_be_spread_over_commands(tmp_path: Path) -> None:
    ended = claim("long_tails", tmp_path, "--at-most", "0")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "long_sync: is the next to be made; the same command goes on with it\n"


def test_runs_of_the_same_job_count_by_their_updates_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    import long_tails

    def run(updates: int, seconds: float, tokens: float, waits: float, idle: float | None = 0.0) -> dict[str, object]:
        row = {"first": 5, "last": 4 + updates, "start_s": 10.0, "end_s": 10.0 + seconds, "answer_tokens": tokens}
        return {**row, "trainer_waits": waits, "generator_waits": 0.0, "gpu_idle": idle}

    both = long_tails.over_all([run(10, 30.0, 100.0, 0.1), run(20, 90.0, 400.0, 0.3)])
    assert (both["update_s"], both["answer_tokens"], both["trainer_waits"]) == pytest.approx((4.0, 300.0, 0.25))
    assert long_tails.over_all([run(1, 1.0, 1.0, 0.0, None), run(1, 1.0, 1.0, 0.0)])["gpu_idle"] is None


def test_a_long_run_is_made_in_stages_that_go_on_from_each_other(tmp_path: Path) -> None:
    brief = [
        "--updates",
        "2",
        "--stage",
        "1",
        "task.kind=gsm8k",
        "schedule.max_staleness=1",
        "schedule.window=1",
        "generator.kv_pages=0",
        "reward.workers=1",
    ]
    first = claim("long_math", tmp_path, *brief, "--at-most", "1")
    assert first.returncode == 1 and "updates to 2: is the next to be made" in first.stderr, first.stderr
    done = claim("long_math", tmp_path, *brief)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("== long_math/plain-aipo, updates to 2: llamarl train") == 1 and "--resume" in done.stdout
    found = json.loads((tmp_path / "results" / "long_math.json").read_text())
    assert found["updates"] == 2 and [update for update, _ in found["series"]["reward"]] == [0, 1]


def test_a_small_long_run_is_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is deterministic, and such a run cannot be made longer after its end."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    import long_math
    from arms import Options

    stages = []
    monkeypatch.setattr(long_math, "made_in_stages", lambda _arm, *made: stages.append(made[:2]))
    monkeypatch.setattr(long_math, "read", lambda _record: {})
    for small in (True, False):
        options = Options(Path("runs"), Path("results"), (), 1, Path("math"), small=small)
        long_math.trained(long_math.arm("one", small), options)
    assert stages == [(300, 300), (300, 100)]


@pytest.mark.parametrize(
    ("accuracies", "collapsed"), [((0.4, 0.7, 0.5), False), ((0.4, 0.15, 0.3), True), ((0.4, 0.9, 0.4), True)]
)
def test_a_fall_is_a_collapse_also_if_some_of_it_comes_back(
    accuracies: tuple[float, ...], collapsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    import long_math

    summary = {"updates": 100, "staleness_mean": 8.0}
    record: Any = SimpleNamespace(accuracy=dict(enumerate(accuracies)), summary=summary, metrics={})
    found = long_math.read(record)
    assert found["collapsed"] is collapsed and found["gain"] == accuracies[-1] - accuracies[0]


def test_seeds_are_compared_by_their_mean_and_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    import seeds

    runs = [{"accuracy": [(0, 0.1), (5, value)], "staleness": 1.0} for value in (0.5, 0.6, 0.7)]
    found = seeds.summed_up(runs)
    assert (found["versions"], found["mean"]) == ([0, 5], pytest.approx([0.1, 0.6]))
    assert found["deviation"] == pytest.approx([0.0, 0.1])
    gap, half = seeds.difference([0.5, 0.6, 0.7], [0.4, 0.5, 0.6])
    assert (gap, half) == pytest.approx((0.1, 2.78 * (2 * 0.01 / 3) ** 0.5))
    assert len({arm.name for arm in seeds.arms(small=False).values()}) == 6
    assert seeds.arms(small=False)["async", 0].name == "async", "the run of claim 1 is shared"


def test_small_claims_have_figures_of_their_own(tmp_path: Path) -> None:
    """Beside those of a GPU, which a measurement on a CPU must never take the place of."""
    settings = ("task.path=''", "trainer.lr=1e-9", "algo.zero_variance=keep")
    ended = claim("shared_prompts_learn", tmp_path, "--small", *settings)
    assert ended.returncode == 0, ended.stderr
    assert "shared_prompts_small/off: llamarl train" in ended.stdout
    assert sorted(path.name for path in (tmp_path / "results").glob("*.json")) == ["shared_prompts_learn_small.json"]
    found = json.loads((tmp_path / "results" / "shared_prompts_learn_small.json").read_text())
    assert found["task"] == "SmolLM2-135M on sums" and found["on"]["shared_tokens"] > 0 == found["off"]["shared_tokens"]


def test_small_claims_need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    import arms
    import long_math
    import long_math_fp8
    import lora_ranks
    import seeds
    import shared_prompts_learn

    from llamarl.config.file import load_config

    small = [*seeds.arms(small=True).values(), *lora_ranks.arms(small=True).values(), long_math.arm("a", True)]
    small += shared_prompts_learn.arms(small=True).values()
    assert (len({arm.name for arm in small}), len(small)) == (21, 21)
    small += [long_math.arm(name, True, *settings) for name, *settings in long_math_fp8.ARMS.values()]
    for arm in small:
        config = load_config(arm.config, list(arm.settings))
        assert config.model.path == "tiny" or "smollm2" in config.model.path, arm.name
        load_config(arm.config, [*arm.settings, *arms.TINY])
    large = [*seeds.arms(small=False).values(), *lora_ranks.arms(small=False).values(), long_math.arm("a", False)]
    assert not {arm.name for arm in small} & {arm.name for arm in large}, (
        "a run on a CPU would be taken for one on a GPU"
    )


def test_a_cost_that_grows_without_a_named_limit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    import growth_of_cost as growth

    free: dict[str, object] = {
        "tail_share": 0.0,
        "weights_share": 0.0,
        "waits_for_shards": False,
        "exchange_share": 0.0,
    }
    free |= {"offload": False, "recompute": "none", "precision": "bf16"}
    plain: dict[str, object] = {"trainer_waits": 0.01, "generator_waits": 0.02, "max_staleness": 1, "causes": free}
    assert growth.limits_of(plain) == []
    named = [
        ("weight transfer", {**plain, "causes": {**free, "weights_share": 0.2}}),
        ("smallest batch per GPU", {**plain, "causes": {**free, "waits_for_shards": True}}),
        ("split of the GPUs: generators wait 30%", {**plain, "generator_waits": 0.3}),
        ("longest answer", {**plain, "generator_waits": 0.3, "trainer_waits": 0.2}),
    ]
    for words, one in named:
        (told,) = growth.limits_of(one)
        assert told.startswith(words)
    rows = [
        {"gpus": gpus, "sync": None, "async": {"gpu_s_per_answer": cost, "limits": limits}}
        for gpus, cost, limits in [(8, 1.0, []), (64, 1.04, []), (256, 1.2, []), (1024, 2.0, ["weight transfer"])]
    ]
    assert growth.judged(rows)["unnamed"] == {"async, 256 GPUs": pytest.approx(0.2)}


@pytest.mark.parametrize("values", [[(0.0, 1.0)], [(0.0, 0.0), (0.0, 0.0)], [(-3.0, 1e6), (7.0, -1e-6)]])
def test_plots_take_any_numbers(values: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    import plot

    ElementTree.fromstring(plot.lines("a < b", "x", "y", {"one & two": values}))
    ElementTree.fromstring(plot.bars("a < b", "y", {f"<{number}>": value for number, (_, value) in enumerate(values)}))


def test_the_committed_pictures_can_be_drawn_from_the_committed_figures(tmp_path: Path) -> None:
    kept = ROOT / "benchmarks" / "claims" / "results"
    for file in kept.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    redraw = [sys.executable, str(ROOT / "benchmarks" / "claims" / "redraw.py"), str(tmp_path)]
    subprocess.run(redraw, check=True)
    drawn = {file.name: file.read_bytes() for file in tmp_path.glob("*.svg")}
    assert drawn.keys() == {file.name for file in kept.glob("*.svg")}
    subprocess.run(redraw, check=True)
    assert drawn == {file.name: file.read_bytes() for file in tmp_path.glob("*.svg")}, (
        "the same data give the same bytes"
    )
