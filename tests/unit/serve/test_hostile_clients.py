"""Clients that are wrong or hostile: a proper status and one line each, and the server goes on."""

from __future__ import annotations

import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from helpers.serving import ScriptedBackend, chat_tokenizer, served

from llamarl.errors import InputError
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.limits import ServeLimits
from llamarl.serve.run import HttpServer
from llamarl.serve.session import KeyAccess

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
SMALL = ServeLimits(max_body_bytes=10_000, body_s=0.3, header_s=0.3, max_requests=2, max_connections=50, grace_s=1)
ALL_PATHS = (
    CHAT,
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def backend(tokenizer: Tokenizer) -> ScriptedBackend:
    return ScriptedBackend(tokenizer, ["Hello."])


@pytest.fixture
def client(backend: ScriptedBackend) -> Iterator[httpx.Client]:
    with served(backend, limits=SMALL) as found:
        yield found


@pytest.fixture(scope="module")
def patient(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    """A client of a server with the usual limits."""
    with served(ScriptedBackend(tokenizer, ["x"])) as found:
        yield found


def message_of(response: httpx.Response) -> str:
    found = response.json()["error"]["message"]
    assert isinstance(found, str) and "\n" not in found and found
    return found


def still_answers(client: httpx.Client) -> None:
    assert client.post(CHAT, json={"messages": USER}).status_code == 200


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.01)


def test_only_who_knows_a_key_is_let_in(backend: ScriptedBackend) -> None:
    with served(backend, access=KeyAccess(backend.tokenizer, ["secret-1", "secret-2"])) as client:
        wrong: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer nope"},
            {"authorization": "Basic secret-1"},
            {"authorization": "secret-1"},
            {"x-api-key": "secret"},
            {"x-api-key": "sécret"},
        ]
        for headers in wrong:
            encoded = {name: value.encode() for name, value in headers.items()}
            response = client.post(CHAT, json={"messages": USER}, headers=encoded)  # type: ignore[arg-type]
            assert response.status_code == 401 and "secret" not in response.text
            assert message_of(response) == "the key is missing or wrong"
        assert client.get("/metrics").status_code == client.get("/v1/models").status_code == 401
        assert client.get("/no/such/path").status_code == 401
        assert client.get("/health").status_code == 200
        for headers in ({"authorization": "Bearer secret-1"}, {"x-api-key": "secret-2"}):
            assert client.post(CHAT, json={"messages": USER}, headers=headers).status_code == 200
        error = client.post("/v1/messages", json={}).json()
        assert error == {
            "type": "error",
            "error": {"type": "authentication_error", "message": "the key is missing or wrong"},
        }
    with pytest.raises(InputError, match="--key: is empty"):
        KeyAccess(backend.tokenizer, [""])


@pytest.mark.parametrize("headers", [{"host": "evil.example:80"}, {"origin": "https://evil.example"}])
def test_no_web_page_reaches_a_server_without_keys(client: httpx.Client, headers: dict[str, str]) -> None:
    assert client.post(CHAT, json={"messages": USER}, headers=headers).status_code == 403
    assert client.post(CHAT, json={"messages": USER}, headers={"origin": "http://localhost:3000"}).status_code == 200


def test_large_bodies_are_refused_before_they_are_read(client: httpx.Client) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=30) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n".encode())
        assert raw.recv(1000).startswith(b"HTTP/1.1 413 ")

    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b" " * 1000

    response = client.post(CHAT, content=endless())
    assert response.status_code == 413 and message_of(response) == "the body has more than 10000 bytes"
    still_answers(client)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "1" * 5000}, "prompt"),
        ("/tokenize", {"prompt": "1" * 5000}, "prompt"),
        (CHAT, {"messages": [*USER, {"role": "user", "content": "1" * 5000}]}, "messages"),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "1" * 5000}]}, "messages"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"1" * 5000: True}}, "messages"),
        (
            CHAT,
            {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "description": "1" * 5000}}]},
            "messages",
        ),
    ],
)
def test_texts_beyond_any_prompt_are_refused_before_they_are_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str
) -> None:
    longest = max(map(len, tokenizer.backend.get_vocab()))
    assert tokenizer.longest_token == longest

    def read(self: Tokenizer, text: str, **_: Any) -> list[int]:
        raise AssertionError("it was tokenized")

    with served(ScriptedBackend(tokenizer, ["x"], max_positions=4000 // longest), limits=SMALL) as client:
        monkeypatch.setattr(Tokenizer, "encode", read)
        response = client.post(path, json=body)
    assert response.status_code == 400
    assert message_of(response).startswith(f"{field}: has 5,0") and "never have more than" in message_of(response)


def test_a_model_that_answers_no_more_is_not_healthy(client: httpx.Client, backend: ScriptedBackend) -> None:
    backend.failure = "its process was killed"
    response = client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "failed"})


