"""The experts of every cached token, kept beside its keys and values: written, shared and copied with them.

So a prompt's experts are there once for all samples, what a draft got wrong is overwritten, and tokens of a chunk, a tool's
reply or a resumed answer have theirs without being asked for. `RouteRecorder` takes them out before pages are released. The
experts that count are those of the pass that sampled a token, so they are taken once: what a sequence computes again after a
pause, or with new weights, changes nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarl.generate.sequences import Running
from llamarl.generate.sequences import Sequence as Sample
from llamarl.routes import RouteFormat


class RoutePages:
    """Ids of all cached tokens, [pages, tokens of a page, layers, experts of a token]."""

    def __init__(self, form: RouteFormat, num_pages: int, page_tokens: int, device: torch.device | str) -> None:
        """Room for `num_pages` pages besides page 0, which no sequence holds."""
        dtype = torch.uint8 if form.id_bytes == 1 else torch.int16  # of more ids than 256, the bits of <u2
        size = (num_pages + 1, page_tokens, form.layers, form.per_token)
        self.form, self.page_tokens = form, page_tokens
        self._ids_PTLK = torch.zeros(size, dtype=dtype, device=device)

    def empty(self, num_tokens: int) -> Tensor:
        """Memory for the experts of so many tokens."""
        return self._ids_PTLK.new_empty(num_tokens, *self._ids_PTLK.shape[2:])

    def put(self, pages_N: Tensor, within_N: Tensor, chosen_NLK: Tensor) -> None:
        """Write the experts of tokens to their places."""
        self._ids_PTLK[pages_N, within_N] = chosen_NLK

    def copy_pages(self, sources_P: Tensor, targets_P: Tensor) -> None:
        self._ids_PTLK[targets_P] = self._ids_PTLK[sources_P]

    def read(self, places_N: Tensor) -> Tensor:
        """Rows of bytes of tokens, by page * page_tokens + place in the page."""
        rows = self._ids_PTLK.view(-1, self.form.layers * self.form.per_token)[places_N]
        return rows.view(torch.uint8)


class CachedSpan(NamedTuple):
    """Cached tokens [start, end) of a sequence, and the pages that hold it."""

    pages: Sequence[int]
    start: int
    end: int

    def places(self, page_tokens: int) -> NDArray[np.int64]:
        positions = np.arange(self.start, self.end)
        return np.asarray(self.pages, dtype=np.int64)[positions // page_tokens] * page_tokens + positions % page_tokens


ReadSpans = Callable[[Sequence[CachedSpan]], list[bytes]]


class RouteRecorder:
    """Takes the experts of sequences out of their pages. `read` returns the rows of spans, of bursts that have ended."""

    def __init__(self, form: RouteFormat, read: ReadSpans) -> None:
        self._form, self._read = form, read

    def keep(self, running: Sequence[tuple[Running, int]]) -> None:
        """Keep what is new of sequences with so many tokens behind their prompts. To be called before they lose their pages,
        or are read again."""
        wanted = [(one, count) for one, count in running if one.sequence.group.prompt.kind != "evaluation"]
        spans = [span for one, count in wanted for span in (self._of_prompt(one, count), self._of_answer(one, count))]
        found = iter(self._read(spans))
        for (one, _), prompt, answer in zip(wanted, found, found, strict=True):
            self._keep(one.sequence, prompt, answer)

    def _of_prompt(self, one: Running, count: int) -> CachedSpan:
        """The prompt but its last token, which every sample reads itself; nothing if this reading is known."""
        sequence, group = one.sequence, one.sequence.group
        known = sequence.routes or not count or group.route_reading == sequence.reading
        return CachedSpan(one.pages, 0, 0 if known else len(group.tokens) - 1)

    def _of_answer(self, one: Running, count: int) -> CachedSpan:
        before = len(one.sequence.group.tokens) - 1
        return CachedSpan(one.pages, before + len(one.sequence.routes) // self._form.row_bytes, before + count)

    def _keep(self, sequence: Sample, prompt: bytes, answer: bytes) -> None:
        group = sequence.group
        if group.route_reading is None and (answer or prompt):
            group.routes, group.route_reading = prompt, sequence.reading
        elif prompt and prompt != group.routes:
            sequence.prompt_routes = prompt
        sequence.routes += answer

    def of(self, sequence: Sample, num_tokens: int) -> tuple[bytes, bytes]:
        """Experts of the states that predicted the first `num_tokens` tokens of an answer, and of its prompt if they are not
        those of its group. The answer to a call has both: it is a part of some other text."""
        own = bytes(sequence.routes[: num_tokens * self._form.row_bytes])
        if sequence.group.prompt.kind == "call":
            return own, sequence.prompt_routes or sequence.group.routes
        return own, sequence.prompt_routes
