"""`llamarl serve` as a user starts and stops it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers.cli import llamarl

WRONG: list[tuple[list[str], str]] = [
    (["tiny", "--host", "0.0.0.0"], "--host 0.0.0.0: beyond this machine only with --key or --key-file"),
    (["tiny", "--key", ""], "--key: is empty"),
    (["tiny", "--key-file", "/no/such/file"], "--key-file /no/such/file: cannot be read"),
    (["/no/such/folder"], "/no/such/folder"),
    (["tiny", "--max-model-len", "9999", "--device", "cpu"], "--max-model-len 9999: the model has 256 positions"),
    (["tiny", "--host", "300.1.1.1", "--key", "k", "--device", "cpu"], "300.1.1.1:8000: cannot be listened on"),
]


@pytest.mark.parametrize(("arguments", "told"), WRONG)
def test_what_cannot_be_served_is_told_in_one_line(arguments: list[str], told: str) -> None:
    code, out, err = llamarl("serve", *arguments)
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1


def test_a_file_of_keys_must_hold_one(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    assert "holds no key" in llamarl("serve", "tiny", "--key-file", str(tmp_path / "keys")).err


def test_without_its_packages_it_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.cli.serve.find_spec", lambda name: None)
    assert llamarl("serve", "tiny").err == "llamarl: serve needs the package uvicorn: pip install 'llamarl[serve]'\n"


def test_it_prints_its_url_answers_and_lets_answers_end_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    command = [sys.executable, "-m", "llamarl", "serve", "tiny", "--port", "0", "--device", "cpu", "--name", "mine"]
    server = subprocess.Popen(
        [*command, "--key-file", str(tmp_path / "keys"), "--slots", "4"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    name, _, url = server.stdout.readline().split()
    assert name == "mine"
    body = {"prompt": "12+34=", "max_tokens": 200, "temperature": 9, "n": 4, "stream": True, "seed": 2}
    headers = {"authorization": "Bearer secret"}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert client.get("/health").json() == {"status": "ok"}
        lines = response.iter_lines()
        first = next(lines)
        server.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert json.loads(first.removeprefix("data: "))["model"] == "mine"
    assert rest[-1] == "data: [DONE]", "an answer under way was cut off"
    assert server.wait(60) == 0