def test_slow_bodies_and_headers_are_given_up(client: httpx.Client) -> None:
    where = client.base_url.host, client.base_url.port or 0
    with socket.create_connection(where, timeout=30) as slow:
        slow.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
    for sent in (b"", b"POST /v1"):
        with socket.create_connection(where, timeout=30) as silent:
            silent.sendall(sent)
            assert silent.recv(1000) == b""
    with socket.create_connection(where, timeout=30) as wide:
        wide.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                wide.sendall(b"x: " + b"y" * 1000 + b"\r\n")
            raise OSError(wide.recv(1))
    still_answers(client)


def test_a_slow_second_request_is_given_up_too(client: httpx.Client) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=30) as kept:
        kept.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += kept.recv(1000)
        kept.sendall(b"GET /hea")
        assert kept.recv(1000) == b""


def test_too_many_requests_are_told_to_come_back(client: httpx.Client, backend: ScriptedBackend) -> None:
    backend.said = [None]
    with (
        client.stream("POST", CHAT, json={"messages": USER, "stream": True}),
        client.stream("POST", "/v1/messages", json={"messages": USER, "stream": True, "max_tokens": 9}),
    ):
        for path in (CHAT, "/v1/messages"):
            response = client.post(path, json={"messages": USER, "max_tokens": 9})
            assert response.status_code == 429 and response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "rate_limit_error"
    backend.said = ["Hello."]
    until(lambda: backend.cancelled == 2)
    until(lambda: client.post(CHAT, json={"messages": USER}).status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_sampling(
    client: httpx.Client, backend: ScriptedBackend, stream: bool
) -> None:
    backend.said = [None]
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=30) as raw:
        body = json.dumps({"messages": USER, "stream": stream}).encode()
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: bool(backend.asked))
        assert backend.cancelled == 0
    until(lambda: backend.cancelled == 1)
    backend.said = ["Hello."]
    until(lambda: "llamarl_requests_in_flight 1" in client.get("/metrics").text.splitlines())
    assert "llamarl_cancelled_requests_total 1" in client.get("/metrics").text


def test_a_client_that_reads_nothing_is_cut_off(tokenizer: Tokenizer) -> None:
    """With far more to send than the kernel keeps for it."""
    backend = ScriptedBackend(tokenizer, ["x" * 150_000], max_positions=1_000_000)
    with served(backend, limits=ServeLimits(write_s=1, grace_s=1)) as client, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((client.base_url.host, client.base_url.port or 0))
        body = json.dumps({"messages": USER, "logprobs": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        deaf.sendall(head.encode() + body)
        ended = select.poll()
        ended.register(deaf, 0)  # no reading: only its end
        assert ended.poll(60_000), "it still holds its connection"
        still_answers(client)


def test_connections_beyond_the_limit_are_closed_and_the_others_live(client: httpx.Client) -> None:
    where = client.base_url.host, client.base_url.port or 0
    still_answers(client)  # opens its connection
    crowd = [socket.create_connection(where, timeout=30) for _ in range(200)]
    try:
        still_answers(client)
    finally:
        for one in crowd:
            one.close()
    still_answers(client)


BODIES: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"prompt": "\\udfff"}',
    b'{"a": ' * 20_000 + b"1" + b"}" * 20_000,
    b"[" * 9_000,
    b'{"max_tokens": NaN}',
    b'{"max_tokens": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 99999999999999999999999999}',
]


