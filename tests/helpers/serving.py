"""A server on loopback whose model says what the test wants, and the folder of a small model that knows chats and tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from msgspec.structs import replace
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from helpers.models import SHAPE, lively_model
from llamarl.generate.stop_strings import StopStrings
from llamarl.model.checkpoint import save_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.app import make_app
from llamarl.serve.backend import Ask, BackendStats, Piece, Scores
from llamarl.serve.limits import ServeLimits
from llamarl.serve.run import HttpServer
from llamarl.serve.session import Access, KeyAccess
from llamarl.types import VersionRun

TAGS = (
    "{% if tools %}<|im_start|>system\n# Tools, to be called in <tool_call></tool_call> tags\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if quiet %}<think></think>{% endif %}{% endif %}"
)
JSON = (
    TAGS.replace("<tool_call></tool_call> tags", 'JSON with "name" and "parameters"')
    .replace("<tool_call>", "")
    .replace("</tool_call>", "")
)


def chat_tokenizer(folder: Path, template: str = TAGS) -> Tokenizer:
    """A byte-level tokenizer, so that any text has tokens and characters come in parts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = FastTokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")]
    )
    folder.mkdir(exist_ok=True, parents=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(folder)


def chat_folder(folder: Path, template: str = TAGS) -> Path:
    """A whole model folder with random weights."""
    save_model(lively_model(shape=replace(SHAPE, vocab_size=258, max_positions=1024)), folder)
    chat_tokenizer(folder, template)
    return folder


class ScriptedBackend:
    """Says the given texts, one for each answer, over and over; `None` never ends. A stream has pieces of a few tokens."""

    name, vocab_size, version = "scripted", 258, 7
    failure = ""

    def __init__(
        self, tokenizer: Tokenizer, said: Sequence[str | None], *, piece: int = 3, max_positions: int = 2000
    ) -> None:
        self.tokenizer, self.said, self._piece, self.max_positions = tokenizer, list(said), piece, max_positions
        self.asked: list[Ask] = []
        self.cancelled = 0
        self.scored: list[list[int]] = []

    @property
    def stats(self) -> BackendStats:
        return BackendStats(running=1, waiting=2, cache_share=0.5)

    async def ask(self, ask: Ask) -> AsyncIterator[Piece]:
        self.asked.append(ask)
        for index in range(ask.sampling.samples):
            said = self.said[index % len(self.said)]
            if said is None:
                if ask.stream:
                    yield Piece(index=index, tokens=[65], logprobs=[-1.0], versions=(VersionRun(7, 1),))
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled += 1
            else:
                for piece in self._pieces(ask, index, said):
                    yield piece

    def _pieces(self, ask: Ask, index: int, said: str) -> Iterator[Piece]:
        tokens = [*self.tokenizer.encode(said), *self.tokenizer.eos_ids]
        end = StopStrings(self.tokenizer, ask.stop, ask.stop_token_ids).end_of(tokens)
        stopped = end is not None or len(tokens) <= ask.sampling.max_new_tokens
        tokens = tokens[: ask.sampling.max_new_tokens if end is None else end]
        size = self._piece if ask.stream else len(tokens)
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            last = start + size >= len(tokens)
            yield Piece(
                index=index,
                tokens=part,
                logprobs=[-(start + place) / 8 for place in range(len(part))],
                versions=(VersionRun(6 if start == 0 else 7, len(part)),),
                finish=("stop" if stopped else "length") if last else None,
            )

    async def score(self, tokens: Sequence[int], top: int) -> Scores:
        self.scored.append(list(tokens))
        count = len(tokens) - 1
        return Scores(
            logprobs=[-0.5] * count,
            ranks=[2] * count,
            top=[[(65 + place, -0.1) for place in range(top)] for _ in range(count)],
        )


@contextmanager
def served(
    backend: ScriptedBackend, *, access: Access | None = None, limits: ServeLimits | None = None
) -> Iterator[httpx.Client]:
    """A client of a real server on a free port."""
    limits = limits or ServeLimits(grace_s=1)
    server = HttpServer(make_app(backend, access or KeyAccess(backend.tokenizer), limits), limits)
    server.start()
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            yield client
    finally:
        server.close()


def events_of(response: httpx.Response) -> list[dict[str, object]]:
    """The JSON of every server-sent event but the end mark."""
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]
