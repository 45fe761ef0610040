"""A reward of your own: a function from a completion to a number. From the command line:

    llamarl train examples/custom_reward.yaml

or from Python, `python examples/custom_reward.py`, which does the same. Both find this file by the line
`scorer: examples/custom_reward.py:score` in the YAML, so start them where that path leads.

The one below gives partial credit: a sum with some digits right is better than one with none. It runs in worker
processes, with limits on time and memory. If it raises an exception or takes too long, the answer is tried again, then
the group is dropped and the reason recorded, as `llamarl audit RUN` shows; the job goes on, unless that happens often.
Evaluation asks the same function, so with this one the held-out figure is a mean reward, not a share of right answers.
"""

from __future__ import annotations

RIGHT, MOST_FOR_WRONG = 1.0, 0.3


def score(completion: str, answer: str, prompt: str) -> float:
    """`completion` is what the model wrote after `prompt`; `answer` is what the task says is right. Any finite number
    may be returned: only differences between the completions of one prompt matter."""
    given = completion.strip()
    if given == answer:
        return RIGHT
    if len(given) != len(answer):
        return 0.0
    return MOST_FOR_WRONG * sum(a == b for a, b in zip(given, answer, strict=True)) / len(answer)


if __name__ == "__main__":
    from llamarl import Job  # only here: workers that judge load this file, and should stay small

    summary = Job.load("examples/custom_reward.yaml").run()
    print(f"mean reward {summary.reward_first:.3f} -> {summary.reward_last:.3f} after {summary.updates} updates")
