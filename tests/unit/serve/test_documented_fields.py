"""The tables of docs/endpoint.md name every field of every request, with what really becomes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llamarl.serve.about import TokenizeRequest
from llamarl.serve.anthropic_messages import CountRequest, MessagesRequest
from llamarl.serve.app import ROUTES
from llamarl.serve.fields import StrictRequest
from llamarl.serve.generate_tokens import GenerateRequest, SamplingParams
from llamarl.serve.openai_chat import ChatRequest
from llamarl.serve.openai_completions import CompletionRequest
from llamarl.serve.openai_responses import ResponsesRequest

PAGE = (Path(__file__).parents[3] / "docs" / "endpoint.md").read_text()
TABLES: list[tuple[str, type[StrictRequest]]] = [
    ("### POST /v1/chat/completions", ChatRequest),
    ("### POST /v1/completions", CompletionRequest),
    ("### POST /v1/messages", MessagesRequest),
    ("### POST /v1/responses", ResponsesRequest),
    ("### POST /inference/v1/generate", GenerateRequest),
    ("| key of sampling_params | |", SamplingParams),
    ("### POST /tokenize", TokenizeRequest),
]


def documented(start: str) -> dict[str, str]:
    """The first word about each field of the first table behind this text."""
    behind = PAGE.partition(start + "\n")[2]
    assert behind, start
    rows = re.search(r"(?:^\|.*\n)+", behind, re.MULTILINE)
    assert rows is not None
    found = {}
    for row in rows[0].splitlines():
        names, _, about = row.strip("| ").partition(" | ")
        for name in re.findall(r"`(\w+)`", names):
            found[name] = re.split(r"\W", about, maxsplit=1)[0]
    return found


@pytest.mark.parametrize(("start", "request_type"), TABLES)
def test_every_field_is_documented_as_it_is(start: str, request_type: type[StrictRequest]) -> None:
    real = {
        name: "ignored" if name in request_type.IGNORED else "refused" if name in request_type.NEUTRAL else "supported"
        for name in request_type.__struct_fields__
    }
    assert documented(start) == real
    assert {*request_type.IGNORED, *request_type.NEUTRAL} <= {*request_type.__struct_fields__}


def test_counting_takes_fields_of_messages_alone() -> None:
    assert {*CountRequest.__struct_fields__} <= {*MessagesRequest.__struct_fields__}


def test_every_path_is_documented() -> None:
    for method, path in ROUTES:
        assert f"`{method} {path}`" in PAGE
