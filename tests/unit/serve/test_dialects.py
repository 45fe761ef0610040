"""Every dialect over the wire, with a model that says what the test wants: whole answers, streams, tools, log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.serving import JSON, ScriptedBackend, chat_tokenizer, events_of, served

from llamarl.model.tokenizer import Tokenizer

SAID = "It is 46. 🎉"
CALLED = 'I add.\n<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'
USER = [{"role": "user", "content": "What is 12 + 34?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> ScriptedBackend:
    return ScriptedBackend(tokenizer, [SAID])


@pytest.fixture(scope="module")
def client(backend: ScriptedBackend) -> Iterator[httpx.Client]:
    with served(backend) as found:
        yield found


@pytest.fixture(autouse=True)
def said(backend: ScriptedBackend) -> Iterator[None]:
    yield
    backend.said = [SAID]


def post(client: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-weight-version"] == "7"
    return events_of(response)


# Chat


def test_a_chat_is_answered_with_exact_tokens(client: httpx.Client, backend: ScriptedBackend) -> None:
    body = {"messages": USER, "logprobs": True, "return_token_ids": True, "n": 2, "seed": 3, "temperature": 0.5}
    response = client.post("/v1/chat/completions", json=body)
    found = response.json()
    tokens = [*backend.tokenizer.encode(SAID), *backend.tokenizer.eos_ids]
    for index, choice in enumerate(found["choices"]):
        assert (choice["index"], choice["finish_reason"]) == (index, "stop")
        assert choice["message"] == {"role": "assistant", "content": SAID, "refusal": None}
        assert choice["token_ids"] == tokens and choice["weight_versions"] == [[6, len(tokens)]]
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-place / 8 for place in range(len(tokens))]
    assert response.headers["x-weight-version"] == "6"
    asked = backend.asked[-1]
    assert found["prompt_token_ids"] == list(asked.tokens) == backend.tokenizer.chat(USER)
    assert (asked.sampling.samples, asked.sampling.temperature, asked.seed) == (2, 0.5, 3)
    assert asked.sampling.max_new_tokens == backend.max_positions - len(asked.tokens)
    usage = {"prompt_tokens": len(asked.tokens), "completion_tokens": 2 * len(tokens)}
    assert found["usage"] == {**usage, "total_tokens": len(asked.tokens) + 2 * len(tokens)}


def test_a_streamed_chat_has_the_same_text_tokens_and_log_probs(client: httpx.Client) -> None:
    body = {"messages": USER, "logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (whole,) = post(client, "/v1/chat/completions", body)["choices"]
    events = stream(client, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(one["delta"].get("content", "") for one in choices) == whole["message"]["content"]
    assert [token for one in choices for token in one["token_ids"]] == whole["token_ids"]
    assert [lp for one in choices for lp in one["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert choices[0]["delta"]["role"] == "assistant" and choices[-1]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == len(whole["token_ids"])
    assert {one["token"] for one in whole["logprobs"]["content"]} == {f"token_id:{t}" for t in whole["token_ids"]}
    assert "prompt_token_ids" in events[0] and "prompt_token_ids" not in events[1]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: httpx.Client, streamed: bool) -> None:
    body = {"messages": USER, "stop": ["46", "zz"], "return_token_ids": True}
    if streamed:
        choices = [event["choices"][0] for event in stream(client, "/v1/chat/completions", body)]
        text = "".join(one["delta"].get("content", "") for one in choices)
        tokens = [token for one in choices for token in one["token_ids"]]
    else:
        (choice,) = post(client, "/v1/chat/completions", body)["choices"]
        text, tokens = choice["message"]["content"], choice["token_ids"]
        assert (choice["stop_reason"], choice["finish_reason"]) == ("46", "stop")
    assert (text, len(tokens)) == ("It is ", len("It is 46"))


def test_a_limit_cuts_the_answer_off(client: httpx.Client) -> None:
    (choice,) = post(client, "/v1/chat/completions", {"messages": USER, "max_completion_tokens": 2})["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It", "length")


def test_tools_reach_the_template_and_calls_come_back(client: httpx.Client, backend: ScriptedBackend) -> None:
    backend.said = [CALLED]
    (choice,) = post(client, "/v1/chat/completions", {"messages": USER, "tools": [TOOL]})["choices"]
    assert backend.tokenizer.decode(backend.asked[-1].tokens).count('"name": "add"') == 1
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I add.")
    assert call["function"] == {"name": "add", "arguments": '{"a": 12, "b": 34}'} and call["id"].startswith("call_")
    deltas = [e["choices"][0] for e in stream(client, "/v1/chat/completions", {"messages": USER, "tools": [TOOL]})]
    calls = [one for delta in deltas for one in delta["delta"].get("tool_calls", ())]
    assert [(one["index"], one["function"]) for one in calls] == [(0, call["function"])]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == "I add."
    assert deltas[-1]["finish_reason"] == "tool_calls"


def test_results_of_tools_go_back_into_the_template(client: httpx.Client, backend: ScriptedBackend) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "46"},
    ]
    post(client, "/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
    prompt = backend.tokenizer.decode(backend.asked[-1].tokens)
    assert 'hm</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in prompt
    assert "system\nBe brief." in prompt and "tool\n46" in prompt


def test_without_tools_nothing_is_taken_for_a_call(client: httpx.Client, backend: ScriptedBackend) -> None:
    backend.said = [CALLED]
    for body in ({"messages": USER}, {"messages": USER, "tools": [TOOL], "tool_choice": "none"}):
        (choice,) = post(client, "/v1/chat/completions", body)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALLED, "stop")
        assert '"name": "add"' not in backend.tokenizer.decode(backend.asked[-1].tokens)


def test_options_of_the_template(client: httpx.Client, backend: ScriptedBackend) -> None:
    body: dict[str, Any] = {"messages": USER, "chat_template_kwargs": {"quiet": True}}
    post(client, "/v1/chat/completions", body)
    assert backend.tokenizer.decode(backend.asked[-1].tokens).endswith("<think></think>")
    wrong = post(client, "/v1/chat/completions", {"messages": USER, "chat_template_kwargs": {"loud": 1}}, 400)
    assert wrong["error"]["message"] == ("chat_template_kwargs: the chat template has no option 'loud'; it has: quiet")


def test_a_template_without_tools_refuses_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = chat_tokenizer(tmp_path_factory.mktemp("plain"), "{% for m in messages %}{{ m.content }}{% endfor %}")
    with served(ScriptedBackend(plain, ["x"])) as client:
        wrong = post(client, "/v1/chat/completions", {"messages": USER, "tools": [TOOL]}, 400)
    assert wrong["error"]["param"] == "tools"


def test_calls_in_bare_json(tmp_path_factory: pytest.TempPathFactory) -> None:
    llama = ScriptedBackend(
        chat_tokenizer(tmp_path_factory.mktemp("json"), JSON), ['{"name": "add", "parameters": {}}']
    )
    with served(llama) as client:
        (choice,) = post(client, "/v1/chat/completions", {"messages": USER, "tools": [TOOL]})["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


# Completions and tokens


def test_plain_prompts_as_texts_and_tokens(client: httpx.Client, backend: ScriptedBackend) -> None:
    for prompt, count in (("ab", 1), (["ab", "cd"], 2), ([65, 66], 1), ([[65], [66, 67]], 2)):
        found = post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 500, "n": 2})
        assert [choice["text"] for choice in found["choices"]] == [SAID] * 2 * count
        assert [choice["index"] for choice in found["choices"]] == list(range(2 * count))
    post(client, "/v1/completions", {"prompt": "ab"})
    assert backend.asked[-1].sampling.max_new_tokens == 16


def test_an_echo_has_the_log_probs_of_the_prompt(client: httpx.Client, backend: ScriptedBackend) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 2}
    (choice,) = post(client, "/v1/completions", body)["choices"]
    assert choice["text"] == "abcIt" and choice["logprobs"]["tokens"] == ["a", "b", "c", "I", "t"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, 0.0, -0.125]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    (alone,) = post(client, "/v1/completions", {**body, "max_tokens": 0})["choices"]
    assert alone["text"] == "abc" and len(alone["logprobs"]["tokens"]) == 3
    assert backend.scored[-1] == backend.tokenizer.encode("abc")


def test_streamed_completions(client: httpx.Client) -> None:
    events = stream(client, "/v1/completions", {"prompt": "ab", "max_tokens": 500, "logprobs": 0, "n": 2})
    for index in range(2):
        mine = [one for event in events for one in event["choices"] if one["index"] == index]
        assert "".join(one["text"] for one in mine) == SAID and mine[-1]["finish_reason"] == "stop"


def test_tokens_in_tokens_out(client: httpx.Client, backend: ScriptedBackend) -> None:
    params = {"temperature": 1.0, "logprobs": 1, "top_k": -1, "some_new_key": 1, "max_tokens": 1, "prompt_logprobs": 1}
    response = client.post("/inference/v1/generate", json={"token_ids": [65, 66, 67], "sampling_params": params})
    found = response.json()
    (choice,) = found["choices"]
    (token,) = choice["token_ids"]
    assert choice["logprobs"] == {"content": [{"token": f"token_id:{token}", "logprob": 0.0}]}
    assert choice["finish_reason"] == "length" and response.headers["x-ignored-fields"] == "some_new_key"
    assert found["prompt_logprobs"][0] is None and len(found["prompt_logprobs"]) == 3
    letter = backend.tokenizer.decode([66])
    assert found["prompt_logprobs"][1]["66"] == {"logprob": -0.5, "rank": 2, "decoded_token": letter}
    post(client, "/inference/v1/generate", {"token_ids": [65]})
    assert backend.asked[-1].sampling.max_new_tokens == backend.max_positions - 1
    events = stream(client, "/inference/v1/generate", {"token_ids": [65], "request_id": "mine"})
    whole = post(client, "/inference/v1/generate", {"token_ids": [65]})["choices"][0]["token_ids"]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == whole
    assert {event["request_id"] for event in events} == {"mine"}


# Anthropic's


def test_messages(client: httpx.Client, backend: ScriptedBackend) -> None:
    body = {"model": "claude", "max_tokens": 300, "system": "Be brief.", "messages": USER, "stop_sequences": ["zz"]}
    found = post(client, "/v1/messages", body)
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "end_turn")
    assert found["content"] == [{"type": "text", "text": SAID}]
    assert found["usage"]["input_tokens"] == len(backend.asked[-1].tokens)
    assert backend.tokenizer.decode(backend.asked[-1].tokens).startswith("system\nBe brief.")
    counted = post(client, "/v1/messages/count_tokens", {"model": "claude", "system": "Be brief.", "messages": USER})
    assert counted == {"input_tokens": found["usage"]["input_tokens"]}
    stopped = post(client, "/v1/messages", {**body, "stop_sequences": ["46"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "46")
    assert post(client, "/v1/messages", {**body, "max_tokens": 1})["stop_reason"] == "max_tokens"


def test_messages_with_tools(client: httpx.Client, backend: ScriptedBackend) -> None:
    backend.said = [CALLED]
    blocks = [
        *USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "forty"}]},
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    tool = {"name": "add", "input_schema": PARAMETERS}
    body = {"max_tokens": 300, "messages": blocks, "tools": [tool], "tool_choice": {"type": "auto"}}
    found = post(client, "/v1/messages", body)
    text, use = found["content"]
    assert text == {"type": "text", "text": "I add."} and use["input"] == {"a": 12, "b": 34}
    assert (use["name"], found["stop_reason"]) == ("add", "tool_use")
    prompt = backend.tokenizer.decode(backend.asked[-1].tokens)
    assert "tool\nforty" in prompt and "user\nGo on." in prompt and '"arguments": {"a": 1}' in prompt
    events = stream(client, "/v1/messages", body)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "I add."
    assert deltas[-1]["partial_json"] == '{"a": 12, "b": 34}'
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


# Responses


def test_responses(client: httpx.Client, backend: ScriptedBackend) -> None:
    body: dict[str, Any] = {"input": "What is 12 + 34?", "instructions": "Be brief.", "max_output_tokens": 300}
    found = post(client, "/v1/responses", body)
    assert (found["object"], found["status"], found["error"]) == ("response", "completed", None)
    assert found["output"][0]["content"][0]["text"] == SAID
    assert backend.tokenizer.decode(backend.asked[-1].tokens).startswith("system\nBe brief.")
    cut = post(client, "/v1/responses", {**body, "max_output_tokens": 1})
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    events = stream(client, "/v1/responses", body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == SAID
    assert events[-1]["response"]["output"][0]["content"] == found["output"][0]["content"]


def test_responses_with_tools(client: httpx.Client, backend: ScriptedBackend) -> None:
    backend.said = [CALLED]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "id": "rs", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "forty"},
    ]
    body = {"input": items, "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}]}
    found = post(client, "/v1/responses", body)
    message, call = found["output"]
    assert message["content"][0]["text"] == "I add."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", '{"a": 12, "b": 34}')
    prompt = backend.tokenizer.decode(backend.asked[-1].tokens)
    assert 'assistant\n<tool_call>{"name": "add", "arguments": {"a": 1}}' in prompt and "tool\nforty" in prompt
    events = stream(client, "/v1/responses", body)
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["arguments"] for event in done] == ['{"a": 12, "b": 34}']
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call"]


# The rest


def test_models_tokens_health_and_metrics(client: httpx.Client, backend: ScriptedBackend) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("scripted", 2000)
    assert client.get("/v1/models/scripted").json()["id"] == "scripted"
    assert client.get("/v1/models/other").status_code == 404
    found = post(client, "/tokenize", {"prompt": "aé", "return_token_strs": True})
    assert found["tokens"] == backend.tokenizer.encode("aé") and found["count"] == 3
    assert post(client, "/detokenize", {"tokens": found["tokens"]}) == {"prompt": "aé"}
    chat = post(client, "/tokenize", {"messages": USER, "tools": [TOOL]})
    assert chat["tokens"] == backend.tokenizer.chat(USER, tools=[TOOL])
    assert client.get("/health").json() == {"status": "ok"}
    lines = client.get("/metrics").text.splitlines()
    assert "llamarl_answers_running 1" in lines and "llamarl_weight_version 7" in lines
    assert any(line.startswith('llamarl_requests_total{path="/tokenize",status="200"}') for line in lines)
    assert "llamarl_requests_in_flight 1" in lines  # this one


def test_a_plain_server_takes_no_rewards(client: httpx.Client) -> None:
    assert post(client, "/rl/reward", {"reward": 1.0}, 404)["error"]["type"] == "not_found_error"
