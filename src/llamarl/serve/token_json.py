"""Log-probs of sampled tokens as JSON. Thousands of tokens a second pass here, so what a token is called is written once and
kept; a log-prob has nine digits, which give the same fp32 value when they are read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from llamarl.model.tokenizer import Tokenizer

_KEPT = 1 << 20  # names of tokens; no vocabulary is larger
_UNFINISHED = "\ufffd"


class TokenNames:
    """Texts and bytes of single tokens, and the JSON made of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text: Callable[[int], str] = lru_cache(_KEPT)(self._text)
        self._named: Callable[[int], bytes] = lru_cache(_KEPT)(self._name_and_bytes)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def bytes_of(self, token: int) -> list[int] | None:
        """Bytes of a token; None where the tokenizer does not tell them."""
        text = self.text(token)
        if _UNFINISHED not in text:
            return list(text.encode())
        spelled = self._tokenizer.backend.id_to_token(token) or ""
        known = _byte_alphabet()
        return [known[char] for char in spelled] if spelled and all(char in known for char in spelled) else None

    def _name_and_bytes(self, token: int) -> bytes:
        name = {"token": self.text(token), "bytes": self.bytes_of(token)}
        return json.dumps(name).encode()[:-1] + b', "logprob": '

    def chat_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], *, as_ids: bool, with_top: bool
    ) -> msgspec.Raw:
        """The list `logprobs.content` of a chat answer. `with_top` repeats each token as the likeliest one, which holds for
        greedy answers only."""
        names = (
            [b'{"token": "token_id:%d", "logprob": ' % token for token in tokens]
            if as_ids
            else map(self._named, tokens)
        )
        if with_top:
            parts = [
                b'%b%.9g, "top_logprobs": [%b%.9g}]}' % (name, logprob, name, logprob)
                for name, logprob in zip(names, logprobs, strict=True)
            ]
        else:
            parts = [
                b'%b%.9g, "top_logprobs": []}' % (name, logprob) for name, logprob in zip(names, logprobs, strict=True)
            ]
        return msgspec.Raw(b"[" + b", ".join(parts) + b"]")

    def id_logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> msgspec.Raw:
        """The same with token ids as names and nothing else."""
        pairs = zip(tokens, logprobs, strict=True)
        return msgspec.Raw(
            b"[" + b", ".join(b'{"token": "token_id:%d", "logprob": %.9g}' % pair for pair in pairs) + b"]"
        )


def numbers(logprobs: Sequence[float]) -> msgspec.Raw:
    """A JSON list of log-probs."""
    return msgspec.Raw(b"[" + b", ".join(b"%.9g" % value for value in logprobs) + b"]")


@lru_cache(1)
def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
