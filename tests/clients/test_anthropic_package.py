"""The `anthropic` package against the endpoint: messages, streams, tools, token counts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.serving import ScriptedBackend, chat_tokenizer, served

from llamarl.serve.session import KeyAccess

anthropic = pytest.importorskip("anthropic")

SAID = "It is 46. 🎉"
CALLED = 'I add.\n<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'
TOOL: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ASKED: Any = [{"role": "user", "content": "What is 12 + 34?"}]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> ScriptedBackend:
    return ScriptedBackend(chat_tokenizer(tmp_path_factory.mktemp("tokenizer")), [SAID])


@pytest.fixture
def client(backend: ScriptedBackend) -> Iterator[Any]:
    backend.said = [SAID]
    with served(backend, access=KeyAccess(backend.tokenizer, ["secret"])) as http:
        yield anthropic.Anthropic(base_url=str(http.base_url), api_key="secret", max_retries=0)


def test_a_message(client: Any) -> None:
    found = client.messages.create(model="any", max_tokens=100, messages=ASKED, system="Be brief.")
    (block,) = found.content
    assert block.type == "text" and block.text == SAID and found.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="any", messages=ASKED, system="Be brief.")
    assert counted.input_tokens == found.usage.input_tokens


def test_a_streamed_message(client: Any) -> None:
    with client.messages.stream(model="any", max_tokens=100, messages=ASKED) as stream:
        assert "".join(stream.text_stream) == SAID
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 5


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_used_and_its_result_sent_back(client: Any, backend: ScriptedBackend, streamed: bool) -> None:
    backend.said = [CALLED]
    if streamed:
        with client.messages.stream(model="any", max_tokens=200, messages=ASKED, tools=[TOOL]) as stream:
            message: Any = stream.get_final_message()
    else:
        message = client.messages.create(model="any", max_tokens=200, messages=ASKED, tools=[TOOL])
    text, use = message.content
    assert text.text == "I add." and use.input == {"a": 12, "b": 34} and message.stop_reason == "tool_use"
    backend.said = [SAID]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "46"}
    history: Any = [*ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    found = client.messages.create(model="any", max_tokens=200, messages=history, tools=[TOOL])
    assert found.content[0].type == "text" and "tool\n46" in backend.tokenizer.decode(backend.asked[-1].tokens)


def test_errors_are_those_of_the_package(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: must be at least 1"):
        client.messages.create(model="any", max_tokens=-1, messages=ASKED)
    with pytest.raises(anthropic.AuthenticationError, match="missing or wrong"):
        client.with_options(api_key="other").messages.create(model="any", max_tokens=1, messages=ASKED)
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(model="any", max_tokens=1, messages=image)
