"""Known keys of a Hugging Face `config.json`: those that may have one value only, and those without influence on the
maths."""

from __future__ import annotations

from typing import Any

# Values under which a key changes nothing; anything else is maths that the transformer does not have.
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "rope_interleaved": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "quantization_config": (),
    "auto_map": (),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "pruned_heads": (),
    "no_rope_layers": (),
    "is_causal": (True,),
    "use_rope": (True,),
}

# Keys that describe, tune generation, or steer only how transformers itself runs.
HARMLESS = frozenset(
    [
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "do_sample",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "max_length",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "finetuning_task",
        "task_specific_params",
        "repetition_penalty",
        "_commit_hash",
        "bad_words_ids",
        "begin_suppress_tokens",
        "decoder_start_token_id",
        "diversity_penalty",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "min_length",
        "min_p",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "tie_encoder_decoder",
        "typical_p",
        "use_bfloat16",
    ]
)


def is_off(key: str, value: Any) -> bool:
    """Whether an unknown key is switched off: null, false, empty, or a dropout of 0. Any other number could be a factor, and
    any text the name of another way to compute."""
    if value is None or value is False or value in ("", [], {}):
        return True
    return key.endswith(("dropout", "_pdrop")) and not isinstance(value, bool) and value == 0
