"""Text to tokens and back, and chats to prompts, from the files of a Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from llamarl.errors import ModelError
from llamarl.families.parameters import FAMILIES
from llamarl.model.chat_template import ChatOptions, ChatTemplate, Messages, NoChatTemplate, Template, Tools
from llamarl.model.hf_config import read_json_object

_HERE = "(what the model said)"


class Tokenizer:
    """Encodes prompts and decodes completions. A model's output is never tokenized again."""

    def __init__(self, backend: tokenizers.Tokenizer, *, eos_ids: tuple[int, ...], template: Template) -> None:
        self.backend = backend
        self._template = template
        self.eos_ids = eos_ids
        # One more than the largest id, so that every id indexes a table of this size.
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(cls, folder: Path, chat_options: ChatOptions | None = None) -> Tokenizer:
        """The tokenizer of a folder. `chat_options` are values for its chat template."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder}: no tokenizer.json; only folders with a fast tokenizer are supported")
        backend = _without_surplus(_backend(path), path, _num_rows(folder))
        settings = read_json_object(folder / "tokenizer_config.json") if _has(folder, "tokenizer_config.json") else {}
        tokenizer = cls(
            backend, eos_ids=_eos_ids(folder, settings, backend), template=_template(folder, settings, chat_options)
        )
        _check_fits(tokenizer, folder)
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def unreadable(self, text: str) -> str:
        """The first piece of text that the vocabulary has no token for; empty if there is none."""
        model = self.backend.model
        unknown = getattr(model, "unk_token", None)
        if not unknown or getattr(model, "byte_fallback", False) or unknown in text:
            return ""
        found = self.backend.encode(text, add_special_tokens=False)
        known = self.backend.token_to_id(unknown)
        places = (place for place, token in zip(found.offsets, found.ids, strict=True) if token == known)
        return next((text[start:end] for start, end in places), "")

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens. Ids beyond the vocabulary (models may have padded rows) give no text."""
        text: str = self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a chat in the model's own format, ready for its answer. `tools` describe the functions that the model may
        call; `options` are values for the chat template, for this chat alone."""
        text = self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options
        )
        return self.encode(text)

    def chat_text(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The same as text, before it is encoded."""
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    @cached_property
    def longest_token(self) -> int:
        """Most characters that one token of the vocabulary stands for."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def vocabulary_hash(self) -> str:
        """Hash of all tokens with their ids: the same for tokenizers whose ids mean the same."""
        table = sorted((index, token) for token, index in self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]

    @property
    def chat_source(self) -> str:
        """The Jinja text of the chat template; empty if there is none."""
        return self._template.source

    @property
    def has_chat(self) -> bool:
        return not isinstance(self._template, NoChatTemplate)

    def chat_reply(self, messages: Messages, role: str, content: str) -> list[int]:
        """Tokens behind the model's turn in a chat: a message of `role` in the template's format, ready for the next turn.
        The model's turn itself is not rendered, since its tokens exist already, with the stop token that ended it."""
        return self.chat_behind(messages, [{"role": role, "content": content}])

    def chat_behind(
        self,
        before: Messages,
        behind: Messages,
        *,
        ended: bool = True,
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of the messages behind a turn of the model that followed the messages `before`, ready for the next turn.
        `ended`: the turn's own tokens end with a stop token, so the template's is left out. Raises ModelError where the
        template cannot tell."""
        mark = _HERE
        while any(mark in str(message) for message in (*before, *behind)):
            mark = f"({mark})"
        text = self._template.render(
            [*before, {"role": "assistant", "content": mark}, *behind],
            add_generation_prompt=True,
            tools=tools,
            options=options,
        )
        _, found, rest = text.partition(mark)
        if not found:
            raise ModelError("chat template: leaves out what the model said, so a conversation cannot go on with it")
        for stop in self.stop_texts if ended else ():
            rest = rest.removeprefix(stop)
        return self.encode(rest)

    @property
    def stop_texts(self) -> list[str]:
        """Texts of the end tokens."""
        return [text for text in map(self.backend.id_to_token, self.eos_ids) if text]


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _check_fits(tokenizer: Tokenizer, folder: Path) -> None:
    """Refuses a tokenizer with ids beyond the embedding, which would fail in the middle of a job."""
    if (num_rows := _num_rows(folder)) is None:
        return
    largest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids, -1)
    if largest >= num_rows:
        raise ModelError(f"{folder}: the tokenizer knows token {largest}, but config.json says vocab_size {num_rows}")


def _num_rows(folder: Path) -> int | None:
    """Rows of the model's embedding; None where no config says so."""
    rows = read_json_object(folder / "config.json").get("vocab_size") if _has(folder, "config.json") else None
    return rows if isinstance(rows, int) else None


def _without_surplus(backend: tokenizers.Tokenizer, path: Path, num_rows: int | None) -> tokenizers.Tokenizer:
    """The tokenizer without the special tokens that the models of its family have no row for. Their texts are then as any
    other; as tokens they would fail in the middle of a job."""
    surplus = [text for text in _surplus_tokens(path.parent) if (backend.token_to_id(text) or -1) >= (num_rows or 0)]
    if not surplus:
        return backend
    whole = read_json_object(path)
    kept = [one for one in whole["added_tokens"] if one["content"] not in surplus]
    return tokenizers.Tokenizer.from_str(json.dumps(whole | {"added_tokens": kept}))


def _surplus_tokens(folder: Path) -> tuple[str, ...]:
    name = read_json_object(folder / "config.json").get("model_type") if _has(folder, "config.json") else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    return family.surplus_tokens if family else ()


def _backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise ModelError(f"{path}: not a tokenizer ({' '.join(str(error).split())})") from None


def _template(folder: Path, settings: Mapping[str, Any], options: ChatOptions | None) -> Template:
    source = _template_source(folder, settings)
    if source is None:
        return NoChatTemplate(folder)
    named = {name: _token_text(settings.get(name)) for name in settings if name.endswith("_token")}
    special_tokens = {name: text for name, text in named.items() if text is not None}
    return ChatTemplate(source, special_tokens=special_tokens, folder=folder, options=options)


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if _has(folder, "chat_template.jinja"):
        try:
            return (folder / "chat_template.jinja").read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{folder}: chat_template.jinja cannot be read ({error})") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder}: tokenizer_config.json: chat_template must be text or a list with a 'default'")
    return template


def _eos_ids(folder: Path, settings: Mapping[str, Any], backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """End tokens of the generation config, else of the config, as in transformers; and the tokenizer's own."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if not ids and _has(folder, name):
            ids = _ids(read_json_object(folder / name).get("eos_token_id"), folder / name)
    token = _token_text(settings.get("eos_token"))
    own = backend.token_to_id(token) if token is not None else None
    return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))


def _ids(value: Any, path: Path) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(item) is not int or item < 0 for item in values):
        raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, is {json.dumps(value)[:60]}")
    return values


def _token_text(token: Any) -> str | None:
    """Text of a special token, which is written as text or as an object with its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
