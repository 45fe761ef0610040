"""A problem as the model is asked it: its tokens, plain or in the model's chat template."""

from __future__ import annotations

from llamarl.model.tokenizer import Tokenizer
from llamarl.types import Problem


def prompt_tokens(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    if problem.turns:
        return tokenizer.chat([{"role": turn.role, "content": turn.content} for turn in problem.turns])
    return tokenizer.encode(problem.prompt)
