"""`lm-eval`, an evaluation harness that nobody here wrote: the same accuracy through the endpoint as `llamarl eval`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import model_folder

pytest.importorskip("lm_eval")

PROBLEMS = 64
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{gold}}}}"
generation_kwargs: {{until: ["<eos>"], max_gen_toks: 24, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOICES = """
task: likelier
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
target_delimiter: ""
doc_to_choice: "{{{{[said, wrong]}}}}"
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Problems of the shipped task, with what `llamarl eval` found."""
    folder = tmp_path_factory.mktemp("lm_eval")
    answers = folder / "answers.jsonl"
    command = ["eval", "tiny", "arithmetic", "generator.max_new_tokens=24", "--problems", str(PROBLEMS), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "llamarl", *command, "--answers", str(answers), "--device", "cpu"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    rows = [{"prompt": one["prompt"], "gold": one["gold"], "said": one["completion"], "wrong": "0"} for one in lines]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, json.loads(done.stdout)["accuracy"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "llamarl", "serve", "tiny", "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().split()[-1]
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


def run(folder: Path, url: str, name: str, task: str) -> dict[str, Any]:
    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")  # read when the package is imported
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    (folder / f"{name}.yaml").write_text(task.format(data=folder / "data.jsonl"))
    # Choices are scored by their tokens, so the harness needs the model's tokenizer.
    tokenizer = folder / "tokenizer"
    PreTrainedTokenizerFast.from_pretrained(model_folder("tiny")).save_pretrained(tokenizer)
    model = {
        "base_url": f"{url}/v1/completions",
        "model": "tiny",
        "tokenizer": str(tokenizer),
        "num_concurrent": 4,
        "max_length": 256,
    }
    found = simple_evaluate(
        model="local-completions",
        model_args=model,
        tasks=[name],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    results: dict[str, Any] = found["results"][name]
    return results


def test_generated_answers_have_the_accuracy_of_eval(evaluated: tuple[Path, float], url: str) -> None:
    folder, accuracy = evaluated
    assert 0 < accuracy < 1, "a measure that could not differ"
    assert run(folder, url, "sums", TASK)["exact_match,none"] == pytest.approx(accuracy)


def test_what_the_model_said_greedily_is_likelier_than_what_it_did_not(evaluated: tuple[Path, float], url: str) -> None:
    """Log-probs of given answers, by `echo`: the way that most tasks of the harness are scored."""
    assert run(evaluated[0], url, "likelier", CHOICES)["acc,none"] > 0.9
