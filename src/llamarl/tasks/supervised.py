"""Rows of data with answers: whole chats, or a prompt with its completion. A row that cannot be learned is a BadRow."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from llamarl.config import SftConfig
from llamarl.tasks.data_files import BadRow, Row, as_text, field_of, text_field
from llamarl.types import Turn

ASSISTANT = "assistant"
_ROLES = ("system", "user", ASSISTANT, "tool")


class AnsweredChat(Struct, frozen=True):
    """A row: turns, of which at least one behind the first is the assistant's. `plain`: one prompt and one completion, as
    texts without a chat template."""

    turns: tuple[Turn, ...]
    plain: bool = False

    @property
    def question(self) -> str:
        """What comes before the last answer."""
        return self.turns[-2].content

    @property
    def answer(self) -> str:
        return self.turns[-1].content


def read_answered_chat(settings: SftConfig, row: Row) -> AnsweredChat:
    messages = _column(row, settings.messages_field)
    if messages is not None:
        return AnsweredChat(_checked(_turns(messages, settings.messages_field), settings.messages_field, settings))
    prompt, completion = _column(row, settings.prompt_field), _column(row, settings.completion_field)
    if prompt is None or completion is None:
        raise BadRow(
            f"no field '{settings.messages_field}', and not both of '{settings.prompt_field}' and "
            f"'{settings.completion_field}'; there are: {', '.join(map(repr, row)) or 'none'}"
        )
    if not isinstance(prompt, list) and not isinstance(completion, list) and not settings.chat:
        answer = text_field(row, settings.completion_field)
        return AnsweredChat((_asked(prompt, settings), Turn(ASSISTANT, answer)), plain=True)
    asked = _turns(prompt, settings.prompt_field) if isinstance(prompt, list) else (_asked(prompt, settings),)
    said = (
        _turns(completion, settings.completion_field)
        if isinstance(completion, list)
        else (Turn(ASSISTANT, as_text(completion, settings.completion_field)),)
    )
    return AnsweredChat(_checked((*asked, *said), settings.completion_field, settings))


def _asked(prompt: Any, settings: SftConfig) -> Turn:
    return Turn("user", settings.template.replace("{prompt}", as_text(prompt, settings.prompt_field)))


def _checked(turns: tuple[Turn, ...], field: str, settings: SftConfig) -> tuple[Turn, ...]:
    """Turns up to the assistant's last, with the system message of the settings where there is none."""
    last = max((at for at, turn in enumerate(turns) if turn.role == ASSISTANT), default=-1)
    if last < 0:
        raise BadRow(f"'{field}' has no turn of the assistant, so there is nothing to learn from")
    if last == 0:
        raise BadRow(f"'{field}' begins with its only turn of the assistant; nothing was asked")
    system = (Turn("system", settings.system),) if settings.system and turns[0].role != "system" else ()
    return (*system, *turns[: last + 1])


def _turns(messages: Any, field: str) -> tuple[Turn, ...]:
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"'{field}' must be a list of {{role, content}}")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise BadRow(f"'{field}' must be a list of {{role, content}} with roles {', '.join(_ROLES)}")
    return tuple(Turn(one["role"], as_text(one.get("content"), f"{field}.content")) for one in messages)


def _column(row: Row, field: str) -> Any:
    try:
        return field_of(row, field)
    except KeyError:
        return None