@pytest.mark.parametrize("path", ALL_PATHS)
def test_what_is_no_request_gets_400_in_one_line(patient: httpx.Client, path: str) -> None:
    for body in BODIES:
        response = patient.post(path, content=body)
        assert response.status_code == 400, (body[:80], response.text)
        message_of(response)
    still_answers(patient)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages: is empty"),
    (CHAT, {"messages": USER, "no_such_field": 1}, "no_such_field: is not a field"),
    (CHAT, {"messages": [{**USER[0], "extra": 1}]}, "messages[0].extra: is not a field"),
    (CHAT, {"messages": USER, "max_tokens": -1}, "max_tokens: must be at least 1, is -1"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens: must be at least 1, is 0"),
    (CHAT, {"messages": USER, "max_tokens": 10**9}, "max_tokens: prompt ("),
    (CHAT, {"messages": USER, "n": -1}, "n: must be from 1 to 128"),
    (CHAT, {"messages": USER, "n": 10**6}, "n: must be from 1 to 128"),
    (CHAT, {"messages": USER, "temperature": -0.1}, "temperature: must be from 0 to 100"),
    (CHAT, {"messages": USER, "top_p": 1.5}, "top_p: must be from 0 to 1"),
    (CHAT, {"messages": USER, "top_k": -2}, "top_k: must be at least -1"),
    (CHAT, {"messages": USER, "stop": [""]}, "stop: at most 64 texts"),
    (CHAT, {"messages": USER, "stop_token_ids": [-1]}, "stop_token_ids: token ids are from 0 to 257"),
    (CHAT, {"messages": USER, "logit_bias": {"1": 5}}, "logit_bias: is not supported; leave it out or at {}"),
    (CHAT, {"messages": USER, "frequency_penalty": 0.1}, "frequency_penalty: is not supported"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format: is not supported"),
    (CHAT, {"messages": USER, "ignore_eos": 0}, "ignore_eos: is not supported; leave it out or at false"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 3}, "top_logprobs: only log-probs of sampled"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice: only 'auto' and 'none'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content: a part of type"),
    (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role: invalid enum value 'robot'"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}, "the prompt has "),
    ("/v1/completions", {"prompt": []}, "prompt: expected a text"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt: expected a text"),
    ("/v1/completions", {"prompt": ""}, "prompt: is empty"),
    ("/v1/completions", {"prompt": [99999]}, "prompt: token ids are from 0 to 257"),
    ("/v1/completions", {"prompt": ["a"] * 200}, "prompt: at most 128 answers"),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True}, "stream: takes one prompt"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix: is not supported"),
    ("/inference/v1/generate", {"token_ids": []}, "token_ids: is empty"),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"max_tokens": "x"}},
        "sampling_params.max_tokens:",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"min_tokens": 3}},
        "min_tokens: is not supported",
    ),
    ("/v1/messages", {"messages": USER}, "object missing required field 'max_tokens'"),
    ("/v1/messages", {"messages": USER, "max_tokens": 5, "tool_choice": {"type": "any"}}, "tool_choice: only"),
    ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id: is not supported"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "i"}]}, "input[0].type: 'item_reference'"),
    ("/tokenize", {}, "prompt: give either prompt or messages"),
    ("/detokenize", {"tokens": [-1]}, "tokens: token ids are from 0 to 257"),
]


@pytest.mark.parametrize(("path", "body", "told"), WRONG)
def test_wrong_fields_are_named(patient: httpx.Client, path: str, body: dict[str, Any], told: str) -> None:
    response = patient.post(path, json=body)
    assert response.status_code == 400, response.text
    assert message_of(response).startswith(told)


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert client.get("/nope").status_code == 404
    assert client.get(CHAT).status_code == 405
    assert client.post("/metrics").status_code == 405
    assert client.delete("/v1/models").status_code == 405


def test_a_fault_of_ours_is_told_without_what_was_sent(
    client: httpx.Client, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(backend, "_pieces", broken)
    with caplog.at_level(logging.ERROR, "llamarl.serve"):
        response = client.post(CHAT, json={"messages": [{"role": "user", "content": "my secret"}]})
    assert response.status_code == 500 and "ZeroDivisionError" not in response.text
    assert "ZeroDivisionError" in caplog.text and "my secret" not in caplog.text


def test_a_stop_lets_running_answers_end(tokenizer: Tokenizer) -> None:
    """New connections are refused at once; the answer under way is whole."""
    from llamarl.serve.app import make_app

    backend = ScriptedBackend(tokenizer, [None])
    limits = ServeLimits(grace_s=1)
    server = HttpServer(make_app(backend, KeyAccess(tokenizer), limits), limits)
    server.start()
    with (
        httpx.Client(base_url=server.url, timeout=30) as client,
        client.stream("POST", CHAT, json={"messages": USER, "stream": True}) as response,
    ):
        assert response.status_code == 200
        closing = threading.Thread(target=server.close)
        closing.start()
        closing.join()
    assert backend.cancelled == 1  # it would never have ended; the time for it did
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=1)


def test_a_taken_port_is_named(client: httpx.Client, backend: ScriptedBackend) -> None:
    from llamarl.serve.app import make_app

    app = make_app(backend, KeyAccess(backend.tokenizer), SMALL)
    with pytest.raises(InputError, match="cannot be listened on: Address already in use"):
        HttpServer(app, SMALL, port=client.base_url.port or 0)
