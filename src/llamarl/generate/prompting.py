"""A problem as the model is asked it: its tokens, plain or in the model's chat template; an answer as it is judged."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.config import ConversationConfig
from llamarl.model.tokenizer import Tokenizer
from llamarl.types import Completion, Problem, Turn, bytes_to_tokens


def prompt_tokens(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    return tokenizer.chat(_messages(problem.turns)) if problem.turns else tokenizer.encode(problem.prompt)


def reply_tokens(tokenizer: Tokenizer, problem: Problem, settings: ConversationConfig, text: str) -> list[int]:
    """A tool's reply as the model is told it."""
    if problem.turns:
        return tokenizer.chat_reply(_messages(problem.turns), settings.role, text)
    return tokenizer.encode(settings.reply.replace("{reply}", text))


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def asked_turns(problem: Problem) -> tuple[Turn, ...]:
    """The same as messages, also where the model sees plain text."""
    return problem.turns or (Turn("user", problem.prompt),)


def judged_text(tokenizer: Tokenizer, completion: Completion, judge: str) -> str:
    """What a scorer sees of a completion, as `conversation.judge` says: its last turn, or all of it."""
    tokens = completion.last_turn if judge == "last" else bytes_to_tokens(completion.tokens)
    return tokenizer.decode(tokens.tolist())
