"""Expert ids as bytes: which experts of each layer computed a token, in the order of tokens, layers and ranks.

The generator writes them, the trainer replays them (docs/moe.md). Imports no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from llamarl.errors import JobFailed
from llamarl.model_spec import ModelSpec

Routes = NDArray[np.uint8]
"""Raw rows of ids, one for each token; `RouteFormat.ids` reads them."""


class RoutesDiffer(JobFailed):
    """Recorded experts that cannot be, or are not, those of the policy that sampled the tokens."""


class RouteFormat(Struct, frozen=True):
    """How the experts of one token are written."""

    layers: int  # layers that have experts
    per_token: int  # experts of a token in each of them
    experts: int  # experts of a layer

    @property
    def id_bytes(self) -> int:
        """Bytes of one id: one up to 256 experts, else two."""
        return 1 if self.experts <= 256 else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.per_token * self.id_bytes

    @property
    def first_experts(self) -> Routes:
        """The row of a token that takes the first experts of each layer, for made-up documents."""
        ids = np.tile(np.arange(self.per_token, dtype="<u1" if self.id_bytes == 1 else "<u2"), self.layers)
        return ids.view(np.uint8)

    def ids(self, rows: Routes) -> NDArray[Any]:
        """The ids of each token, [tokens, layers, experts of a token]."""
        dtype = "<u1" if self.id_bytes == 1 else "<u2"
        return np.ascontiguousarray(rows).view(dtype).reshape(len(rows), self.layers, self.per_token)

    def check(self, rows: Routes, of: str) -> None:
        """Refuse rows that no model of this format can have written. `of` says whose they are."""
        if rows.shape[1] != self.row_bytes:
            raise RoutesDiffer(
                f"{of}: {rows.shape[1]} bytes of experts for each token, but {self.layers} layers of {self.per_token} "
                f"experts take {self.row_bytes}; a layer is missing, or another model sampled it"
            )
        ids = self.ids(rows)
        if ids.size and int(ids.max()) >= self.experts:
            raise RoutesDiffer(f"{of}: expert {int(ids.max())} is recorded, but a layer has {self.experts}")

    def check_distinct(self, rows: Routes, of: str) -> None:
        """Refuse rows with an expert that is there twice for one token, which takes longer to find."""
        self.check(rows, of)
        ordered = np.sort(self.ids(rows), axis=-1)
        if (twice := (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)).any():
            token, layer = (int(place) for place in np.argwhere(twice)[0])
            raise RoutesDiffer(
                f"{of}: an expert is recorded twice for token {token} in layer {layer} of those with experts"
            )


def route_format(spec: ModelSpec) -> RouteFormat | None:
    """The format of a model's experts; None: it has none."""
    return RouteFormat(len(spec.expert_layers), spec.experts_per_token, spec.experts) if spec.experts else None


def route_rows(own: bytes, prompt: bytes, *, num_tokens: int, num_prompt: int, of: str) -> Routes:
    """Rows of all tokens but the last, of a prompt of `num_prompt` tokens and an answer of `num_tokens`. `own` are those of
    the states that predicted the answer's tokens, `prompt` those before."""
    row_bytes, rest = divmod(len(own), num_tokens)
    if rest or not row_bytes or len(prompt) != row_bytes * max(0, num_prompt - 1):
        raise RoutesDiffer(
            f"{of}: {len(own)} bytes of experts for an answer of {num_tokens} tokens, and {len(prompt)} for its prompt of "
            f"{num_prompt}; some are missing"
        )
    rows = np.frombuffer(prompt + own, dtype=np.uint8).reshape(-1, row_bytes)
    return rows if num_prompt else rows[1:]  # without a prompt, nothing predicts the first token
