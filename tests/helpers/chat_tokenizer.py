"""A byte-level tokenizer with merges and a chat template: texts whose tokens differ when they are encoded again."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from llamarl.model.chat_template import ChatTemplate, NoChatTemplate
from llamarl.model.tokenizer import Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(*, template: str = CHATML) -> Tokenizer:
    """With no template, a tokenizer for plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("c", "a"), ("Ã", "©")]  # the last one makes one token of é
    vocab = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made = ChatTemplate(template, special_tokens={}, folder=Path()) if template else NoChatTemplate(Path())
    return Tokenizer(backend, eos_ids=(len(vocab) + 1,), template=made)
