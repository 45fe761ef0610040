"""Rewards of your own: functions from a completion to a number. From the command line:

    llamarl train examples/custom_reward.yaml

or from Python, `python examples/custom_reward.py`, which does the same. Both find this file by the line
`scorer: examples/custom_reward.py:score` in the YAML, so start them where that path leads. From Python, a function may also
be handed over: `Job(config, scorer=score)`.

`score` gives partial credit: a sum with some digits right is better than one with none. It runs in worker processes, with
limits on time and memory; with `reward.trusted: true` in the reward's own process, a few hundred times as fast and without
limits. If it raises an exception or takes too long, the answer is tried again, then the group is dropped and the reason
recorded, as `llamarl audit RUN` shows; the job goes on, unless that happens often. Evaluation asks the same function, so with
this one the held-out figure is a mean reward, not a share of right answers.

The functions below it are other forms of the same; name one of them in the YAML instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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


def by_difficulty(completion: str, answer: str, difficulty: float = 1.0) -> float:
    """A parameter may be called like a column of the data: each row's value is passed. Without a default the column must be
    there, which is checked before the job starts; `**columns` takes all of them."""
    return difficulty * score(completion, answer, "")


def best_of_group(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """With `completions`, all answers to a prompt come at once, and every column as a list of the same length. Here only the
    best answers of a group are worth anything."""
    scores = [score(completion, gold, "") for completion, gold in zip(completions, answer, strict=True)]
    return [float(one == max(scores) and one > 0) for one in scores]


async def by_a_service(completion: str, answer: str) -> float:
    """Waiting costs nothing: up to `reward.concurrency` answers are under way at the same time."""
    await asyncio.sleep(0.01)  # a request to somewhere
    return score(completion, answer, "")


if __name__ == "__main__":
    from llamarl import Job  # only here: workers that judge load this file, and should stay small

    summary = Job.load("examples/custom_reward.yaml").run()
    print(f"mean reward {summary.reward_first:.3f} -> {summary.reward_last:.3f} after {summary.updates} updates")
