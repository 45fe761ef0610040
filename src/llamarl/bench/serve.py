"""`llamarl bench serve`: what HTTP costs on top of the decoder, with a real server in a process of its own.

Clients ask over and over on connections that stay open. The decoder alone is measured on the same model in the same way:
as many answers at once, each replaced as it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import tokenizers
import torch
from msgspec import Struct
from tokenizers import decoders, models, pre_tokenizers

from llamarl.errors import JobFailed
from llamarl.generate.limits import Limits
from llamarl.generate.llm import LLM
from llamarl.generate.sequences import GroupOptions
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model_spec import ModelSpec
from llamarl.types import Problem, PromptGroup, Sampling, tokens_to_bytes

_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
_FIRST_TOKENS = 30  # requests whose first token is timed
_START_S = 600.0
_NOTHING = Problem("", "")


class ServeCase(Struct, frozen=True, kw_only=True):
    """What is measured: `requests` chat requests, `concurrency` at once, with log-probs."""

    model: str
    concurrency: int
    requests: int
    prompt: int  # tokens of each prompt, about
    new: int  # most tokens of each answer
    device: str
    slots: int = 0  # 0: as many as requests at once
    stream: bool = False


class ServeResult(Struct, frozen=True, kw_only=True):
    case: ServeCase
    tokens_per_s: float  # over HTTP, from the first request to the last answer
    decoder_tokens_per_s: float  # of the decoder alone, for as many answers
    requests_per_s: float
    lost: float  # requests without a whole answer
    first_token_s: float  # one request at a time, streamed: median time from the request to the first token
    decoder_first_token_s: float  # the same without HTTP
    memory_start_mib: float  # of the server's processes, after half as many requests
    memory_end_mib: float

    @property
    def share(self) -> float:
        return self.tokens_per_s / self.decoder_tokens_per_s


def bench_serve(case: ServeCase, shape: ModelSpec | None) -> ServeResult:
    """Measure a model folder, or a shape with random weights in a folder made for it."""
    with _folder_of(case, shape) as folder:
        with _server(case, folder) as (port, pid):
            load = asyncio.run(HttpLoad(case, port, pid, chat=folder.chat).run())
        alone = _decoder_alone(case, folder.path)
    return ServeResult(case=case, **load, **alone)


class _Folder(Struct, frozen=True):
    path: str
    chat: bool  # whether it has a chat template
    max_positions: int


@contextmanager
def _folder_of(case: ServeCase, shape: ModelSpec | None) -> Iterator[_Folder]:
    if shape is None:
        llm = LLM(case.model, device="cpu")
        yield _Folder(case.model, llm.tokenizer.has_chat, llm.shape.max_positions)
        return
    with tempfile.TemporaryDirectory(prefix="llamarl-bench-") as made:
        folder = Path(made) / case.model
        dtype = torch.float32 if case.device == "cpu" else torch.bfloat16
        save_model(random_model(shape, dtype=dtype, device=case.device), folder, dtype=dtype)
        if case.device != "cpu":
            torch.cuda.empty_cache()  # the server needs the memory
        write_bench_tokenizer(folder, shape.vocab_size)
        yield _Folder(str(folder), True, shape.max_positions)


def write_bench_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer with a text for every token: bytes, then words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(vocab_size - len(alphabet) - 1)]
    vocabulary = {text: place for place, text in enumerate([*alphabet, *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@contextmanager
def _server(case: ServeCase, folder: _Folder) -> Iterator[tuple[int, int]]:
    """A server of the folder in a process of its own: its port and process id."""
    options = ["--port", "0", "--device", case.device, "--slots", str(case.slots or case.concurrency)]
    options += ["--max-model-len", str(min(case.prompt + case.new, folder.max_positions))]
    command = [sys.executable, "-m", "llamarl", "serve", folder.path, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " on http://" not in line:
            raise JobFailed("bench serve: the server did not start")
        yield int(line.rpartition(":")[2]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


class HttpLoad:
    """Clients that ask over and over."""

    def __init__(self, case: ServeCase, port: int, pid: int, *, chat: bool) -> None:
        self._case, self._port, self._pid, self._chat = case, port, pid, chat
        self._sampled = self._lost = 0

    async def run(self) -> dict[str, float]:
        case = self._case
        await self.ask_all(case.concurrency)  # to capture the graphs of all batches
        first_token_s = await self._first_token_s()
        await self.ask_all(max(case.concurrency, case.requests // 2))  # random weights name every token; names are kept
        memory_mib, self._sampled = _memory_mib(self._pid), 0
        start_s = time.monotonic()
        await self.ask_all(case.requests)
        seconds = time.monotonic() - start_s
        return {
            "tokens_per_s": self._sampled / seconds,
            "requests_per_s": case.requests / seconds,
            "lost": self._lost,
            "first_token_s": first_token_s,
            "memory_start_mib": memory_mib,
            "memory_end_mib": _memory_mib(self._pid),
        }

    async def ask_all(self, requests: int) -> None:
        numbers = iter(range(requests))
        clients = (self._client(numbers) for _ in range(min(self._case.concurrency, requests)))
        await asyncio.gather(*clients)

    async def _client(self, numbers: Iterator[int]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        for number in numbers:
            writer.write(self._request(number, stream=self._case.stream))
            try:
                body = await (_read_events(reader) if self._case.stream else _read_body(reader))
                usage = json.loads(body[-1] if isinstance(body, list) else body)["usage"]
                self._sampled += usage["completion_tokens"]
            except (OSError, EOFError, ValueError, KeyError, TypeError):
                self._lost += 1
                return
        writer.close()

    def _request(self, number: int, *, stream: bool) -> bytes:
        case, text = self._case, f"{number % 90 + 10}+34="
        body: dict[str, object] = {"temperature": 1.0, "stream": stream, "seed": number}
        if self._chat:
            text += "x" * max(0, case.prompt - len(text) - len("user: \nassistant: "))
            body |= {"messages": [{"role": "user", "content": text}], "logprobs": True, "max_tokens": case.new}
        else:
            body |= {"prompt": text, "logprobs": 0, "max_tokens": case.new}
        if stream:
            body["stream_options"] = {"include_usage": True}
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        encoded = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(encoded)}\r\n\r\n"
        return head.encode() + encoded

    async def _first_token_s(self) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        found = []
        for number in range(_FIRST_TOKENS):
            start_s = time.monotonic()
            writer.write(self._request(number, stream=True))
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                raise JobFailed(f"bench serve: the server refuses such requests: {(await reader.read(1000)).decode()}")
            await reader.readuntil(b"\n\n")
            found.append(time.monotonic() - start_s)
            await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        return statistics.median(found)


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise ValueError(head)
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.partition(b":")[2]))


async def _read_events(reader: asyncio.StreamReader) -> list[bytes]:
    text = await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
    return [line.removeprefix(b"data: ") for line in text.split(b"\n") if line.startswith(b"data: {")]


def _memory_mib(pid: int) -> float:
    """Of a process and its children."""
    process = Path(f"/proc/{pid}")
    children = (process / "task" / str(pid) / "children").read_text().split()
    own_mib = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return own_mib + sum(_memory_mib(int(child)) for child in children)


def _decoder_alone(case: ServeCase, folder: str) -> dict[str, float]:
    llm = LLM(folder, device=case.device)
    length = min(case.prompt + case.new, llm.shape.max_positions)
    limits = Limits(
        slots=case.slots or case.concurrency, max_prompt_tokens=length - 1, max_new_tokens=length - 1, max_length=length
    )
    decoder, ordinals = llm.decoder(limits, seed=0), count()
    decoder.version = 0
    if llm.tokenizer.has_chat:
        prompts: Sequence[list[int]] = [[number % 200 + 1] * case.prompt for number in range(case.requests)]
    else:
        prompts = [llm.tokenizer.encode(f"{number % 90 + 10}+34=") for number in range(case.requests)]
    sampling = Sampling(max_new_tokens=min(case.new, length - max(map(len, prompts))))

    def add(tokens: list[int]) -> None:
        ordinal = next(ordinals)
        group = PromptGroup(ordinal, _NOTHING, tokens_to_bytes(tokens), sampling)
        decoder.add(group, GroupOptions(draws=ordinal, stream=case.stream))

    def all_of(some: Sequence[list[int]]) -> float:
        before, start_s = decoder.tokens_sampled, time.monotonic()
        waiting = iter(some)
        for tokens in some[: case.concurrency]:
            next(waiting)
            add(tokens)
        while not decoder.idle:
            for _ in decoder.step():
                for tokens in islice(waiting, 1):
                    add(tokens)
            decoder.take_streamed()
        return (decoder.tokens_sampled - before) / (time.monotonic() - start_s)

    def first() -> float:
        start_s = time.monotonic()
        decoder.add(
            PromptGroup(next(ordinals), _NOTHING, tokens_to_bytes(prompts[0]), sampling), GroupOptions(stream=True)
        )
        while not decoder.take_streamed():
            decoder.step()
        seconds = time.monotonic() - start_s
        while not decoder.idle:
            decoder.step()
        decoder.take_streamed()
        return seconds

    all_of(prompts[: case.concurrency])
    return {
        "decoder_first_token_s": statistics.median(first() for _ in range(_FIRST_TOKENS)),
        "decoder_tokens_per_s": all_of(prompts),
    }


def describe_serve(result: ServeResult) -> str:
    case = result.case
    added_s = result.first_token_s - result.decoder_first_token_s
    rows = [
        ("over HTTP", f"{result.tokens_per_s:,.0f} tokens/s, {result.requests_per_s:,.0f} requests/s"),
        ("decoder alone", f"{result.decoder_tokens_per_s:,.0f} tokens/s; over HTTP {result.share:.0%} of it"),
        ("first token", f"{result.first_token_s * 1e3:.1f} ms, {added_s * 1e3:.1f} ms more than the decoder alone"),
        ("lost", f"{result.lost:.0f} of {case.requests} requests"),
        (
            "server's memory",
            f"{result.memory_start_mib:,.0f} MiB at the start, {result.memory_end_mib:,.0f} at the end",
        ),
    ]
    how = "streamed" if case.stream else "whole"
    title = f"{case.model}, {case.concurrency} at once, {case.prompt} + {case.new} tokens, {how}, on {case.device}"
    return "\n".join([title, *(f"  {name:<18} {text}" for name, text in rows)])
