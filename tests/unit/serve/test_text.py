"""Text of tokens that come piece by piece: all pieces together are the whole, whatever their sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.serving import JSON, TAGS, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.generate.stop_strings import StopStrings
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.text import TextStream, whole_text
from llamarl.serve.token_json import TokenNames
from llamarl.serve.tool_calls import ToolCall, ToolForm, ToolText, tool_form


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def cut(items: list[int] | str, sizes: list[int]) -> Iterator[tuple[list[int] | str, bool]]:
    """Parts of these sizes, over and over, and whether each is the last."""
    place, turn = 0, 0
    while True:
        size = sizes[turn % len(sizes)]
        yield items[place : place + size], place + size >= len(items)
        place, turn = place + size, turn + 1
        if place >= len(items):
            return


SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)
TEXTS = st.text(alphabet="ab🎉é\n <tol_c>/{}", max_size=40)
STOPS = st.lists(st.text(alphabet="ab🎉\n", min_size=1, max_size=4), max_size=3)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, stops=STOPS, sizes=SIZES, ended=st.booleans())
def test_streamed_text_is_the_whole_text(
    tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int], ended: bool
) -> None:
    tokens = [*tokenizer.encode(text), *(tokenizer.eos_ids if ended else ())]
    tokens = tokens[: StopStrings(tokenizer, stops).end_of(tokens)]
    stream = TextStream(tokenizer, stops)
    parts = [stream.push(part, last=last) for part, last in cut(tokens, sizes)]  # type: ignore[arg-type]
    whole, stop = whole_text(tokenizer, tokens, stops)
    assert ("".join(parts), stream.stop is None) == (whole, stop is None)
    assert not any(one in "".join(parts) for one in stops)


def test_part_of_a_character_waits_for_the_rest(tokenizer: Tokenizer) -> None:
    stream, tokens = TextStream(tokenizer, ()), tokenizer.encode("🎉!")
    assert [stream.push([token], last=False) for token in tokens] == ["", "", "", "🎉", "!"]


def in_parts(form: ToolForm | None, text: str, sizes: list[int]) -> tuple[str, list[tuple[str, str]]]:
    tools, words, calls = ToolText(form), "", list[ToolCall]()
    for part, last in cut(text, sizes):
        more, new = tools.push(part, last=last)  # type: ignore[arg-type]
        words, calls = words + more, calls + new
    return words, [(call.name, call.arguments_json) for call in calls]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = "<tool_call>{name: add}</tool_call>"


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.one_of(TEXTS, st.sampled_from([CALL, BROKEN, "<tool_call>", "</tool_call>", "\n"])), max_size=6),
    sizes=SIZES,
    form=st.sampled_from(["tags", "json", None]),
)
def test_streamed_calls_are_the_whole_ones(parts: list[str], sizes: list[int], form: ToolForm | None) -> None:
    text = "".join(parts)
    assert in_parts(form, text, sizes) == in_parts(form, text, [len(text) + 1])


TAGGED: list[tuple[str, str, list[str]]] = [
    ("Let me see.\n" + CALL, "Let me see.", ["add"]),
    (CALL + "\n" + CALL, "", ["add", "add"]),
    (CALL.removesuffix("</tool_call>"), "", ["add"]),  # it ended its turn instead of the tag
    ("no " + BROKEN + " call ", "no " + BROKEN + " call ", []),
    ('{"name": "add", "parameters": {}}', '{"name": "add", "parameters": {}}', []),
    ("a < b\n", "a < b\n", []),
]


@pytest.mark.parametrize(("text", "words", "names"), TAGGED)
def test_calls_in_tags(text: str, words: str, names: list[str]) -> None:
    said, calls = in_parts("tags", text, [1000])
    assert (said, [name for name, _ in calls]) == (words, names)


BARE: list[tuple[str, str, list[str]]] = [
    ('{"name": "add", "parameters": {"a": 1}}', "", ["add"]),
    ('{"name": "add", "parameters": {}}; {"name": "sub", "arguments": "{}"}', "", ["add", "sub"]),
    ('{"result": 3}', '{"result": 3}', []),
    ("The answer is {3}", "The answer is {3}", []),
    ('[{"name": "add"}]', "", ["add"]),
    ("{", "{", []),
]


@pytest.mark.parametrize(("text", "words", "names"), BARE)
def test_calls_as_json(text: str, words: str, names: list[str]) -> None:
    said, calls = in_parts("json", text, [1000])
    assert (said, [name for name, _ in calls]) == (words, names)


def test_the_form_of_calls_is_read_from_the_template() -> None:
    assert [tool_form(source) for source in (TAGS, JSON, "{{ messages }}", "")] == ["tags", "json", None, None]


def test_log_probs_keep_every_bit_and_tokens_their_bytes(tokenizer: Tokenizer) -> None:
    import numpy as np

    names, tokens = TokenNames(tokenizer), tokenizer.encode('é"\n')
    logprobs = np.random.default_rng(0).normal(size=len(tokens)).astype(np.float32)
    for as_ids in (False, True):
        found = json.loads(bytes(names.chat_logprobs(tokens, logprobs.tolist(), as_ids=as_ids, with_top=True)))
        assert [np.float32(one["logprob"]) for one in found] == logprobs.tolist()
        assert all(one["top_logprobs"][0]["token"] == one["token"] for one in found)
        assert [one["token"] for one in found] == [f"token_id:{t}" for t in tokens] or not as_ids
    plain = json.loads(bytes(names.chat_logprobs(tokens, logprobs.tolist(), as_ids=False, with_top=False)))
    assert bytes(byte for one in plain for byte in one["bytes"]).decode() == 'é"\n'


def test_any_folder_has_its_form(tmp_path: Path) -> None:
    assert tool_form(chat_tokenizer(tmp_path, JSON).chat_source) == "json"
