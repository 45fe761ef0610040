"""`generator`: how answers are sampled, and on which devices."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, convert

from llamarl.config.section import Device, Section, Threads, check_expert
from llamarl.errors import ConfigError
from llamarl.types import Sampling

MOST_SLOTS_BESIDE = 128  # slots with which prompts may be read beside answers; with more, products are busy anyway
_MOST_DRAFTED = 32


class GeneratorConfig(Section, frozen=True):
    """How answers are sampled, and the precision, parallelism and memory of the generator; see docs/generator.md."""

    replicas: Annotated[
        int,
        Meta(ge=0, description="copies of the policy that generate in parallel; 0: only those that join (engine.join)"),
    ] = 1
    tensor: Annotated[int, Meta(ge=1, description="ranks of one replica (tensor parallel)")] = 1
    expert: Annotated[
        int,
        Meta(
            ge=1,
            description="models with experts: parts of the tensor ranks that hold different experts (see trainer.expert)",
        ),
    ] = 1
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="precision of weights and KV cache; auto: bfloat16 on a GPU, float32 elsewhere; float16: see "
            "trainer.dtype"
        ),
    ] = "auto"
    quantize: Annotated[
        Literal["none", "fp8", "int8"],
        Meta(
            description="quantization of the blocks' weight matrices, repeated for each version; fp8 also quantizes "
            "their inputs, but for those of experts"
        ),
    ] = "none"
    lora: Annotated[
        Literal["beside", "merged"],
        Meta(
            description="model.lora: compute adapters beside the base, or merge each version into a second copy of the "
            "weights, which decodes faster and takes more memory"
        ),
    ] = "beside"
    kv_cache: Annotated[
        Literal["auto", "fp8"], Meta(description="precision of keys and values; auto: the same as dtype")
    ] = "auto"
    slots: Annotated[int, Meta(ge=1, description="completions that one replica decodes at once")] = 768
    max_prompt_tokens: Annotated[
        int, Meta(ge=1, description="longest prompt, in tokens; the group of a longer one is dropped, with the reason")
    ] = 32
    max_new_tokens: Annotated[int, Meta(ge=1, description="longest completion, in tokens")] = 8
    stop: Annotated[
        tuple[str, ...],
        Meta(description="texts that end an answer, such as ['\\n\\n', '</answer>']; the answer keeps the text"),
    ] = ()
    temperature: Annotated[
        float, Meta(ge=0.01, le=10, description="sampling temperature; also divides the trainer's logits")
    ] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="sample only from the k most likely tokens; 0: from all")] = 0
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="sample from the fewest tokens that together have this probability")
    ] = 1.0
    min_p: Annotated[
        float, Meta(ge=0, lt=1, description="exclude tokens below this share of the most likely token's probability")
    ] = 0.0
    page_tokens: Annotated[int, Meta(ge=1, description="tokens in one page of the KV cache")] = 16
    kv_pages: Annotated[
        int, Meta(ge=0, description="pages in the KV cache; 0: enough for all slots, as far as GPU memory allows")
    ] = 0
    kv_on_new_weights: Annotated[
        Literal["keep", "recompute"],
        Meta(description="keys and values of unfinished answers when the weights change: keep or recompute them"),
    ] = "keep"
    burst: Annotated[
        int, Meta(ge=0, description="decode steps between two checks of the results; 0: 1 on a CPU, 8 on a GPU")
    ] = 0
    prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="most prompt tokens that are read between two bursts of decode steps, so that long prompts do not "
            "stall running answers; longer prompts are read in chunks; 0: all at once",
        ),
    ] = 4096
    prefill_beside: Annotated[
        int,
        Meta(
            ge=0,
            description="prompt tokens that every decode step reads beside its answers where over half of the slots run, "
            "on a GPU with at most 128 slots, so that answers do not wait for long prompts (128 is a good number); 0: none",
        ),
    ] = 0
    draft: Annotated[
        int | Literal["auto"],
        Meta(
            description="tokens guessed ahead from sibling answers where at most 64 answers run and slots are free; the "
            "same tokens come out; 0: none, auto: 8 where that was measured to be faster"
        ),
    ] = 0
    device: Device = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        if isinstance(self.draft, int) and not 0 <= self.draft <= _MOST_DRAFTED:
            raise ConfigError(
                f"generator.draft: {self.draft} is not a number of tokens from 0 to {_MOST_DRAFTED}, or auto"
            )
        if self.draft == "auto" and self.tensor > 1:
            raise ConfigError(
                "generator.draft: auto needs generator.tensor=1, since ranks would measure different times"
            )
        if self.prefill_beside and self.slots > MOST_SLOTS_BESIDE:
            raise ConfigError(
                f"generator.prefill_beside: pays only with at most {MOST_SLOTS_BESIDE} slots, and generator.slots is "
                f"{self.slots}; lower it, or set generator.prefill_beside=0"
            )
        check_expert("generator", self.expert, self.tensor)
        if not all(self.stop):
            raise ConfigError("generator.stop: an empty text would end every answer at once; leave it out")

    @property
    def sampling(self) -> Sampling:
        """One completion of each prompt; each field of `Sampling` is the setting of the same name."""
        return convert(self, Sampling, from_attributes=True)
