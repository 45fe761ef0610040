"""Answers from a model folder, without a job. `tiny`, the shipped model, has only begun to learn sums.

    python examples/generate.py [MODEL]

Prompts may be text, token ids or chats. Every sample comes with its tokens, their log-probs and why it ended.
"""

from __future__ import annotations

import sys

from llamarl import LLM, Sampling

PROMPTS = ["12+34=", "7+8="]


def main(folder: str = "tiny") -> None:
    llm = LLM(folder)
    found = llm.generate(PROMPTS, Sampling(samples=3, max_new_tokens=8, temperature=0.8, top_p=0.95), seed=1)
    for prompt, answers in zip(PROMPTS, found, strict=True):
        for answer in answers:
            print(f"{prompt}{answer.text}   log-prob {sum(answer.logprobs):.2f}, {answer.finish_reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
