"""The tokens of a row are those that a generator would have seen and sampled."""

from __future__ import annotations

import pytest
from helpers.chat_tokenizer import CHATML, chat_tokenizer

from llamarl.errors import ModelError
from llamarl.generate.answered_chat import RowTokens, row_tokens
from llamarl.tasks.supervised import AnsweredChat
from llamarl.types import Given, Turn, sampled_places

TOKENIZER = chat_tokenizer()
CHAT = AnsweredChat(
    (Turn("system", "s"), Turn("user", "abc"), Turn("assistant", "ca"), Turn("user", "b"), Turn("assistant", "abc é"))
)


def text(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def learned(row: RowTokens) -> str:
    return text([row.answer[place] for place in sampled_places(len(row.answer), row.given)])


def test_a_chat_is_the_prompt_that_a_generator_gets_then_answers_with_their_end_tokens() -> None:
    row = row_tokens(TOKENIZER, CHAT)
    messages = [{"role": turn.role, "content": turn.content} for turn in CHAT.turns]
    assert row.prompt == TOKENIZER.chat(messages[:2])
    assert learned(row) == "ca<|im_end|>abc é<|im_end|>"
    whole = TOKENIZER.chat_text(messages, add_generation_prompt=False)
    assert text(row.prompt + row.answer) == whole.removesuffix("\n")  # nothing behind the last end token


def test_the_users_later_turns_are_given_as_a_tools_reply_would_be() -> None:
    row = row_tokens(TOKENIZER, CHAT)
    (given,) = row.given
    said = TOKENIZER.chat_reply([], "user", "b")
    assert row.answer[given.start : given.start + given.count] == said


def test_a_pair_of_texts_is_followed_by_the_end_token() -> None:
    row = row_tokens(TOKENIZER, AnsweredChat((Turn("user", "abc"), Turn("assistant", "ca")), plain=True))
    assert row == RowTokens(TOKENIZER.encode("abc"), [*TOKENIZER.encode("ca"), TOKENIZER.eos_ids[0]])


def test_all_tokens_but_the_first_may_be_learned() -> None:
    row = row_tokens(TOKENIZER, CHAT, learn_all=True)
    assert len(row.prompt) == 1 and not row.given
    assert row.prompt + row.answer == (one := row_tokens(TOKENIZER, CHAT)).prompt + one.answer


def test_an_answer_that_the_template_does_not_end_gets_an_end_token() -> None:
    endless = chat_tokenizer(template=CHATML.replace("<|im_end|>", ""))
    row = row_tokens(endless, AnsweredChat(CHAT.turns[:3]))
    assert text(row.answer) == "ca\n<|im_end|>"


def test_an_end_token_inside_an_answer_does_not_cut_it() -> None:
    row = row_tokens(TOKENIZER, AnsweredChat((Turn("user", "a"), Turn("assistant", "b<|im_end|>c"))))
    assert text(row.answer) == "b<|im_end|>c<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    forgetful = chat_tokenizer(
        template=CHATML.replace("message['content'] or ''", "message['content'] if loop.last else ''")
    )
    with pytest.raises(ModelError, match="rewrites earlier turns"):
        row_tokens(forgetful, CHAT)


def test_a_row_is_cut_at_a_length_as_long_as_something_is_left_to_learn() -> None:
    row = RowTokens([1, 2], [3, 4, 5, 6, 7], (Given(2, 2),))
    assert row.cut(7) == row
    assert row.cut(5) == RowTokens([1, 2], [3, 4, 5], (Given(2, 1),))
    assert row.cut(3) == RowTokens([1, 2], [3])
    assert row.cut(2) is None
