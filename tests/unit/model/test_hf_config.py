"""What `config.json` may say: ten families, as transformers 4 and 5 write them, and nothing that changes the maths."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamarl.errors import ModelError
from llamarl.model.hf_config import config_of, describe_ignored_keys, ignored_keys, read_shape
from llamarl.model_spec import SHAPES, RopeScaling, YarnScaling

LLAMA_3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_5_7B: dict[str, Any] = QWEN3_0_6B | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "head_dim": None,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}


def read(folder: Path, config: object) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


def test_published_configs_give_the_shapes_known_by_name(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA_3_1) == SHAPES["llama-3.1-8b"]
    assert read(tmp_path, QWEN3_0_6B) == SHAPES["qwen3-0.6b"]
    assert read(tmp_path, QWEN2_5_7B) == SHAPES["qwen2.5-7b"]


def test_rope_parameters_of_transformers_5_mean_what_4_wrote(tmp_path: Path) -> None:
    new = {key: value for key, value in LLAMA_3_1.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": {**LLAMA_3_1["rope_scaling"], "rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert read(tmp_path, new) == read(tmp_path, LLAMA_3_1)


@pytest.mark.parametrize("name", SHAPES)
def test_a_written_config_reads_back_as_the_same_shape(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, config_of(SHAPES[name])) == SHAPES[name]


def test_llama_2_without_its_later_keys_gets_transformers_defaults(tmp_path: Path) -> None:
    later = ("num_key_value_heads", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias", "tie_word_embeddings")
    shape = read(tmp_path, {key: value for key, value in LLAMA_3_1.items() if key not in later})
    assert (shape.num_kv_heads, shape.rope_theta, shape.rope_scaling, shape.tied_head) == (32, 10_000.0, None, False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": "some"}, "attention_bias"),
        ({"mlp_bias": 1}, "mlp_bias"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "ntk"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta": 2.0}}, "beta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {**LLAMA_3_1["rope_scaling"], "attention_factor": 2.0}}, "attention_factor"),
        ({"rope_scaling": {**LLAMA_3_1["rope_scaling"], "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "rope_parameters"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "5 key-value heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"hidden_size": 4097}, "hidden_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_changes_the_maths_is_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named) as refused:
        read(tmp_path, LLAMA_3_1 | change)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "off", [{"use_mrope": False}, {"vision_config": {}}, {"extra_layers": []}, {"note": ""}, {"hidden_dropout": 0.0}]
)
def test_an_unknown_key_that_is_off_changes_nothing_and_is_listed(off: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, QWEN2_5_7B | off) == SHAPES["qwen2.5-7b"]
    assert ignored_keys(tmp_path) == tuple(off)
    assert next(iter(off)) in describe_ignored_keys(tmp_path)


def test_a_config_of_known_keys_has_nothing_to_list(tmp_path: Path) -> None:
    read(tmp_path, QWEN2_5_7B | {"unheard_of": None})
    assert (ignored_keys(tmp_path), describe_ignored_keys(tmp_path)) == ((), "")


@pytest.mark.parametrize(
    "on",
    [
        {"use_mrope": True},
        {"logit_scale": 0},
        {"logit_scale": 1.0},
        {"attention_kind": "linear"},
        {"extra_layers": [1]},
        {"hidden_dropout": 0.1},
        {"is_causal": False},
        {"use_rope": False},
    ],
)
def test_an_unknown_key_that_could_change_the_maths_is_refused(on: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=next(iter(on))):
        read(tmp_path, QWEN2_5_7B | on)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "model_type"])
def test_a_missing_size_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=key):
        read(tmp_path, {name: value for name, value in LLAMA_3_1.items() if name != key})


def test_mistral_has_a_window_unless_it_says_null(tmp_path: Path) -> None:
    """Missing, it is 4096, as in transformers; one as long as the context masks nothing."""
    mistral = LLAMA_3_1 | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "rope_scaling": None}
    assert read(tmp_path, mistral).windows == (4096,) * 32
    assert read(tmp_path, mistral | {"sliding_window": None}).windows == ()
    assert read(tmp_path, mistral | {"sliding_window": 131072}).windows == ()
    with pytest.raises(ModelError, match="sliding_window"):
        read(tmp_path, mistral | {"sliding_window": 0})


def test_a_qwen_window_counts_only_when_switched_on(tmp_path: Path) -> None:
    narrow = QWEN2_5_7B | {"sliding_window": 4096, "max_window_layers": 20}
    assert read(tmp_path, narrow) == SHAPES["qwen2.5-7b"]
    assert read(tmp_path, narrow | {"use_sliding_window": True}).windows == (0,) * 20 + (4096,) * 8
    types = ["sliding_attention", "full_attention"] * 14
    assert read(tmp_path, narrow | {"use_sliding_window": True, "layer_types": types}).windows == (4096, 0) * 14
    with pytest.raises(ModelError, match="no 'sliding_window' is in use"):
        read(tmp_path, narrow | {"layer_types": types})


def test_qwens_long_contexts_are_read_as_published(tmp_path: Path) -> None:
    """Both models' cards say to add this object for contexts beyond 32,768 tokens."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    shape = read(tmp_path, QWEN2_5_7B | {"rope_scaling": yarn, "max_position_embeddings": 131072})
    assert shape.rope_scaling == YarnScaling(
        factor=4.0, original_max_positions=32768, attention_factor=1.1386294361119891
    )
    assert shape.max_positions == 131072


def test_longrope_leaves_the_original_positions(tmp_path: Path) -> None:
    """Beyond them all tokens, cached ones too, would have to be rotated by other factors."""
    rope = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    phi = {
        **{key: value for key, value in LLAMA_3_1.items() if key not in ("attention_bias", "mlp_bias")},
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_key_value_heads": 32,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": rope,
        "sliding_window": 262144,
        "resid_pdrop": 0.0,
    }
    shape = read(tmp_path, phi)
    assert (shape.max_positions, shape.windows, shape.rotary_dim) == (4096, (), 0)
    assert config_of(shape)["max_position_embeddings"] == 131072


@pytest.mark.parametrize("field", ["qkv_bias", "wide_qk_norm", "norm_plus_one", "logit_softcap"])
def test_a_spec_that_no_family_has_cannot_be_written(field: str) -> None:
    """By name, and not as a config of something else."""
    value: Any = 30.0 if field == "logit_softcap" else True
    with pytest.raises(ModelError, match=field):
        config_of(replace(SHAPES["qwen3-0.6b"], **{field: value}))


def test_a_missing_folder_is_one_line_that_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no folder .*/ckpt; expected config.json and \*.safetensors inside"):
        read_shape(tmp_path / "ckpt")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"model_type": "llama",}', b"NaN"])
def test_garbage_is_one_line_that_names_the_file(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json") as refused:
        read_shape(tmp_path)
    assert "\n" not in str(refused.value)


def test_scrambled_values_are_refused_or_read_never_a_traceback(tmp_path: Path) -> None:
    pick = random.Random(0)
    odd: list[Any] = [None, True, -1, 0, 2**70, 1e400, 0.5, "x", [], {}, [1], {"rope_type": []}, {"factor": "x"}]
    for _ in range(400):
        config = LLAMA_3_1 | {pick.choice(list(LLAMA_3_1)): pick.choice(odd)}
        (tmp_path / "config.json").write_text(json.dumps(config).replace("Infinity", "1e400"))
        try:
            shape = read_shape(tmp_path)
        except ModelError as error:
            assert "\n" not in str(error)
        else:
            assert shape.rope_scaling is None or isinstance(shape.rope_scaling, RopeScaling)
