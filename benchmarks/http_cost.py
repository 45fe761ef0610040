"""CPU time of the HTTP side for each request and token, with a backend that has its answers ready.

    python benchmarks/http_cost.py [--stream]

Chat requests of 128 + 256 tokens with log-probs, 256 at once, against a server in a process of its own. CPU time is read from
the kernel, so it does not depend on what else runs on the machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from llamarl.bench.serve import HttpLoad, ServeCase, write_bench_tokenizer
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.app import make_app
from llamarl.serve.backend import Ask, BackendStats, Piece, Scores
from llamarl.serve.limits import ServeLimits
from llamarl.serve.run import HttpServer
from llamarl.serve.session import KeyAccess
from llamarl.types import VersionRun

VOCABULARY, PROMPT, NEW, BURST = 128_256, 128, 256, 8
REQUESTS, CONCURRENCY = 2000, 256


class ReadyBackend:
    """Answers at once: whole, or in bursts of 8 tokens as a GPU's decoder does."""

    failure = ""
    name, vocab_size, version, max_positions, stats = "ready", VOCABULARY, 0, PROMPT + NEW, BackendStats()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        chance = random.Random(0)
        self._tokens = [chance.randrange(VOCABULARY - 1) for _ in range(NEW)]
        self._logprobs = [chance.gauss(-10, 2) for _ in range(NEW)]

    async def ask(self, ask: Ask) -> AsyncIterator[Piece]:
        size = BURST if ask.stream else NEW
        for start in range(0, NEW, size):
            await asyncio.sleep(0)
            yield Piece(
                index=0,
                tokens=self._tokens[start : start + size],
                logprobs=self._logprobs[start : start + size],
                versions=(VersionRun(0, size),),
                finish="length" if start + size >= NEW else None,
            )

    async def score(self, tokens: Sequence[int], top: int) -> Scores:
        raise NotImplementedError


def serve(folder: Path) -> None:
    tokenizer, limits = Tokenizer.load(folder), ServeLimits()
    server = HttpServer(make_app(ReadyBackend(tokenizer), KeyAccess(tokenizer), limits), limits)
    server.run(ready=lambda: print(server.port, flush=True))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(stream: bool) -> None:
    with tempfile.TemporaryDirectory() as made:
        write_bench_tokenizer(Path(made), VOCABULARY)
        process = subprocess.Popen([sys.executable, __file__, made], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        case = ServeCase(
            model="ready",
            concurrency=CONCURRENCY,
            requests=REQUESTS,
            prompt=PROMPT,
            new=NEW,
            device="cpu",
            stream=stream,
        )
        load = HttpLoad(case, int(process.stdout.readline()), process.pid, chat=True)
        asyncio.run(load.ask_all(CONCURRENCY))  # names of tokens are made once
        before = cpu_s(process.pid)
        asyncio.run(load.ask_all(REQUESTS))
        each_s = (cpu_s(process.pid) - before) / REQUESTS
        process.terminate()
        process.wait()
    how = "streamed in bursts of 8" if stream else "whole"
    print(
        f"{how}: {each_s * 1e3:.2f} ms of CPU for a request, {each_s / NEW * 1e6:.2f} us for a token; "
        f"one core: {NEW / each_s:,.0f} tokens/s"
    )


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--stream"]):
        measure(stream=bool(sys.argv[1:]))
    else:
        serve(Path(sys.argv[1]))
