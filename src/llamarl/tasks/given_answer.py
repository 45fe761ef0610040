"""What a scorer took for the answer in a completion: the same rules as those of the scorers, for people who read rollouts."""

from __future__ import annotations

from llamarl.config import RewardConfig
from llamarl.tasks.choices import chosen_letter
from llamarl.tasks.extract import final_answer
from llamarl.tasks.judge import FALLBACK
from llamarl.types import Problem


def given_answer(text: str, problem: Problem, settings: RewardConfig) -> str | None:
    """The answer that the job's scorer compared; None if it found none, or compares none. With `reward.combine`, that of the
    first scorer that compares one."""
    own = (problem.scorer or FALLBACK) if settings.scorer == "auto" else settings.scorer
    for scorer in settings.combine or [own]:
        match scorer:
            case "exact":
                return text.strip()
            case "numeric" | "math":
                return final_answer(text, settings.answer_from, formulas=scorer == "math")
            case "choice":
                return chosen_letter(text)
    return None
