"""A reward model: a transformer with one score instead of a vocabulary, from a sequence-classification folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.errors import ModelError
from llamarl.model.checkpoint import Checkpoint, checked_spans, empty_model
from llamarl.model.hf_config import config_path, read_classifier_shape, read_json_object
from llamarl.model.tensor_io import read_tensor
from llamarl.model.transformer import Transformer, causal_attention

_SCORE = "score.weight"


class Classifier:
    """Scores texts. Tokens `padding` at the end of a text are ignored, as in transformers."""

    def __init__(self, model: Transformer, score_1C: Tensor, padding: int | None) -> None:
        self._model, self._score_1C, self._padding = model, score_1C, padding

    @property
    def max_tokens(self) -> int:
        return self._model.shape.max_positions

    @torch.inference_mode()
    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """One score for each text, from the state of its last token."""
        rows = [self._without_padding(text) for text in texts]
        longest, device = max(map(len, rows)), self._score_1C.device
        tokens_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
        for row, text in enumerate(rows):
            tokens_BT[row, : len(text)] = torch.tensor(text)
        positions_BT = torch.arange(longest, device=device).expand(len(rows), longest)
        hidden_BTC = self._model(tokens_BT.to(device), positions_BT, causal_attention)
        last_B = torch.tensor([len(text) - 1 for text in rows], device=device)
        hidden_BC = hidden_BTC[torch.arange(len(rows), device=device), last_B]
        found: list[float] = F.linear(hidden_BC, self._score_1C)[:, 0].float().tolist()
        return found

    def _without_padding(self, text: Sequence[int]) -> list[int]:
        kept = list(text)
        while len(kept) > 1 and kept[-1] == self._padding:
            kept.pop()
        return kept


def open_classifier(folder: Path) -> Checkpoint:
    """Checks config and headers against one another. Reads no weights."""
    shape = read_classifier_shape(folder)
    return Checkpoint(folder, shape, checked_spans(folder, shape, {_SCORE: (1, shape.hidden_size)}))


def load_classifier(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Classifier:
    checkpoint = open_classifier(folder)
    model = empty_model(checkpoint.shape, dtype=dtype, device=device)
    checkpoint.fill(dict(model.named_parameters()))
    score_1C = torch.empty(1, checkpoint.shape.hidden_size, dtype=dtype, device=device)
    read_tensor(checkpoint.spans[_SCORE], score_1C)
    return Classifier(model, score_1C, _padding(folder))


def _padding(folder: Path) -> int | None:
    path = config_path(folder)
    padding = read_json_object(path).get("pad_token_id")
    if padding is not None and type(padding) is not int:
        raise ModelError(f"{path}: 'pad_token_id' must be a token id")
    return padding
