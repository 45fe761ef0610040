"""A model folder as an object that answers prompts: the library's face, and what `llamarl generate` and `eval` stand on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch
from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict

from llamarl.config import model_folder
from llamarl.errors import ArgumentError, InputError, ModelError
from llamarl.families.parameters import num_parameters
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.kv_cache import page_bytes
from llamarl.generate.limits import AS_THE_MODEL, Limits, Precision
from llamarl.generate.stop_strings import StopStrings
from llamarl.hub.models import fetch_model
from llamarl.machine import GIB, host_memory
from llamarl.model.adapter_folder import base_or_same, load_merged, open_adapter
from llamarl.model.chat_template import ChatOptions
from llamarl.model.checkpoint import check_headers
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec
from llamarl.types import (
    Completion,
    CompletionGroup,
    Problem,
    PromptGroup,
    Sampling,
    bytes_to_floats,
    bytes_to_tokens,
    tokens_to_bytes,
)

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, token ids, or the messages of a chat, each with `role` and `content`."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEFAULT_SAMPLING = Sampling()
_DEFAULT_SLOTS = 256


class TextCompletion(Struct, frozen=True):
    """One answer to a prompt."""

    text: str  # special tokens left out
    tokens: list[int]  # the stop token included
    logprobs: list[float]  # of each token, under the distribution it was drawn from
    finish_reason: Literal["stop", "length"]  # the model's stop token, or the token limit


class OpenedModel(NamedTuple):
    """What is known of a model folder before its weights are read."""

    folder: Path
    shape: ModelSpec
    tokenizer: Tokenizer


def open_model(folder: str | Path, chat_options: ChatOptions | None = None) -> OpenedModel:
    """Finds a model folder and looks at all of it but the numbers. `folder` as in `LLM`."""
    found = model_folder(fetch_model(str(folder)))
    base = base_or_same(found)
    shape = check_headers(base)
    if base != found:
        open_adapter(found, shape)
    tokenizer = Tokenizer.load(base, chat_options)
    if not tokenizer.eos_ids:
        raise ModelError(f"{found}: names no end token")
    return OpenedModel(found, shape, tokenizer)


class LLM:
    """A model folder that answers prompts.

        from llamarl import LLM, Sampling

        llm = LLM("Qwen/Qwen3-0.6B")  # or a folder
        for answers in llm.generate(["The capital of France is"], Sampling(samples=2, max_new_tokens=16)):
            print([answer.text for answer in answers])

    What is wrong with the folder, the device or the memory is raised here; the weights are read when they are first needed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        slots: int = _DEFAULT_SLOTS,
        chat_options: ChatOptions | None = None,
    ) -> None:
        """`folder`: a Hugging Face folder, a name on the hub, or a PEFT folder of LoRA adapters, whose base is found; "tiny"
        is the shipped model. `device`: auto (a GPU if there is one), cpu, cuda or cuda:N. `dtype` of weights and cache: auto
        (bfloat16 on a GPU, else float32), float32, bfloat16 or float16. `slots`: completions decoded at once. `chat_options`:
        values for the model's chat template."""
        if dtype not in DTYPES:
            raise ArgumentError("dtype", f"expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, is {dtype}")
        if slots < 1:
            raise ArgumentError("slots", f"must be at least 1, is {slots}")
        self.folder, self.shape, self.tokenizer = open_model(folder, chat_options)
        self.device = choose_device(device)
        self.dtype = dtype_on(dtype, self.device)
        self._slots = slots
        self._check_memory(0, "take a narrower dtype or a smaller model")
        self._kept: tuple[int, ContinuousDecoder] | None = None  # of the last call, with its seed

    @property
    def precision(self) -> str:
        """Name of the dtype, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def model(self) -> Transformer:
        """The model, which is loaded when it is first needed."""
        return load_merged(self.folder, dtype=self.dtype, device=self.device)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling = _DEFAULT_SAMPLING, *, seed: int = 0
    ) -> list[list[TextCompletion]]:
        """For each prompt, `sampling.samples` completions. The same prompts, sampling and seed give the same answers."""
        asked = self.encode(prompts, sampling)
        if not asked:
            return []
        decoder = self._decoder_for(asked, sampling, seed)
        self._kept = None  # a decoder that is interrupted must not be used again
        for ordinal, tokens in enumerate(asked):
            decoder.add(PromptGroup(ordinal, Problem("", ""), tokens_to_bytes(tokens), sampling))
        found: dict[int, CompletionGroup] = {}
        while not decoder.idle:
            found |= {group.ordinal: group for group in decoder.step()}
        self._kept = seed, decoder
        return [[self._described(one) for one in found[ordinal].completions] for ordinal in range(len(asked))]

    def encode(self, prompts: Sequence[Prompt], sampling: Sampling = _DEFAULT_SAMPLING) -> list[list[int]]:
        """The tokens of each prompt, which `generate` takes as prompts too. Raises ArgumentError for what it would refuse."""
        _check_sampling(sampling)
        if isinstance(prompts, str):
            raise ArgumentError("prompts", "expected a list of prompts, is one text; put it into a list")
        asked = [self._tokens_of(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
        longest = max(map(len, asked), default=0)
        if longest + sampling.max_new_tokens > self.shape.max_positions:
            raise ArgumentError(
                "sampling.max_new_tokens",
                f"prompt ({longest}) and completion ({sampling.max_new_tokens}) exceed "
                f"the model's {self.shape.max_positions} positions",
            )
        return asked

    def decoder(
        self,
        limits: Limits,
        *,
        seed: int,
        precision: Precision = AS_THE_MODEL,
        max_turns: int = 1,
        stop: Sequence[str] = (),
    ) -> ContinuousDecoder:
        """A new decoder of this model, for callers that add prompts while others are being answered."""
        return ContinuousDecoder(
            self.model,
            limits,
            eos_ids=self.tokenizer.eos_ids,
            seed=seed,
            precision=precision,
            max_turns=max_turns,
            stop=StopStrings(self.tokenizer, stop),
        )

    def _tokens_of(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
        elif all(isinstance(item, Integral) for item in prompt):
            tokens = [int(item) for item in cast(Sequence[int], prompt)]
        elif all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in prompt):
            tokens = self.tokenizer.chat(cast(Sequence[Mapping[str, str]], prompt))
        else:
            raise ArgumentError(name, "expected text, token ids, or messages with role and content")
        if not tokens:
            raise ArgumentError(name, "is empty")
        if wrong := [token for token in tokens if not 0 <= token < self.shape.vocab_size]:
            raise ArgumentError(name, f"token {wrong[0]} is not among the model's {self.shape.vocab_size}")
        return tokens

    def _decoder_for(self, asked: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> ContinuousDecoder:
        """The decoder of the last call where it fits exactly: with other shapes, results could round differently."""
        limits = Limits(
            slots=min(self._slots, len(asked) * sampling.samples),
            max_prompt_tokens=max(map(len, asked)),
            max_new_tokens=sampling.max_new_tokens,
        )
        if self._kept is not None and (seed, limits) == (self._kept[0], self._kept[1].limits):
            return self._kept[1]
        self._kept = None  # its cache is freed before the next one is made
        self.check_cache(limits, "lower slots or sampling.max_new_tokens")
        return self.decoder(limits, seed=seed)

    def check_cache(self, limits: Limits, advice: str) -> None:
        """Refuse a cache that this machine's memory cannot hold. A GPU's cache takes what is free."""
        if self.device == "cpu":
            cache = limits.enough_pages * page_bytes(self.shape, limits.page_tokens, self.dtype)
            self._check_memory(cache, advice)

    def _check_memory(self, cache_bytes: int, advice: str) -> None:
        on_host = self.device == "cpu"
        total = host_memory().total_bytes if on_host else torch.cuda.mem_get_info(self.device)[1]
        needed = num_parameters(self.shape) * self.dtype.itemsize + cache_bytes
        if needed > total:
            raise InputError(
                f"memory: {'this machine' if on_host else self.device} has {total / GIB:.1f} GiB, and {self.folder} takes "
                f"at least {needed / GIB:.1f} GiB in {self.precision}; {advice}"
            )

    def _described(self, completion: Completion) -> TextCompletion:
        tokens = bytes_to_tokens(completion.tokens).tolist()
        return TextCompletion(
            text=self.tokenizer.decode(tokens),
            tokens=tokens,
            logprobs=bytes_to_floats(completion.behavior_logprobs).tolist(),
            finish_reason="length" if completion.truncated else "stop",
        )


def choose_device(device: str, name: str = "device") -> str:
    """The device to compute on: what `auto` means here, or the one asked for if it can be used. `name`: for errors."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise InputError(f"{name} {device}: expected auto, cpu, cuda or cuda:N")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"{name} {device}: cannot be used here ({str(error).splitlines()[0]})") from None
    return device


def dtype_on(setting: str, device: str) -> torch.dtype:
    """The dtype of a setting; `auto` is bfloat16 on a GPU, float32 elsewhere."""
    if setting == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    dtype: torch.dtype = getattr(torch, setting)
    return dtype


def _check_sampling(sampling: Sampling) -> None:
    """Constructors look at no limits, so they are checked here."""
    try:
        convert(asdict(sampling), Sampling)
    except ValidationError as error:
        reason, _, field = str(error).partition(" - at `$.")
        raise ArgumentError(f"sampling.{field.rstrip('`')}", reason.replace("`", "").lower()) from None
