"""Claim 2: the time of an update against TRL 1.16's GRPOTrainer: 32 prompts x 8 samples, 512 new tokens, the same model,
GPU and reward.

    python benchmarks/claims/against_trl.py [--runs FOLDER] [KEY=VALUE ...]

TRL's times were measured apart, on the same kind of GPU (transformers 5.17 `generate`, bf16); ours are read from the run
of claim 1, between its evaluations. Must: 8 times as fast; hoped for: 12.
"""

from __future__ import annotations

import statistics

from arms import ASYNC, Figures, as_figures, keep, made, read_options
from plot import bars
from windows import steady

TRL_UPDATES_S = (28.7, 30.8, 25.0, 27.1, 24.5, 25.0, 23.8)  # after the first, which took 53.9 s
TRL_ANSWER_TOKENS = 77_000  # an update
MUST, HOPED = 8.0, 12.0


def main() -> None:
    options = read_options(__doc__)
    record = made(ASYNC, options)
    window = steady(record)
    trl_s, tokens = statistics.median(TRL_UPDATES_S), record.answer_tokens(window)
    faster = trl_s / window.update_s
    per_token = faster * tokens / TRL_ANSWER_TOKENS
    print("                       TRL 1.16   LlamaRL")
    print(f"seconds an update      {trl_s:8.1f}  {window.update_s:8.2f}")
    print(f"answer tokens          {TRL_ANSWER_TOKENS:8,}  {tokens:8,.0f}")
    print(f"tokens a second        {TRL_ANSWER_TOKENS / trl_s:8,.0f}  {tokens / window.update_s:8,.0f}")
    print(f"{faster:.1f} times as fast per update (must 8, hoped for 12), {per_token:.1f} times per answer token")
    figures = {
        "trl_update_s": trl_s,
        "trl_updates_s": TRL_UPDATES_S,
        "window": as_figures(window),
        "answer_tokens": tokens,
        "times_as_fast": faster,
        "times_as_fast_per_token": per_token,
        "must": MUST,
        "hoped_for": HOPED,
        "met": faster >= MUST,
    }
    keep("against_trl", options, figures, picture)


def picture(figures: Figures) -> str:
    values = {"TRL 1.16": figures["trl_update_s"], "LlamaRL": figures["window"]["update_s"]}
    return bars("One update: 32 prompts x 8 answers, Qwen 1.5B, one GPU", "seconds", values, " s")


if __name__ == "__main__":
    main()
