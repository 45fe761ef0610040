"""Text of tokens, each with its own piece. Falls back to token numbers where no tokenizer is found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenizers.decoders import DecodeStream

from llamarl.errors import LlamaRLError
from llamarl.model.tokenizer import Tokenizer
from llamarl.observe.rollout_log import ROLLOUTS, TOKENIZER
from llamarl.observe.run_folder import SNAPSHOTS
from llamarl.view.run_reader import RunReader


class TokenText:
    """Decodes the tokens of one run with its model's tokenizer: the copy in the run folder, or that of a model folder."""

    def __init__(self, run: RunReader) -> None:
        self._run = run

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        snapshots = self._run.path / SNAPSHOTS
        policies = sorted(snapshots.glob("*/policy")) if snapshots.is_dir() else []
        for folder in (self._run.path / ROLLOUTS, *policies[-1:], self._run.config.model_folder):
            try:
                return Tokenizer.load(folder)
            except (LlamaRLError, OSError):
                continue
        return None

    @property
    def missing(self) -> str:
        """Why only token numbers can be shown; empty if there is text."""
        if self._tokenizer is not None:
            return ""
        gone = f"rollouts/{TOKENIZER} is gone, and so is {self._run.config.model.path}"
        return f"no tokenizer: {gone}; tokens are shown as numbers"

    def text(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return self._tokenizer.decode(tokens)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds. A character of several tokens is put at the last of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in tokens]
        stream, backend = DecodeStream(skip_special_tokens=False), self._tokenizer.backend
        return [stream.step(backend, int(token)) or "" for token in tokens]
