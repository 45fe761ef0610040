"""Rows with answers, in the shapes that people have them in; whatever cannot be learned is named."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl.config import SftConfig
from llamarl.errors import ConfigError
from llamarl.tasks.data_files import BadRow
from llamarl.tasks.supervised import read_answered_chat
from llamarl.types import Turn

USER, ASSISTANT = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}


def settings(**more: Any) -> SftConfig:
    return SftConfig(path="data.jsonl", **more)


def turns(row: dict[str, Any], **more: Any) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in read_answered_chat(settings(**more), row).turns]


ASKED = [("user", "1+1="), ("assistant", "2")]


def test_chats_and_pairs_of_texts_or_messages_are_read() -> None:
    assert turns({"messages": [USER, ASSISTANT]}) == ASKED
    assert turns({"prompt": "1+1=", "completion": "2"}) == ASKED
    assert turns({"prompt": [USER], "completion": [ASSISTANT]}) == ASKED
    assert turns({"prompt": [USER], "completion": "2"}) == ASKED
    assert turns({"q": {"text": "1+1="}, "a": 2}, prompt_field="q.text", completion_field="a") == ASKED


def test_a_template_is_put_around_prompts_that_are_texts() -> None:
    row = {"prompt": "1+1=", "completion": "2"}
    assert turns(row, template="Q: {prompt}\nA:")[0] == ("user", "Q: 1+1=\nA:")
    assert turns(row, template="Q: {prompt}", chat=True)[0] == ("user", "Q: 1+1=")
    assert turns({"prompt": [USER], "completion": "2"}, template="Q: {prompt}")[0] == ("user", "1+1=")
    with pytest.raises(ConfigError, match=r"must hold \{prompt\}"):
        settings(template="Q:")


def test_only_a_pair_of_texts_is_plain_unless_a_chat_is_asked_for() -> None:
    pair = {"prompt": "1+1=", "completion": "2"}
    assert read_answered_chat(settings(), pair).plain
    assert not read_answered_chat(settings(chat=True), pair).plain
    assert not read_answered_chat(settings(), {"messages": [USER, ASSISTANT]}).plain


def test_what_follows_the_last_answer_is_left_out_and_a_system_message_is_added_where_there_is_none() -> None:
    assert turns({"messages": [USER, ASSISTANT, USER]}) == ASKED
    assert turns({"messages": [USER, ASSISTANT]}, system="Be brief.") == [("system", "Be brief."), *ASKED]
    own = {"role": "system", "content": "Be long."}
    assert turns({"messages": [own, USER, ASSISTANT]}, system="Be brief.")[0] == ("system", "Be long.")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [USER]}, "no turn of the assistant"),
        ({"messages": [ASSISTANT]}, "begins with its only turn of the assistant"),
        ({"messages": []}, "must be a list"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "with roles system, user, assistant, tool"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "must be text"),
        ({"prompt": "1+1="}, "not both of 'prompt' and 'completion'; there are: 'prompt'"),
        ({"prompt": "1+1=", "completion": " "}, "'completion' is empty"),
        ({}, "there are: none"),
    ],
)
def test_a_row_that_cannot_be_learned_says_why(row: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRow, match=told):
        read_answered_chat(settings(), row)


def test_question_and_answer_of_a_row_are_its_last_ones() -> None:
    chat = read_answered_chat(
        settings(), {"messages": [USER, ASSISTANT, message("user", "2+2="), message("assistant", "4")]}
    )
    assert (chat.question, chat.answer, chat.turns[0]) == ("2+2=", "4", Turn("user", "1+1="))


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
