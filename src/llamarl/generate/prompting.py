"""A problem as the model is asked it: its tokens, plain or in the model's chat template; an answer as it is judged."""

from __future__ import annotations

from llamarl.model.tokenizer import Tokenizer
from llamarl.types import Completion, Problem, Turn, bytes_to_tokens


def prompt_tokens(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    if problem.turns:
        return tokenizer.chat([{"role": turn.role, "content": turn.content} for turn in problem.turns])
    return tokenizer.encode(problem.prompt)


def asked_turns(problem: Problem) -> tuple[Turn, ...]:
    """The same as messages, also where the model sees plain text."""
    return problem.turns or (Turn("user", problem.prompt),)


def judged_text(tokenizer: Tokenizer, completion: Completion, judge: str) -> str:
    """What a scorer sees of a completion, as `conversation.judge` says: its last turn, or all of it."""
    tokens = completion.last_turn if judge == "last" else bytes_to_tokens(completion.tokens)
    return tokenizer.decode(tokens.tolist())
