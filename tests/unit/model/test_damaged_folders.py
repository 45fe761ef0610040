"""However a folder is damaged, it is refused in one line, or it loads exactly as if it were whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llamarl.errors import ModelError
from llamarl.model.checkpoint import load_model, random_model, save_model
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec

SHAPE = ModelSpec(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    max_positions=32, qkv_bias=True,
)  # fmt: skip
MODEL = random_model(SHAPE, seed=1)
many = settings(max_examples=150, deadline=None)
bytes_of_file = st.integers(0, 255)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("whole")
    save_model(MODEL, base / "single")
    save_model(MODEL, base / "sharded", max_shard_bytes=900)
    return {"single": base / "single", "sharded": base / "sharded"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Path]]:
    """A fresh copy of a folder, at the same place every time."""
    place = tmp_path_factory.mktemp("damaged") / "m"

    def make(folder: Path) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        return shutil.copytree(folder, place)

    yield make


def outcome(folder: Path) -> Transformer | str:
    try:
        return load_model(folder)
    except ModelError as error:
        line = str(error)
        assert line
        assert line.isprintable(), "an error is one line"
        assert len(line) < 600
        return line


def assert_refused(folder: Path) -> str:
    line = outcome(folder)
    assert isinstance(line, str), "a damaged folder loaded silently"
    return line


def assert_refused_or_identical(folder: Path) -> None:
    loaded = outcome(folder)
    if isinstance(loaded, Transformer):
        for name, parameter in MODEL.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter), f"{name} loaded silently wrong"


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path: Path, header: object, tensors: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


Folders = dict[str, Path]
Copy = Callable[[Path], Path]


def test_the_undamaged_folders_load(whole: Folders) -> None:
    for folder in whole.values():
        assert isinstance(outcome(folder), Transformer)


@many
@given(kind=st.sampled_from(["single", "sharded"]), data=st.data())
def test_a_truncated_file_is_refused(whole: Folders, copy: Copy, kind: str, data: st.DataObject) -> None:
    folder = copy(whole[kind])
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    # The JSON files end with a newline, which may go.
    size = data.draw(st.integers(0, path.stat().st_size - 2))
    os.truncate(path, size)
    assert path.name in assert_refused(folder)


@many
@given(kind=st.sampled_from(["single", "sharded"]), extra=st.binary(min_size=1, max_size=64), data=st.data())
def test_a_file_with_something_appended_is_refused(
    whole: Folders, copy: Copy, kind: str, extra: bytes, data: st.DataObject
) -> None:
    folder = copy(whole[kind])
    path = data.draw(st.sampled_from(weight_files(folder)))
    path.write_bytes(path.read_bytes() + extra)
    assert path.name in assert_refused(folder)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_changed_header_byte_is_refused_or_harmless(whole: Folders, copy: Copy, data: st.DataObject) -> None:
    folder = copy(whole["single"])
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(bytes_of_file)
    path.write_bytes(content)
    assert_refused_or_identical(folder)


lies = st.one_of(
    st.tuples(st.just("dtype"), st.sampled_from(["F16", "BF16", "F64", "I32", "F8_E4M3", "", None, 3, [], {}])),
    st.tuples(st.just("shape"), st.lists(st.integers(-3, 2**70), max_size=4)),
    st.tuples(st.just("shape"), st.sampled_from([None, "8", [8.0], [True], {}, [[8]], [0], [2**40, 2**40]])),
    st.tuples(st.just("data_offsets"), st.lists(st.integers(-8, 2**70), max_size=3)),
    st.tuples(st.just("data_offsets"), st.sampled_from([None, [0], [0, None], ["0", "4"], [8, 0], {}])),
    st.tuples(st.just("surplus"), st.just(1)),
)


@many
@given(lie=lies, data=st.data())
def test_a_header_that_lies_about_a_tensor_is_refused(
    whole: Folders, copy: Copy, lie: tuple[str, Any], data: st.DataObject
) -> None:
    folder = copy(whole["single"])
    header, tensors = header_of(folder / "model.safetensors")
    name = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    assume(header[name].get(lie[0]) != lie[1])
    header[name][lie[0]] = lie[1]
    write_header(folder / "model.safetensors", header, tensors)
    assert_refused(folder)


@many
@given(shift=st.integers(1, 64), data=st.data())
def test_overlaps_and_gaps_are_refused(whole: Folders, copy: Copy, shift: int, data: st.DataObject) -> None:
    folder = copy(whole["single"])
    header, tensors = header_of(folder / "model.safetensors")
    name = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    direction = data.draw(st.sampled_from([-1, 1]))
    offsets = header[name]["data_offsets"]
    header[name]["data_offsets"] = [max(0, offset + direction * shift) for offset in offsets]
    assume(header[name]["data_offsets"] != offsets)
    write_header(folder / "model.safetensors", header, tensors)
    assert_refused(folder)


def test_two_tensors_on_the_same_bytes_are_refused(whole: Folders, copy: Copy) -> None:
    """Everything else adds up: the second copy is gone and what followed it has moved."""
    folder = copy(whole["single"])
    header, tensors = header_of(folder / "model.safetensors")
    k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    start, end = header[v]["data_offsets"]
    header[v]["data_offsets"] = header[k]["data_offsets"]
    move(header, start, start - end)
    write_header(folder / "model.safetensors", header, tensors[:start] + tensors[end:])
    assert "overlaps" in assert_refused(folder)


def test_bytes_between_tensors_are_refused(whole: Folders, copy: Copy) -> None:
    folder = copy(whole["single"])
    header, tensors = header_of(folder / "model.safetensors")
    start = header["model.norm.weight"]["data_offsets"][0]
    move(header, start, 8)
    write_header(folder / "model.safetensors", header, tensors[:start] + bytes(8) + tensors[start:])
    assert "gap" in assert_refused(folder)


def move(header: dict[str, Any], start: int, distance: int) -> None:
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= start:
            entry["data_offsets"] = [offset + distance for offset in entry["data_offsets"]]


@many
@given(data=st.data())
def test_a_tensor_that_is_missing_renamed_or_reshaped_is_named(whole: Folders, copy: Copy, data: st.DataObject) -> None:
    folder = copy(whole["single"])
    header, tensors = header_of(folder / "model.safetensors")
    name = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    entry = header.pop(name)
    how = data.draw(st.sampled_from(["renamed", "transposed", "flattened"]))
    if how == "renamed":
        header[name + ".x"] = entry
    elif how == "transposed":
        assume(len(set(entry["shape"])) > 1)
        header[name] = {**entry, "shape": entry["shape"][::-1]}
    else:
        header[name] = {**entry, "shape": [1, *entry["shape"]]}
    write_header(folder / "model.safetensors", header, tensors)
    assert name in assert_refused(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{",
        b"\xff" * 40,
        b"[" * 100_000,
        b'{"a":1}',
        b'{"a\\nb":{}}',
        b'{"__metadata__":{}}',
    ],
    ids=range(10),
)
def test_a_garbage_header_is_refused(whole: Folders, copy: Copy, header: bytes) -> None:
    folder = copy(whole["single"])
    _, tensors = header_of(folder / "model.safetensors")
    write_header(folder / "model.safetensors", header, tensors)
    assert_refused(folder)


def test_a_tensor_named_twice_is_refused(whole: Folders, copy: Copy) -> None:
    folder = copy(whole["single"])
    header, tensors = header_of(folder / "model.safetensors")
    text = json.dumps(header)
    again = json.dumps({"lm_head.weight": header["lm_head.weight"]})
    write_header(folder / "model.safetensors", (text[:-1] + ", " + again[1:]).encode(), tensors)
    assert "twice" in assert_refused(folder)


@many
@given(data=st.data())
def test_a_missing_shard_is_named(whole: Folders, copy: Copy, data: st.DataObject) -> None:
    folder = copy(whole["sharded"])
    path = data.draw(st.sampled_from(weight_files(folder)))
    if data.draw(st.booleans()):
        path.unlink()
    else:
        path.unlink()
        path.mkdir()
    assert path.name in assert_refused(folder)


@many
@given(data=st.data())
def test_an_index_that_lies_is_refused(whole: Folders, copy: Copy, data: st.DataObject) -> None:
    folder = copy(whole["sharded"])
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    name = data.draw(st.sampled_from(sorted(index["weight_map"])))
    before = index["weight_map"][name]
    targets = [*files, "absent.safetensors", "../m/" + before, "/etc/passwd", "", "a\nb.safetensors", None, 3, [before]]
    index["weight_map"][name] = data.draw(st.sampled_from([target for target in targets if target != before]))
    path.write_text(json.dumps(index))
    assert_refused(folder)


@pytest.mark.parametrize("index", [{}, [], {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": "b"}}, 3])
def test_a_garbage_index_is_refused(whole: Folders, copy: Copy, index: object) -> None:
    folder = copy(whole["sharded"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(folder)


@many
@given(
    key=st.sampled_from(
        [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ]
    ),
    value=st.one_of(st.integers(-2, 64), st.integers(), st.floats(), st.text(), st.none()),
)
def test_a_config_of_other_sizes_is_refused(whole: Folders, copy: Copy, key: str, value: Any) -> None:
    folder = copy(whole["single"])
    config = json.loads((folder / "config.json").read_text())
    assume(value != config[key] and not (key == "head_dim" and value is None))
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    assert_refused(folder)


def test_a_head_that_should_be_tied_or_untied_is_noticed(whole: Folders, copy: Copy) -> None:
    folder = copy(whole["single"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "lm_head.weight differs" in assert_refused(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("how", ["absent", "folder", "pipe", "empty", "dangling"])
def test_a_file_that_is_not_a_file_is_refused(whole: Folders, copy: Copy, name: str, how: str) -> None:
    folder = copy(whole["single"])
    path = folder / name
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "empty":
        path.touch()
    elif how == "dangling":
        path.symlink_to("nowhere")
    assert_refused(folder)


def test_two_sets_of_weights_are_refused(whole: Folders, copy: Copy) -> None:
    folder = copy(whole["sharded"])
    shutil.copy(whole["single"] / "model.safetensors", folder)
    assert "both" in assert_refused(folder)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    whole: Folders, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(whole["single"])
    real = os.preadv

    def shrinking(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(folder / "model.safetensors", 100)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    assert "shorter" in assert_refused(folder)
