"""Whether a model beside the policy reads the policy's tokens."""

from __future__ import annotations

from llamarl.errors import ConfigError
from llamarl.model.tokenizer import Tokenizer


def check_same_tokens(key: str, who: str, own: Tokenizer, spoken: Tokenizer) -> None:
    """Refuses a model whose tokenizer is not the policy's. `key` is the setting that names it, `who` what it is."""
    if own.vocabulary_hash != spoken.vocabulary_hash:
        raise ConfigError(
            f"{key}: its tokenizer is another than the policy's (hashes {own.vocabulary_hash} and "
            f"{spoken.vocabulary_hash}); a {who} must know the same tokens by the same ids"
        )
