"""Does it pay to guess how answers go on, where few run? Tokens a second with and without drafts (`generator.draft`).

    python benchmarks/drafts.py [CONFIG] [KEY=VALUE ...] [--rows 8,32] [--draft 0,8,auto] [--json result.json]
    python benchmarks/drafts.py examples/gsm8k_qwen.yaml model.path=... task.path=...      # on a GPU
    python benchmarks/drafts.py                                                            # the default job, on any machine

Two cases, each with so many answers at once that all run from the beginning to the end: an evaluation (one greedy answer to
each problem), which is asked again as later evaluations of a job ask it, and groups of 8 answers at the job's temperature.
The decoder has answered other problems before, so that graphs are captured. In fp32 on a CPU the answers must be the same
with and without drafts; on a GPU a step with another number of rows rounds otherwise, and the share of equal tokens is told.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.drafting import DraftCounts
from llamarl.generate.drafts import DraftChoice
from llamarl.generate.limits import Limits
from llamarl.generate.prompting import prompt_tokens
from llamarl.model.checkpoint import load_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.registry import open_task
from llamarl.train.speed import synchronize
from llamarl.types import CompletionGroup, Problem, PromptGroup, Sampling, tokens_to_bytes

SAMPLES = 8
Draft = int | Literal["auto"]


@dataclass(frozen=True)
class Row:
    case: str
    answers: int
    draft: Draft
    tokens_per_s: float
    tokens_per_step: float  # of one answer; 1 without drafts
    accepted_share: float  # of the drafted tokens
    same_share: float  # of the tokens: as without drafts, up to the first that differs in each answer


class Asking:
    """A decoder of the job's model with room for `answers` and their drafts."""

    def __init__(self, config: Config, answers: int, draft: Draft, device: torch.device) -> None:
        settings, self._tokenizer = config.generator, Tokenizer.load(config.model_folder)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        drafts = DraftChoice(draft)
        limits = Limits(
            slots=answers * (1 + drafts.most),
            max_prompt_tokens=settings.max_prompt_tokens,
            max_new_tokens=settings.max_new_tokens,
        )
        self._decoder = ContinuousDecoder(
            load_model(config.model_folder, dtype=dtype, device=device),
            limits,
            eos_ids=self._tokenizer.eos_ids,
            seed=0,
            drafts=drafts,
        )
        self._decoder.version = 0
        self._device, self._ordinal, self._new = device, 0, settings.max_new_tokens

    def timed(
        self, problems: Sequence[Problem], samples: int, temperature: float
    ) -> tuple[float, list[CompletionGroup]]:
        """Seconds until all are answered, and the answers."""
        sampling = Sampling(samples=samples, max_new_tokens=self._new, temperature=temperature)
        for problem in problems:
            tokens = tokens_to_bytes(prompt_tokens(self._tokenizer, problem))
            self._decoder.add(PromptGroup(self._ordinal, problem, tokens, sampling, kind="evaluation"))
            self._ordinal += 1
        self.take_counts()
        synchronize(self._device)
        began_s, done = time.perf_counter(), list[CompletionGroup]()
        while not self._decoder.idle:
            done += self._decoder.step()
        synchronize(self._device)
        return time.perf_counter() - began_s, sorted(done, key=lambda group: group.prompt.ordinal)

    def take_counts(self) -> DraftCounts:
        drafting = self._decoder.drafting
        return DraftCounts() if drafting is None else drafting.take_counts()


def measure(config: Config, answers: int, draft: Draft, device: torch.device) -> list[tuple[Row, list[bytes]]]:
    asking, task = Asking(config, answers, draft, device), open_task(config)
    groups, rows = max(1, answers // SAMPLES), list[tuple[Row, list[bytes]]]()
    problems = task.evaluation(2 * answers + 2 * groups, config.evaluate.split)
    evaluated, grouped = problems[: 2 * answers], problems[2 * answers :]
    samples, temperature = min(SAMPLES, answers), config.generator.temperature
    asking.timed(evaluated[answers:], 1, 0.0)
    asking.timed(grouped[groups:], samples, temperature)
    cases = {
        "evaluation": (evaluated[:answers], 1, 0.0),
        "the same again": (evaluated[:answers], 1, 0.0),
        f"groups of {SAMPLES}": (grouped[:groups], samples, temperature),
    }
    for case, asked in cases.items():
        seconds, done = asking.timed(*asked)
        drafted, accepted = asking.take_counts()
        found = [one.tokens for group in done for one in group.completions]
        tokens = sum(len(one) for one in found) // 4
        share = accepted / drafted if drafted else 0.0
        row = Row(case, len(found), draft, tokens / seconds, tokens / max(1, tokens - accepted), share, 1.0)
        rows.append((row, found))
    return rows


def same_share(found: Sequence[bytes], expected: Sequence[bytes]) -> float:
    def equal(one: bytes, other: bytes) -> int:
        differ = (at for at, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs)
        return next(differ, min(len(one), len(other))) // 4

    return sum(map(equal, found, expected)) / max(1, sum(map(max, map(len, found), map(len, expected))) // 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="CONFIG KEY=VALUE", help="as for `llamarl train`")
    parser.add_argument("--rows", default="8,32", help="answers at once")
    parser.add_argument("--draft", default="0,8,auto", help="values of generator.draft; 0 comes first")
    parser.add_argument("--json", type=Path)
    args = parser.parse_intermixed_args()
    file = [one for one in args.arguments if "=" not in one]
    config = load_config(Path(file[0]) if file else None, [one for one in args.arguments if "=" in one])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafts: list[Draft] = ["auto" if one == "auto" else int(one) for one in args.draft.split(",")]
    print("| case | answers | draft | tokens/s | against none | tokens a step | right | same tokens |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    rows: list[Row] = []
    for answers in map(int, args.rows.split(",")):
        plain: list[tuple[Row, list[bytes]]] = []
        for draft in drafts:
            found = measure(config, answers, draft, device)
            plain = plain or found
            for (row, tokens), (without, expected) in zip(found, plain, strict=True):
                rows.append(replace(row, same_share=same_share(tokens, expected)))
                print(
                    f"| {row.case} | {row.answers} | {row.draft} | {row.tokens_per_s:,.0f} | "
                    f"{row.tokens_per_s / without.tokens_per_s:.2f} | {row.tokens_per_step:.2f} | "
                    f"{row.accepted_share:.0%} | {rows[-1].same_share:.1%} |",
                    flush=True,
                )
    if args.json:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        args.json.write_text(json.dumps({"machine": where, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
