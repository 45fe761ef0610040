"""The `openai` package against the endpoint: chats, streams, tools, responses, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import ScriptedBackend, chat_tokenizer, served

from llamarl.serve.session import KeyAccess

openai = pytest.importorskip("openai")

SAID = "It is 46. 🎉"
CALLED = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
ASKED: Any = [{"role": "user", "content": "What is 12 + 34?"}]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> ScriptedBackend:
    return ScriptedBackend(chat_tokenizer(tmp_path_factory.mktemp("tokenizer")), [SAID])


@pytest.fixture
def client(backend: ScriptedBackend) -> Iterator[Any]:
    backend.said = [SAID]
    with served(backend, access=KeyAccess(backend.tokenizer, ["secret"])) as http:
        yield openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="secret", max_retries=0)


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "scripted" and client.models.retrieve("scripted").id == "scripted"


def test_a_chat_with_log_probs(client: Any) -> None:
    found = client.chat.completions.create(
        model="any", messages=ASKED, logprobs=True, n=2, extra_body={"return_token_ids": True}
    )
    assert [choice.message.content for choice in found.choices] == [SAID, SAID]
    (logprobs,) = {len(choice.logprobs.content or ()) for choice in found.choices if choice.logprobs}
    assert found.usage is not None and found.usage.completion_tokens == 2 * logprobs
    assert len(found.choices[0].model_extra["token_ids"]) == logprobs


def test_a_streamed_chat(client: Any) -> None:
    chunks = list(
        client.chat.completions.create(model="any", messages=ASKED, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == SAID and chunks[-1].usage is not None and chunks[-2].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_sent_back(client: Any, backend: ScriptedBackend, streamed: bool) -> None:
    """The loop that every agent has: call, run the tool, send the whole history back."""
    backend.said = [CALLED]
    if streamed:
        with client.chat.completions.stream(model="any", messages=ASKED, tools=[TOOL]) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="any", messages=ASKED, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 12, "b": 34}
    backend.said = [SAID]
    turn = message.model_dump()
    result = {"role": "tool", "tool_call_id": call.id, "content": "46"}
    found = client.chat.completions.create(model="any", messages=[*ASKED, turn, result], tools=[TOOL])
    assert found.choices[0].message.content == SAID
    prompt = backend.tokenizer.decode(backend.asked[-1].tokens)
    assert CALLED.removeprefix("<tool_call>")[:10] in prompt and "tool\n46" in prompt


def test_a_message_of_the_client_goes_back_as_it_is(client: Any) -> None:
    first = client.chat.completions.create(model="any", messages=ASKED).choices[0].message
    again = client.chat.completions.create(model="any", messages=[*ASKED, first.model_dump(), *ASKED])
    assert again.choices[0].message.content == SAID


def test_completions(client: Any) -> None:
    found = client.completions.create(model="any", prompt=["a", "b"], max_tokens=100, logprobs=0)
    assert [choice.text for choice in found.choices] == [SAID, SAID]
    streamed = client.completions.create(model="any", prompt="a", max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == SAID


def test_responses(client: Any, backend: ScriptedBackend) -> None:
    assert client.responses.create(model="any", input="Hi").output_text == SAID
    with client.responses.stream(model="any", input="Hi") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == SAID
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    backend.said = [CALLED]
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    found = client.responses.create(model="any", input="Hi", tools=[tool])
    (call,) = (item for item in found.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"a": 12, "b": 34}
    backend.said = [SAID]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "46"}
    history: Any = [{"role": "user", "content": "Hi"}, call.model_dump(), output]
    assert client.responses.create(model="any", input=history, tools=[tool]).output_text == SAID


def test_errors_are_those_of_the_package(client: Any, backend: ScriptedBackend) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature: must be from 0"):
        client.chat.completions.create(model="any", messages=ASKED, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="logit_bias: is not supported"):
        client.chat.completions.create(model="any", messages=ASKED, logit_bias={"1": 1})
    with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        client.with_options(api_key="other").models.list()
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="x")


def test_curl_streams_lines(backend: ScriptedBackend, tmp_path: Path) -> None:
    import subprocess

    backend.said = [SAID]
    with served(backend) as http:
        body = json.dumps({"messages": ASKED, "stream": True})
        command = ["curl", "-sN", f"{http.base_url}/v1/chat/completions", "-d", body]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.endswith("data: [DONE]\n\n") and found.count("data: ") > 3
