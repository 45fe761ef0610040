"""Text of tokens, each with its own piece. Falls back to token numbers where no tokenizer is found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from llamarl.errors import LlamaRLError
from llamarl.model.tokenizer import Tokenizer
from llamarl.observe.run_folder import SNAPSHOTS
from llamarl.view.run_reader import RunReader

_BROKEN = "\ufffd"  # what a decoder puts for bytes that are not a whole character
_MAX_PENDING = 8  # tokens that one character may be spread over
_CONTEXT = 4  # tokens before a piece that decide about its white space


class TokenText:
    """Decodes the tokens of one run with its model's tokenizer: that of model.path, or of a snapshot."""

    def __init__(self, run: RunReader) -> None:
        self._run = run

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        snapshots = self._run.path / SNAPSHOTS
        policies = sorted(snapshots.glob("*/policy")) if snapshots.is_dir() else []
        for folder in (*policies[-1:], self._run.config.model_folder):
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
        return f"no tokenizer: neither {self._run.config.model.path} nor a snapshot is here, so tokens are shown as numbers"

    def text(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return self._tokenizer.decode(tokens)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds. A character of several tokens is put at the last of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in tokens]
        found: list[str] = []
        done = 0  # tokens whose text is complete
        for end in range(1, len(tokens) + 1):
            context = max(0, done - _CONTEXT)
            before = self._decode(tokens[context:done])
            whole = self._decode(tokens[context:end])
            if whole.endswith(_BROKEN) and end < len(tokens) and end - done < _MAX_PENDING:
                found.append("")
                continue
            found.append(whole[len(before) :])
            done = end
        return found

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
