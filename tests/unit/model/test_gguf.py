"""A GGUF file becomes the Hugging Face folder it was once made from."""

from __future__ import annotations

import builtins
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from llamarl.errors import InputError, ModelError
from llamarl.model.checkpoint import load_model, random_model
from llamarl.model.gguf_file import read_gguf
from llamarl.model.gguf_import import import_gguf
from llamarl.model.rope import rope_frequencies
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.transformer import Transformer
from llamarl.model_spec import SHAPES, ModelSpec

SHAPE = ModelSpec(
    vocab_size=264, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64,
    max_positions=128,
)  # fmt: skip
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def gguf() -> ModuleType:
    return importlib.import_module("gguf")


def their_tensors(model: Transformer, *, permuted: bool) -> dict[str, Array]:
    """Names and row order as llama.cpp's converter writes them."""
    tensors = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = array.reshape(-1, 2, model.shape.head_dim // 2, array.shape[-1])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        module, _, leaf = name.rpartition(".")
        if module.startswith("model.layers."):
            layer, _, inner = module.removeprefix("model.layers.").partition(".")
            tensors[f"blk.{layer}.{NAMES[inner]}.{leaf}"] = array
        else:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[module]
            tensors[f"{top}.{leaf}"] = array
    return tensors


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """All bytes, a few merges, control tokens, and one that only pads."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*CONTROL, *alphabet, "12", "ab", "Ġab", "<tool>", "[PAD263]"]
    types = [3] * len(CONTROL) + [1] * (len(alphabet) + 3) + [4, 5]
    return tokens, types, ["1 2", "a b", "Ġ ab"]


def write_gguf(
    gguf: ModuleType,
    path: Path,
    model: Transformer,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    change: Callable[[Any, dict[str, Array]], None] = lambda writer, tensors: None,
    encode: Callable[[str, Array], tuple[NDArray[Any], Any]] = lambda name, array: (array, None),
) -> Path:
    shape, writer = model.shape, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    tokens, types, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}!")
    tensors = their_tensors(model, permuted=architecture == "llama")
    change(writer, tensors)
    for name, array in tensors.items():
        data, kind = encode(name, array)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_an_import_is_the_model_the_file_was_made_from(
    gguf: ModuleType, tmp_path: Path, architecture: str, tied: bool
) -> None:
    shape = replace(
        SHAPE,
        tied_head=tied,
        qkv_bias=architecture == "qwen2",
        rope_theta=1e6,
        norm_eps=1e-6,
        family=architecture,
    )
    model = random_model(shape, seed=2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    file = write_gguf(gguf, tmp_path / "m.gguf", model, architecture=architecture)
    import_gguf(file, tmp_path / "m", dtype="float32")
    loaded = load_model(tmp_path / "m")
    assert loaded.shape == shape
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_each_encoding_is_read_as_the_numbers_it_stands_for(gguf: ModuleType, tmp_path: Path, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    expected: dict[str, Array] = {}

    def encode(name: str, array: Array) -> tuple[NDArray[Any], Any]:
        if "ffn_down" not in name:
            return array, None
        try:
            data = gguf.quants.quantize(array, number)
        except NotImplementedError:
            # The package cannot write this one. Any bits are numbers, but the scales must be finite halves.
            random = np.random.default_rng(0)
            data = random.integers(0, 60, (array.shape[0], array.shape[1] // block * block_bytes), dtype=np.uint8)
        expected[name] = gguf.quants.dequantize(data, number)
        return data, number

    file = write_gguf(gguf, tmp_path / "m.gguf", random_model(SHAPE, seed=2), encode=encode)
    import_gguf(file, tmp_path / "m", dtype="float32")
    found = load_model(tmp_path / "m").get_parameter("model.layers.0.mlp.down_proj.weight")
    numbers = torch.from_numpy(expected["blk.0.ffn_down.weight"])
    assert numbers.abs().max() > 0
    assert torch.equal(found, numbers)


def test_a_matrix_that_is_there_twice_is_tied_and_its_finer_copy_taken(gguf: ModuleType, tmp_path: Path) -> None:
    model = random_model(replace(SHAPE, tied_head=True), seed=2)
    kinds = {"token_embd.weight": gguf.GGMLQuantizationType.Q4_0, "output.weight": gguf.GGMLQuantizationType.Q8_0}

    def twice(_: Any, tensors: dict[str, Array]) -> None:
        tensors["output.weight"] = tensors["token_embd.weight"]

    def encode(name: str, array: Array) -> tuple[NDArray[Any], Any]:
        return (gguf.quants.quantize(array, kinds[name]), kinds[name]) if name in kinds else (array, None)

    import_gguf(write_gguf(gguf, tmp_path / "m.gguf", model, change=twice, encode=encode), tmp_path / "m")
    loaded = load_model(tmp_path / "m")
    assert loaded.shape.tied_head
    torch.testing.assert_close(loaded.lm_head.weight, model.lm_head.weight, rtol=0, atol=1e-3)


def test_llama_3_scaling_is_known_by_its_factors(gguf: ModuleType, tmp_path: Path) -> None:
    plain = replace(SHAPE, rope_theta=500_000.0)
    scaled = replace(plain, rope_scaling=SHAPES["llama-3.2-1b"].rope_scaling)

    def factors(_: Any, tensors: dict[str, Array]) -> None:
        tensors["rope_freqs.weight"] = (rope_frequencies(plain) / rope_frequencies(scaled)).numpy()

    def odd(_: Any, tensors: dict[str, Array]) -> None:
        tensors["rope_freqs.weight"] = np.full(32, 3, dtype=np.float32)

    model = random_model(plain, seed=0)
    import_gguf(write_gguf(gguf, tmp_path / "m.gguf", model, change=factors), tmp_path / "m")
    assert load_model(tmp_path / "m").shape == scaled
    with pytest.raises(ModelError, match="rope_freqs"):
        import_gguf(write_gguf(gguf, tmp_path / "odd.gguf", model, change=odd), tmp_path / "odd")


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("qwen2", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("qwen2", "cafe\u0301", ["c", "a", "f", "Ã", "©"]),
        ("llama-bpe", "ab12 ab", ["ab", "12", "Ġab"]),
        ("smollm", "<|im_start|>ab<tool>", ["<|im_start|>", "ab", "<tool>"]),
    ],
)
def test_text_is_split_as_the_vocabulary_asks(
    gguf: ModuleType, tmp_path: Path, pre: str, text: str, expected: list[str]
) -> None:
    import_gguf(write_gguf(gguf, tmp_path / "m.gguf", random_model(SHAPE), pre=pre), tmp_path / "m")
    tokenizer = Tokenizer.load(tmp_path / "m")
    assert tokenizer.encode(text) == [vocabulary()[0].index(token) for token in expected]
    assert tokenizer.vocab_size == 263, "the token that only pads stands for no text"
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "12"}])) == "12!"


@pytest.mark.parametrize(("pre", "expected"), [("smollm", (2,)), ("qwen2", (2, 0))])
def test_all_end_tokens_are_in_the_generation_config(
    gguf: ModuleType, tmp_path: Path, pre: str, expected: tuple[int, ...]
) -> None:
    import_gguf(write_gguf(gguf, tmp_path / "m.gguf", random_model(SHAPE), pre=pre), tmp_path / "m")
    assert Tokenizer.load(tmp_path / "m").eos_ids == expected
    settings_ = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert (settings_["bos_token"], settings_["eos_token"], settings_["pad_token"]) == tuple(
        CONTROL[index] for index in (1, 2, 0)
    )


def test_qwen2_text_is_split_as_by_transformers(hf: ModuleType, gguf: ModuleType, tmp_path: Path) -> None:
    import_gguf(write_gguf(gguf, tmp_path / "m.gguf", random_model(SHAPE), pre="qwen2"), tmp_path / "m")
    tokens, _, merges = vocabulary()
    theirs = hf.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[tuple(m.split()) for m in merges]
    )
    for text in ("ab's 12ab  \n\n x", "I'LL don't\tab 1234", "naïve 日本 🎉!!\r\n", "  ab", "x=(ab+12)*3"):
        assert Tokenizer.load(tmp_path / "m").encode(text) == theirs(text)["input_ids"], text


@pytest.fixture(scope="module")
def intact(gguf: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(gguf, tmp_path_factory.mktemp("gguf") / "m.gguf", random_model(SHAPE, seed=2))


def refused(file: Path, folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        import_gguf(file, folder)
    assert not folder.exists()
    assert "\n" not in str(error.value)
    return str(error.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_file_is_one_line_and_leaves_no_folder(intact: Path, data: st.DataObject) -> None:
    content = intact.read_bytes()
    damaged = intact.with_name("damaged.gguf")
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert "damaged.gguf" in refused(damaged, intact.with_name("out"))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_one_line_or_no_harm(intact: Path, data: st.DataObject) -> None:
    """Bytes of the vocabulary may change unseen; lengths, types, counts and offsets may not."""
    content = bytearray(intact.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 12_000))] = data.draw(st.integers(0, 255))
    damaged = intact.with_name("damaged.gguf")
    damaged.write_bytes(content)
    try:
        read = read_gguf(damaged)
    except ModelError as error:
        assert str(error).isprintable()
    else:
        assert all(t.offset + t.num_bytes <= len(content) for t in read.tensors.values())


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + b"\xff" * 100, b"GGUF\3\0\0\0" + b"\xff" * 16, b"\x89PNG" * 9]
)
def test_garbage_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    assert "x.gguf" in refused(tmp_path / "x.gguf", tmp_path / "m")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    assert "no file" in refused(tmp_path / "x.gguf", tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda writer, tensors: tensors.pop("blk.0.ffn_up.weight"), "blk.0.ffn_up.weight is missing"),
        (lambda writer, tensors: tensors.update({"blk.0.x": np.ones(4, np.float32)}), "blk.0.x is not part"),
        (lambda writer, tensors: tensors.update({"output_norm.weight": np.ones(4, np.float32)}), "output_norm.weight"),
        (lambda writer, tensors: writer.add_expert_count(8), "expert_count"),
        (lambda writer, tensors: writer.add_sliding_window(64), "sliding_window"),
        (lambda writer, tensors: writer.add_rope_dimension_count(32), "rope.dimension_count"),
        (lambda writer, tensors: writer.add_key_length(0), "attention.key_length"),
        (lambda writer, tensors: writer.add_value_length(32), "attention.value_length"),
    ],
)
def test_what_the_model_does_not_have_is_refused_by_name(
    gguf: ModuleType, tmp_path: Path, change: Callable[[Any, dict[str, Array]], None], named: str
) -> None:
    file = write_gguf(gguf, tmp_path / "m.gguf", random_model(SHAPE), change=change)
    assert named in refused(file, tmp_path / "m")


@pytest.mark.parametrize(("architecture", "pre"), [("gemma", "smollm"), ("llama", "tekken")])
def test_other_architectures_and_vocabularies_are_refused_by_name(
    gguf: ModuleType, tmp_path: Path, architecture: str, pre: str
) -> None:
    file = write_gguf(gguf, tmp_path / "m.gguf", random_model(SHAPE), architecture=architecture, pre=pre)
    line = refused(file, tmp_path / "m")
    assert "gemma" in line or "tekken" in line


def test_without_the_package_the_line_says_what_to_install(
    intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'llamarl\[gguf\]'"):
        import_gguf(intact, tmp_path / "m")
