"""One job of TRL's GRPOTrainer, described by a JSON file, for others.py; for a Python that has trl and what llamarl needs.

    python benchmarks/claims/trl_job.py JOB.json RESULT.json

Rewards are by our own judge, with the same settings. The result has the seconds of every update, from the end of the one
before to the end of its optimizer step, with mean lengths and rewards as TRL logs them.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from msgspec import convert

from llamarl.config import RewardConfig
from llamarl.tasks.judge import Judge
from llamarl.types import Problem


def run(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    on_gpu, updates, batch = torch.cuda.is_available(), job["updates"], job["groups"] * job["samples"]
    judge, ends = Judge(convert(job["reward"], RewardConfig), job["own_scorers"]), list[float]()
    judge.prepare()

    def reward(completions: list[Any], answer: list[str], **columns: object) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        for number, (text, right) in enumerate(zip(texts, answer, strict=True)):
            judge.ask(number, text, Problem(prompt="", answer=right, scorer=job["own_scorers"][0]))
        judged = dict[Any, float]()
        while judge.num_pending:
            for key, judgment in judge.collect(1.0):
                assert judgment.status == "ok", judgment.reason
                judged[key] = judgment.reward
        return [judged[number] for number in range(len(texts))]

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            ends.append(time.monotonic())

        def on_step_end(self, *given: Any, **named: Any) -> None:
            ends.append(time.monotonic())
            left = (updates - len(ends) + 1) * (ends[-1] - ends[-2])
            print(
                f"update {len(ends) - 1} of {updates}: {ends[-1] - ends[-2]:.1f} s, about {left:.0f} s left", flush=True
            )

    args = GRPOConfig(
        output_dir=job["folder"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        max_steps=updates,
        per_device_train_batch_size=job["rows"],
        gradient_accumulation_steps=batch // job["rows"],
        num_generations=job["samples"],
        max_completion_length=job["max_new_tokens"],
        temperature=1.0,
        shuffle_dataset=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
        **job["how"],
    )
    trainer = GRPOTrainer(
        job["model"], reward_funcs=reward, args=args, train_dataset=Dataset.from_list(job["data"]), callbacks=[Clock()]
    )
    trainer.train()
    judge.close()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    return {
        "updates_s": [end - begin for begin, end in pairwise(ends)],
        "answer_tokens": [row["completions/mean_length"] * batch for row in rows],
        "reward": [row["reward"] for row in rows],
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
    }


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    found = run(json.loads(source.read_text()))
    target.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
