"""Tokens of a problem, plain or in the model's chat template, and the text of an answer that is scored."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.config import ConversationConfig, TaskConfig
from llamarl.errors import ConfigError
from llamarl.model.tokenizer import Tokenizer
from llamarl.types import Completion, Problem, Turn, bytes_to_tokens


def prompt_tokens(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    return tokenizer.chat(_messages(problem.turns)) if problem.turns else tokenizer.encode(problem.prompt)


def check_chat_options(task: TaskConfig, problem: Problem) -> None:
    """Refuse options of a chat template that no prompt is put into."""
    if task.chat_options and not problem.turns:
        raise ConfigError("task.chat_options: cannot take effect without task.chat=true, or messages as prompts")


def reply_tokens(tokenizer: Tokenizer, problem: Problem, settings: ConversationConfig, text: str) -> list[int]:
    """Tokens of a tool's reply, in the model's chat template or in the words of `conversation.reply`."""
    if problem.turns:
        return tokenizer.chat_reply(_messages(problem.turns), settings.role, text)
    return tokenizer.encode(settings.reply.replace("{reply}", text))


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def asked_turns(problem: Problem) -> tuple[Turn, ...]:
    """The prompt as messages, also where the model sees plain text."""
    return problem.turns or (Turn("user", problem.prompt),)


def judged_text(tokenizer: Tokenizer, completion: Completion, judge: str) -> str:
    """Text of a completion that the scorer sees. `judge` is `conversation.judge`: the last turn, or all of it."""
    tokens = completion.last_turn if judge == "last" else bytes_to_tokens(completion.tokens)
    return tokenizer.decode(tokens.tolist())
