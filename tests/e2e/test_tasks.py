"""RL on real tasks, end to end, with the tiny model; `llamarl eval` and `llamarl score` as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.brief import BRIEF, ROOT, TINY
from helpers.cli import llamarl

from llamarl import Job
from llamarl.config import Config
from llamarl.config.file import parse_config
from llamarl.errors import ConfigError, InputError, JobFailed
from llamarl.model.tokenizer import Tokenizer
from llamarl.types import bytes_to_tokens

DATA = ROOT / "tests" / "data"


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_arithmetic_trains_from_its_yaml(tmp_path: Path) -> None:
    code, _, err = llamarl("train", "examples/arithmetic.yaml", *BRIEF, "evaluate.every=1", "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    assert [row["version"] for row in rows_of(tmp_path / "run" / "evaluations.jsonl")] == [0, 1, 2]
    assert llamarl("audit", tmp_path / "run").code == 0


@pytest.mark.parametrize(("name", "engine"), [("", "inline"), ("", "local"), ("_lora", "local")])
def test_gsm8k_trains_from_its_yaml(tmp_path: Path, name: str, engine: str) -> None:
    settings = [*BRIEF, *TINY, f"engine={engine}", f"task.path={DATA / 'gsm8k'}", "task.held_out=0.2"]
    code, _, err = llamarl("train", f"examples/gsm8k_qwen{name}.yaml", *settings, "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["groups_trained"], summary["groups_dropped"]) == ("finished", 8, 0)
    assert (summary["score_failures"], summary["score_timeouts"]) == (0, 0)
    assert all(row["score_failures"] == 0 for row in rows_of(tmp_path / "run" / "timings.jsonl") if "update" in row)
    assert llamarl("audit", tmp_path / "run").code == 0


def test_a_mixture_is_judged_part_by_part_with_workers(tmp_path: Path) -> None:
    parts = [
        {"kind": "svamp", "path": str(DATA / "svamp"), "held_out": 0.2, "template": "{prompt}"},
        {"kind": "math", "path": str(DATA / "math"), "held_out": 0.2, "template": "{prompt}"},
    ]
    raw = yaml.safe_load("{engine: inline}")
    raw |= {"task": {"kind": "mixture", "parts": parts}, "evaluate": {"prompts": 4}}
    raw |= {"schedule": {"updates": 1, "groups_per_update": 6, "samples_per_group": 2}, "generator": {"slots": 16}}
    raw["generator"] |= {"max_prompt_tokens": 160, "max_new_tokens": 8}
    summary = Job(parse_config(raw)).run(tmp_path / "run")
    assert (summary.outcome, summary.groups_trained) == ("finished", 6)


FAULTY = """
import time
def half_broken(completion, answer, prompt):
    if "7" in prompt:
        raise ValueError("cannot read this")
    return 1.0
def broken(completion, answer, prompt):
    if prompt:  # the trial before the start passes
        assert completion == answer, "broken"
    return 1.0
