"""How much a decoder decodes at once and in which precision, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch

from llamarl.config import Config, GeneratorConfig
from llamarl.config.generator import MOST_SLOTS_BESIDE
from llamarl.errors import ConfigError
from llamarl.generate.kv_cache import page_bytes
from llamarl.generate.pages import pages_for
from llamarl.model.quantize import FP8, Quantization
from llamarl.model.transformer import Transformer
from llamarl.routes import RouteFormat

_LARGEST_KEY_BIAS = 32.0  # largest bias that an fp8 cache can hold; keys are otherwise about 1
_MEMORY_SHARE = 0.85  # share of a GPU's free memory that the cache may take


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one replica decodes at once."""

    slots: int
    max_prompt_tokens: int
    max_new_tokens: int
    page_tokens: int = 16
    num_pages: int = 0  # of the cache; 0: enough for all slots, as far as a GPU's memory goes
    burst: int = 0  # decode steps between two looks of the host; 0: 1 on a CPU, 8 on a GPU
    parked: int = 0  # conversations that may wait for a reply and keep their pages, besides those in slots
    max_length: int = 0  # prompt and completion together; 0: both at their longest
    prefill_tokens: int = GeneratorConfig().prefill_tokens  # most tokens to read before a burst; 0: without limit
    prefill_beside: int = GeneratorConfig().prefill_beside  # most to read beside every step (`beside.py`); 0: none

    @classmethod
    def of(cls, config: Config, *, sequences: int = sys.maxsize) -> Limits:
        """The limits of a config, with no more slots than there will ever be sequences."""
        settings = config.generator
        return cls(
            slots=min(settings.slots, sequences),
            max_prompt_tokens=settings.max_prompt_tokens,
            max_new_tokens=settings.max_new_tokens,
            page_tokens=settings.page_tokens,
            num_pages=settings.kv_pages,
            burst=settings.burst,
            prefill_tokens=settings.prefill_tokens,
            prefill_beside=settings.prefill_beside,
            parked=config.num_parked,
        )

    @property
    def length(self) -> int:
        """Longest sequence, prompt and completion together."""
        return self.max_length or self.max_prompt_tokens + self.max_new_tokens

    @property
    def pages_per_slot(self) -> int:
        return pages_for(self.length, self.page_tokens)

    @property
    def least_pages(self) -> int:
        """Pages of a cache that can hold one sequence of full length."""
        return pages_for(self.length - 1, self.page_tokens) + 1

    def check_pages(self, num_pages: int) -> None:
        if num_pages < self.least_pages:
            raise ConfigError(
                f"generator.kv_pages: {num_pages} pages of {self.page_tokens} tokens cannot hold one sequence of "
                f"{self.length} tokens; {self.least_pages} can"
            )

    @property
    def enough_pages(self) -> int:
        """Pages of a cache in which no sequence ever waits for one."""
        sequences = self.slots + self.parked
        return sequences * self.pages_per_slot + pages_for(self.max_prompt_tokens, self.page_tokens)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Formats narrower than the model's own parameters."""

    weights: Quantization = "none"
    kv_cache: Literal["auto", "fp8"] = "auto"  # auto: the dtype of the parameters
    keep_wide: bool = True  # keep the wide weights that the narrow ones are made of; new versions arrive in them

    @classmethod
    def of(cls, settings: GeneratorConfig, *, keep_wide: bool = False) -> Precision:
        return cls(weights=settings.quantize, kv_cache=settings.kv_cache, keep_wide=keep_wide)

    def cache_dtype(self, model: Transformer) -> torch.dtype:
        return FP8 if self.kv_cache == "fp8" else model.lm_head.weight.dtype


AS_THE_MODEL = Precision()


def beside_rows(limits: Limits, device: torch.device) -> int:
    """Prompt tokens that a step reads beside its answers; refused where products do not wait for memory."""
    if limits.prefill_beside and (device.type != "cuda" or limits.slots > MOST_SLOTS_BESIDE):
        raise ConfigError(
            f"generator.prefill_beside: needs a GPU and at most {MOST_SLOTS_BESIDE} slots, not {limits.slots} on "
            f"{device.type}; set it to 0"
        )
    return min(limits.prefill_beside, limits.max_prompt_tokens)


def check_stops(eos_ids: tuple[int, ...], vocab_size: int) -> None:
    for token in eos_ids:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"generator: stop token {token} can never occur; the model's vocabulary has {vocab_size} tokens"
            )


def check_keys(model: Transformer) -> None:
    """Refuse an fp8 cache for models with large key biases. fp8 rounds to about 1 part in 16; with a bias hundreds of times
    as large as the rest, only that error is left. Such a model lost 43 of 62 points (benchmarks/results/decode.md)."""
    for name, bias in model.named_parameters():
        if name.endswith("k_proj.bias") and (largest := float(bias.detach().abs().max())) > _LARGEST_KEY_BIAS:
            raise ConfigError(
                f"generator.kv_cache: fp8 cannot hold the keys of this model, to which {name} adds up to {largest:.0f}; "
                "leave it at auto"
            )


def choose_num_pages(
    limits: Limits,
    model: Transformer,
    cache_dtype: torch.dtype,
    tensor_ranks: int,
    routes: RouteFormat | None = None,
) -> int:
    """Pages of the cache: as many as asked for, or enough for all slots; on a GPU no more than fit into its free memory."""
    num_pages = limits.num_pages or limits.enough_pages
    weight = model.lm_head.weight
    if weight.is_cuda and not limits.num_pages:
        free_bytes, _ = torch.cuda.mem_get_info(weight.device)
        each = page_bytes(model.shape, limits.page_tokens, cache_dtype, tensor_ranks)
        each += routes.row_bytes * limits.page_tokens if routes else 0
        num_pages = min(limits.enough_pages, int(free_bytes * _MEMORY_SHARE) // each)
    limits.check_pages(num_pages)
    return num_pages
