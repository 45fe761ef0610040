"""What answers prompts: token ids in, sampled token ids out. The HTTP side knows nothing else of the model.

`LocalBackend` is a model folder in a process of its own; a job answers from its generators by another backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from llamarl.model.tokenizer import Tokenizer
from llamarl.types import Sampling, VersionRun

Finish = Literal["stop", "length"]


class Ask(Struct, frozen=True, kw_only=True):
    """One prompt, to be answered `sampling.samples` times."""

    tokens: Sequence[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()  # texts that end an answer; it keeps the token that completes one
    stop_token_ids: tuple[int, ...] = ()  # tokens that end an answer, besides the model's own end tokens
    seed: int | None = None  # the same request with the same seed has the same answers; None: drawn anew
    stream: bool = False  # whether pieces come while the answer is sampled; else one whole piece for each answer


class Piece(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The next tokens of one answer. The pieces of an answer, in order, make up all of its tokens."""

    index: int  # which of the answers to the prompt
    tokens: Sequence[int]
    logprobs: Sequence[float]  # of each token, under the distribution it was drawn from
    versions: tuple[VersionRun, ...]  # the policy versions that sampled them, in order
    finish: Finish | None = None  # set in the last piece: ended by a stop token or text, or by the token limit
    routes: bytes = b""  # experts of all tokens before the last, the prompt's included; only of a job's answers


class Scores(Struct, frozen=True, kw_only=True):
    """How likely a model finds given tokens. The first token follows nothing, so every list begins with the second."""

    logprobs: Sequence[float]
    ranks: Sequence[int]  # 1: the likeliest
    top: Sequence[Sequence[tuple[int, float]]]  # the likeliest tokens at each place, with log-probs, best first


class BackendStats(Struct, frozen=True, kw_only=True):
    """What `/metrics` shows of a backend."""

    running: int = 0  # answers being sampled
    waiting: int = 0  # answers that have not begun
    cache_share: float = 0.0  # share of the KV cache in use


class Backend(Protocol):
    """Answers prompts; used from one event loop."""

    @property
    def name(self) -> str:
        """Name of the model, as clients see it."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_positions(self) -> int:
        """Longest sequence, prompt and answer together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids that a prompt may hold."""
        ...

    @property
    def version(self) -> int:
        """Newest policy version; 0 for a model that is not trained."""
        ...

    @property
    def stats(self) -> BackendStats: ...

    @property
    def failure(self) -> str:
        """Why nothing is answered any more; empty while all is well."""
        ...

    def ask(self, ask: Ask) -> AsyncIterator[Piece]:
        """Pieces of all answers, as they come. Closing the iterator, or cancelling the task that reads it, ends the sampling.
        Raises RequestRefused."""
        ...

    async def score(self, tokens: Sequence[int], top: int) -> Scores:
        """Log-probs of given tokens at temperature 1, with the `top` likeliest at each place. Raises RequestRefused where the
        backend cannot."""
        ...