"""


def test_a_chat_is_asked_in_the_models_own_template(tmp_path: Path) -> None:
    shutil.copytree(Config().model_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    settings = [f"model.path={tmp_path / 'model'}", "task.chat=true", "task.system=1+1=2", "task.template='{prompt}'"]
    job = Job.load("examples/arithmetic.yaml", [*BRIEF, *settings])
    group = job._prepared.prompts.group(0)
    assert Tokenizer.load(tmp_path / "model").decode(bytes_to_tokens(group.prompt_tokens).tolist()) == (
        f"1+1=2{group.problem.prompt}="
    )
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}{% if brief %}={% endif %}")
    brief = Job.load(
        "examples/arithmetic.yaml", [*BRIEF, *settings, "task.system=''", "task.chat_options={brief: true}"]
    )
    group = brief._prepared.prompts.group(0)
    assert Tokenizer.load(tmp_path / "model").decode(bytes_to_tokens(group.prompt_tokens).tolist()) == (
        f"{group.problem.prompt}="
    )
    plain = ["task.chat=false", "task.system=''", "task.chat_options={brief: true}"]
    with pytest.raises(ConfigError, match=r"task\.chat_options: cannot take effect without task\.chat=true"):
        Job.load("examples/arithmetic.yaml", [*BRIEF, *settings, *plain])
    code, _, err = llamarl("train", *BRIEF, "task.chat=true", "--run", tmp_path / "run")
    assert code == InputError.exit_code and "the model has no chat template; give it plain prompts" in err


def test_an_answer_that_cannot_be_judged_drops_its_group_and_is_counted_apart(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAULTY)
    settings = [*BRIEF, f"reward.scorer={tmp_path / 'mine.py'}:half_broken", "reward.max_failure_share=1", "seed=3"]
    summary = Job.load("examples/arithmetic.yaml", [*settings, "evaluate.prompts=0", "evaluate.every=0"]).run(
        tmp_path / "run"
    )
    assert summary.outcome == "finished"
    assert summary.groups_dropped > 0
    assert summary.groups_dropped + summary.groups_trained == 8
    assert summary.score_failures == 2 * 4 * summary.groups_dropped, "each answer is tried twice"
    told = sum(row["score_failures"] for row in rows_of(tmp_path / "run" / "timings.jsonl") if "update" in row)
    assert told == summary.score_failures
    assert "scorer failed: ValueError: cannot read this" in llamarl("audit", tmp_path / "run").out


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_broken_scorer_stops_the_job_with_the_reason(tmp_path: Path, engine: str) -> None:
    (tmp_path / "mine.py").write_text(FAULTY)
    settings = [*BRIEF, f"engine={engine}", f"reward.scorer={tmp_path / 'mine.py'}:broken", "reward.retries=0"]
    settings += ["reward.max_failure_share=0.05", "evaluate.prompts=0", "evaluate.every=0", "schedule.updates=50"]
    code, _, err = llamarl("train", "examples/arithmetic.yaml", *settings, "--run", tmp_path / "run")
    assert code == JobFailed.exit_code
    assert "answers could not be judged; more than reward.max_failure_share=0.05" in err
    assert err.count("\n") == 1
    audit = llamarl("audit", tmp_path / "run").out
    assert "closed: stopped: reward/0: " in audit


def test_a_scorer_that_fails_on_the_tasks_own_answer_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completion, answer, prompt):\n    raise KeyError('x')\n")
    code, _, err = llamarl("train", *BRIEF, f"reward.scorer={tmp_path / 'mine.py'}:score", "--run", tmp_path / "run")
    assert code == InputError.exit_code
    assert "fails on the first problem's own answer" in err and "KeyError" in err
    assert not (tmp_path / "run").exists()


def test_evaluation_says_how_sure_it_is() -> None:
    code, out, _ = llamarl("eval", "tiny", "arithmetic", "--problems", 64)
    assert code == 0
    assert out.startswith("accuracy   0.") and "95% interval" in out and "64 problems, 1 answer each" in out
    code, out, _ = llamarl("eval", "tiny", "arithmetic", "--problems", 40, "--samples", 4, "--json")
    found = json.loads(out)
    assert (code, found["problems"], found["samples"], found["failed"]) == (0, 40, 4, 0)
    assert [one["k"] for one in found["pass_at"]] == [1, 2, 4]
    assert found["pass_at"][0]["value"] == pytest.approx(found["accuracy"])
    values = [one["value"] for one in found["pass_at"]]
    assert values == sorted(values)
    assert all(one["interval"][0] <= one["value"] <= one["interval"][1] for one in found["pass_at"])


def test_evaluation_writes_its_answers_down(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    command = ["eval", "tiny", "arithmetic", "--problems", "6", "--samples", "3", "--json", "--answers", file]
    found = json.loads(llamarl(*command).out)
    rows = rows_of(file)
    assert sorted((row["problem"], row["sample"]) for row in rows) == [(p, n) for p in range(6) for n in range(3)]
    assert sum(row["reward"] for row in rows) / 18 == pytest.approx(found["accuracy"])
    assert all((row["completion"] == row["gold"]) == (row["reward"] == 1.0) for row in rows)
    code, _, err = llamarl(*command)
    assert (code, "--answers" in err, err.count("\n")) == (2, True, 1), "a file that is there was written over"


def test_evaluation_measures_what_training_measures(tmp_path: Path) -> None:
    """The same held-out problems, greedily: the two ways must agree to the last answer."""
    settings = [*BRIEF, "evaluate.prompts=100000", "evaluate.every=0", "schedule.updates=1"]
    summary = Job.load("examples/arithmetic.yaml", settings).run(tmp_path / "run")
    found = json.loads(llamarl("eval", "tiny", "arithmetic", "--json").out)
    assert found["accuracy"] == pytest.approx(summary.eval_before)


def test_evaluation_takes_the_fixed_test_problems_where_there_are_any() -> None:
    settings = [f"task.path={DATA / 'gsm8k'}", *TINY[2:]]
    assert json.loads(llamarl("eval", "tiny", "gsm8k", *settings, "--json").out)["problems"] == 20
    held_out = json.loads(llamarl("eval", "tiny", "gsm8k", *settings, "--split", "held_out", "--json").out)
    assert held_out["problems"] != 20
    code, _, err = llamarl("eval", "tiny", "gsm8k", f"task.path={DATA / 'gsm8k'}")
    assert code == InputError.exit_code and "no prompt fits into 32 tokens; raise it" in err
    code, _, err = llamarl("eval", "tiny", "arithmetic", "--split", "test")
    assert code == InputError.exit_code and "the task has no test problems" in err


def score(task: str, lines: bytes, *settings: str) -> list[dict[str, Any]]:
    """The verdicts; the exit code says whether all answers got a reward."""
    command = [sys.executable, "-m", "llamarl.cli", "score", task, *settings]
    done = subprocess.run(command, input=lines, capture_output=True, timeout=120, check=False)
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    failed = sum(verdict["reward"] is None for verdict in verdicts)
    assert done.returncode == (1 if failed else 0), done.stderr
    told = f"llamarl: {failed} of {len(verdicts)} answers got no reward"
    assert (told in done.stderr.decode()) == bool(failed)
    return verdicts


def line(completion: str, answer: str = "42") -> bytes:
    return json.dumps({"completion": completion, "answer": answer}).encode() + b"\n"


def test_score_gives_one_line_for_each_in_order() -> None:
    asked = [
        line(r"\boxed{9^{9^{9^{9}}}}"),  # once endless; the others must wait for their turn
        line(r"\boxed{6 \cdot 7}"),
        b"no json\n",
        b"\n",
        b"[1]\n",
        b'{"completion": 1}\n',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        line("\x00 \ud800 \udfff \u202e 41"),
        line("9" * 10_000_000),
        line(r"\boxed{41}"),
        line("42").rstrip(b"\n"),  # the last line may lack its end
    ]
    verdicts = score("math", b"".join(asked))
    assert all(set(verdict) == {"reward", "status", "seconds"} for verdict in verdicts)
    assert [verdict["status"] for verdict in verdicts] == ["ok", "ok", *["bad input"] * 6, *["ok"] * 4]
    assert [verdict["reward"] for verdict in verdicts] == [0.0, 1.0, *[None] * 6, 0.0, 0.0, 0.0, 1.0]


def test_score_answers_each_line_before_the_next_is_written() -> None:
    command = [sys.executable, "-m", "llamarl.cli", "score", "gsm8k"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for completion, reward in (("#### 42", 1.0), ("it is 41", 0.0), ("$42.00", 1.0)):
            process.stdin.write(line(completion))
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["reward"] == reward
        process.stdin.close()
    assert process.returncode == 0


def test_score_needs_neither_torch_nor_data() -> None:
    code = "import sys, io\nsys.argv = ['llamarl', 'score', 'gsm8k']\nfrom llamarl.cli import main\nmain()\n"
    code = code.replace("main()\n", "try:\n    main()\nfinally:\n    print('torch' in sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", code], input=line("42"), capture_output=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == b"False", done.stderr


def test_score_takes_a_scorer_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def score(completion, answer, prompt):\n    return len(completion)\n")
    (verdict,) = score("jsonl", line("four"), f"reward.scorer={tmp_path / 'mine.py'}:score")
    assert verdict["reward"] == 4.0


def test_score_ends_when_nobody_reads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llamarl.cli", "score", "gsm8k"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    started_s = time.monotonic()
    try:
        for _ in range(1000):
            process.stdin.write(line("42"))
        process.stdin.close()
    except BrokenPipeError:
        pass
    process.wait(timeout=60)
    assert time.monotonic() - started_s < 60
    assert b"Traceback" not in process.stderr.read()


def test_every_gold_answer_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the extracts that come with the tests; of all the data where $LLAMARL_DATA says where it is."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check_gold

    folder = Path(os.environ.get("LLAMARL_DATA", DATA))
    reports = list(check_gold.check(folder))
    assert {report.kind for report in reports} == {"gsm8k", "svamp", "math"}
    for report in reports:
        assert report.share >= 0.995, report.refused
