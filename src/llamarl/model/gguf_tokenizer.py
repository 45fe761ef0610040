"""Writes `tokenizer.json` and its companions from the vocabulary in a GGUF file.

GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it, so each supported one is spelled out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from llamarl.errors import ModelError
from llamarl.model.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(numbers: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(f"{_WORDS}|{numbers}|{_REST}"), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


class _Style(Struct, frozen=True, kw_only=True):
    """How a named vocabulary splits text, and which of its tokens end an answer."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    ends: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_STYLES = {
    "smollm": _Style(pre_tokenizer=_digits, ends=("<|im_end|>",)),
    "qwen2": _Style(pre_tokenizer=lambda: _split(r"\p{N}"), ends=("<|im_end|>", "<|endoftext|>"), nfc=True),
    "llama-bpe": _Style(
        pre_tokenizer=lambda: _split(r"\p{N}{1,3}"),
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ignore_merges=True,
        adds_bos=True,
    ),
}


class _Vocabulary(Struct, frozen=True):
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]

    def of_type(self, kind: int) -> list[str]:
        return [token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ == kind]


def write_tokenizer(gguf: GGUFFile, folder: Path) -> dict[str, Any]:
    """Writes the tokenizer's files; returns the token ids that belong in `config.json`."""
    style = _style(gguf)
    vocabulary = _vocabulary(gguf)
    ids = _special_ids(gguf, vocabulary)
    bos = vocabulary.tokens[ids["bos_token_id"]] if "bos_token_id" in ids else None
    _build(gguf, style, vocabulary, bos).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _settings(gguf, vocabulary, ids))
    ends = [vocabulary.tokens.index(token) for token in style.ends if token in vocabulary.tokens]
    eos_ids = list(dict.fromkeys([ids["eos_token_id"], *ends]))
    _write_json(folder / "generation_config.json", {**ids, "eos_token_id": eos_ids})
    return ids


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _style(gguf: GGUFFile) -> _Style:
    model, pre = gguf.fields.get("tokenizer.ggml.model"), gguf.fields.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ModelError(f"{gguf.path}: tokenizer.ggml.model {model!r} is not supported; supported: gpt2")
    if pre not in _STYLES:
        raise ModelError(f"{gguf.path}: tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(_STYLES)}")
    return _STYLES[pre]


def _vocabulary(gguf: GGUFFile) -> _Vocabulary:
    tokens = _texts(gguf, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _texts(gguf, "tokenizer.ggml.merges")]
    types = gguf.fields.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{gguf.path}: tokenizer.ggml.token_type must have one entry per token")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{gguf.path}: tokenizer.ggml.tokens names a token twice")
    pairs = [(merge[0], merge[1]) for merge in merges if len(merge) == 2]
    if len(pairs) != len(merges):
        raise ModelError(f"{gguf.path}: tokenizer.ggml.merges must hold pairs")
    return _Vocabulary(tokens, types, pairs)


def _texts(gguf: GGUFFile, name: str) -> list[str]:
    texts = gguf.fields.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{gguf.path}: {name} is missing or not a list of texts")
    return texts


def _special_ids(gguf: GGUFFile, vocabulary: _Vocabulary) -> dict[str, int]:
    ids = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = gguf.fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < len(vocabulary.tokens):
            raise ModelError(f"{gguf.path}: tokenizer.ggml.{theirs}_token_id {value!r} is not a token")
        ids[f"{ours}_token_id"] = value
    if "eos_token_id" not in ids:
        raise ModelError(f"{gguf.path}: tokenizer.ggml.eos_token_id is missing")
    return ids


def _build(gguf: GGUFFile, style: _Style, vocabulary: _Vocabulary, bos: str | None) -> Tokenizer:
    # Unused tokens only pad the vocabulary to a round size; they stand for no text.
    unused = set(vocabulary.of_type(_UNUSED))
    ids = {token: index for index, token in enumerate(vocabulary.tokens) if token not in unused}
    try:
        model = BPE(vocab=ids, merges=vocabulary.merges, ignore_merges=style.ignore_merges)
    except Exception as error:  # the library raises bare Exception for merges that fit no token
        raise ModelError(f"{gguf.path}: tokens and merges do not fit ({error})") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = style.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    if bos is not None and gguf.fields.get("tokenizer.ggml.add_bos_token", style.adds_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, ids[bos])]
        )
    tokenizer.add_special_tokens([_added(token, special=True) for token in vocabulary.of_type(_CONTROL)])
    tokenizer.add_tokens([_added(token, special=False) for token in vocabulary.of_type(_USER_DEFINED)])
    return tokenizer


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _settings(gguf: GGUFFile, vocabulary: _Vocabulary, ids: dict[str, int]) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {name.removesuffix("_id"): vocabulary.tokens[index] for name, index in ids.items()}
    template = gguf.fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return settings
