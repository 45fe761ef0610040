"""A hub on loopback with the shipped model, and an empty cache of its own for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.stub_hub import StubHub, stub_hub

from llamarl.config import Config

TINY = {path.name: path.read_bytes() for path in Config().model_folder.iterdir() if path.is_file()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with stub_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's attempts
        hub.model("org/tiny", TINY)
        yield hub


@pytest.fixture
def tiny_files() -> dict[str, bytes]:
    return dict(TINY)
