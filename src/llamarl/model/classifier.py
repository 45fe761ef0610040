"""Models with one score instead of a vocabulary (`value_head`): reward models and critics. Their folders have the layout of
sequence classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from torch.nn import functional as F

from llamarl.errors import ModelError
from llamarl.families.parameters import family_of
from llamarl.model.checkpoint import Checkpoint, checked_spans, empty_model
from llamarl.model.hf_config import config_path, is_classifier, read_classifier_shape, read_json_object, read_shape
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.model_spec import ModelSpec


class Classifier:
    """Scores texts. Tokens `padding` at the end of a text are ignored, as in transformers."""

    def __init__(self, model: Transformer, padding: int | None) -> None:
        self._model, self._padding = model, padding

    @property
    def max_tokens(self) -> int:
        return self._model.shape.max_positions

    @torch.inference_mode()
    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """One score for each text, from the state of its last token."""
        rows = [self._without_padding(text) for text in texts]
        longest, device = max(map(len, rows)), self._model.lm_head.weight.device
        tokens_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
        for row, text in enumerate(rows):
            tokens_BT[row, : len(text)] = torch.tensor(text)
        positions_BT = torch.arange(longest, device=device).expand(len(rows), longest)
        hidden_BTC = self._model(tokens_BT.to(device), positions_BT, causal_attention)
        last_B = torch.tensor([len(text) - 1 for text in rows], device=device)
        hidden_BC = hidden_BTC[torch.arange(len(rows), device=device), last_B]
        found: list[float] = F.linear(hidden_BC, self._model.lm_head.weight)[:, 0].float().tolist()
        return found

    def _without_padding(self, text: Sequence[int]) -> list[int]:
        kept = list(text)
        while len(kept) > 1 and kept[-1] == self._padding:
            kept.pop()
        return kept


def open_classifier(folder: Path) -> Checkpoint:
    """Checks config and headers against one another. Reads no weights."""
    shape = read_classifier_shape(folder)
    return Checkpoint(folder, shape, checked_spans(folder, shape))


def open_value_model(folder: Path) -> Checkpoint:
    """As `open_classifier`; a language model is taken too, without its head, so that its values begin at zero."""
    if is_classifier(folder):
        return open_classifier(folder)
    spoken = read_shape(folder)
    head = family_of(spoken).head
    spans = checked_spans(folder, spoken, compare_tied=False)
    kept = {name: span for name, span in spans.items() if name != head}
    return Checkpoint(folder, read_value_shape(folder), kept, frozenset([head]))


def read_value_shape(folder: Path) -> ModelSpec:
    """The spec of a folder's model with a head of one row, whichever head it has."""
    if is_classifier(folder):
        return read_classifier_shape(folder)
    return replace(read_shape(folder), tied_head=False, value_head=True)


def load_classifier(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Classifier:
    checkpoint = open_classifier(folder)
    model = empty_model(checkpoint.shape, dtype=dtype, device=device)
    checkpoint.fill(dict(model.named_parameters()))
    return Classifier(model, _padding(folder))


def _padding(folder: Path) -> int | None:
    path = config_path(folder)
    padding = read_json_object(path).get("pad_token_id")
    if padding is not None and type(padding) is not int:
        raise ModelError(f"{path}: 'pad_token_id' must be a token id")
    return padding
