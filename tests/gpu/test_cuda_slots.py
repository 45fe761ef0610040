"""Slots in device memory, between processes: whole, verified, and alive when their maker is dead.

CUDA cannot be used in a fork of a process that has used it, so the scenarios run in a fresh interpreter, all in one go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llamarl.bench.actors import Actor, Actors
from llamarl.families.parameters import parameter_shapes
from llamarl.layout.model import SCALE
from llamarl.model_spec import ModelSpec
from llamarl.weights.memory import HOST
from llamarl.weights.overlapped_writer import OverlappedWriter
from llamarl.weights.rank_slots import find
from llamarl.weights.slot_file import NUM_SLOTS, SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter
from llamarl.weights.wire import MAX_FP8, WireFormat, scales_of

DEVICE = 0
SHAPE = ModelSpec(
    vocab_size=4096, hidden_size=512, intermediate_size=1536, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=64,
    max_positions=64, qk_norm=True, qkv_bias=True,
)  # fmt: skip
ODD: dict[str, tuple[int, ...]] = {"single": (), "odd": (7,), "matrix": (301, 67), "none": (0,), "long": (9_000_011,)}
SHAPES: dict[str, tuple[int, ...]] = {**parameter_shapes(SHAPE), **ODD}


def weights(version: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same numbers in every process."""
    generator = torch.Generator("cuda").manual_seed(version)
    return {name: torch.randn(size, device="cuda", generator=generator).to(dtype) for name, size in SHAPES.items()}


class Writer:
    def __init__(self, file: SlotFile, dtype: str = "bfloat16", precision: str = "", overlapped: bool = False) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._weights = weights(0, self._dtype)
        wire = WireFormat.for_generator("fp8", SHAPE) if precision == "fp8" else WireFormat(precision)
        self._writer = SlotWriter(file, self._weights, lease_s=5, device=DEVICE, wire=wire)
        self._overlapped = OverlappedWriter(self._writer, DEVICE) if overlapped else None

    def publish(self, version: int) -> tuple[str, bool]:
        for name, tensor in weights(version, self._dtype).items():
            self._weights[name].copy_(tensor)
        found = self._writer.publish(version)
        return found.checksum, found.changed

    def publish_beside_work(self, version: int) -> int:
        """A step makes the weights, the next one changes them: what is published lies in between."""
        assert self._overlapped is not None
        told: list[int] = []
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # the step is still under way on the device when the publication begins
        for name, tensor in weights(version, self._dtype).items():
            self._weights[name].copy_(tensor)
        self._overlapped.begin(version, lambda publication: told.append(publication.version), lambda error: None)
        self._overlapped.hold()
        for tensor in self._weights.values():
            tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        return told[0]

    def die_while_publishing(self, version: int) -> None:
        self._writer._staging.quantize = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        self._writer.publish(version)


class Reader:
    def __init__(self, file: SlotFile, dtype: str = "bfloat16", precision: str = "") -> None:
        self._file, self._quantized = (
            file,
            WireFormat.for_generator("fp8", SHAPE).segments if precision == "fp8" else {},
        )
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._target = {name: torch.full_like(tensor, 9.0) for name, tensor in weights(0, self._dtype).items()}
        for name in self._quantized:
            rows = self._target[name].shape[0]
            self._target[name] = torch.zeros(SHAPES[name], device="cuda", dtype=torch.float8_e4m3fn)
            self._target[name + SCALE] = torch.zeros(rows, 1, device="cuda")
        self._addresses = [tensor.data_ptr() for tensor in self._target.values()]
        self._reader = SlotReader(file, self._target)

    def load(self, version: int) -> int:
        found = self._reader.load(version)
        assert [tensor.data_ptr() for tensor in self._target.values()] == self._addresses
        return found

    def holds(self, version: int, master: str = "bfloat16") -> bool:
        full = weights(version, getattr(torch, master))
        plain = {name: tensor for name, tensor in self._target.items() if name in full and name not in self._quantized}
        wrong = [name for name, tensor in plain.items() if not torch.equal(tensor, full[name].to(self._dtype))]
        wrong += [name for name in self._quantized if not self._is_quantized(name, full[name])]
        if wrong:
            print("differ:", wrong, file=sys.stderr)
        return not wrong

    def _is_quantized(self, name: str, full: Tensor) -> bool:
        scale = scales_of(full.float().abs().amax(dim=1, keepdim=True))
        weight = (full.float() * scale.reciprocal()).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)
        exact = torch.equal(self._target[name].view(torch.uint8), weight.view(torch.uint8))
        return exact and torch.equal(self._target[name + SCALE], scale)

    def flip(self, slot: int, at: int) -> None:
        data = find(self._file, 0, DEVICE).memory.data(slot)
        data[at % len(data)] ^= 16
        torch.cuda.synchronize()

    def swap_words(self, slot: int, one: int, other: int) -> None:
        words = find(self._file, 0, DEVICE).memory.data(slot)[: 1 << 20].view(torch.int32)
        words[[one, other]] = words[[other, one]]
        torch.cuda.synchronize()

    def sums_match_reference(self, slot: int) -> bool:
        memory = find(self._file, 0, DEVICE).memory
        data = memory.data(slot)
        expected = reference_sums(data, memory.block_bytes // 4).cpu().numpy().tobytes()
        found = memory.digests(slot, range(-(-len(data) // memory.block_bytes)))
        return found == expected == find(self._file, 0, DEVICE).read_digests(slot)


def reference_sums(data: Tensor, block_words: int) -> Tensor:
    """The kernels' sums with torch alone. Bytes up to a whole word count; the last block may be short."""
    words = data.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    factors = 2 * (torch.arange(len(words), device=data.device) % block_words) + 1
    blocks = torch.arange(len(words), device=data.device) // block_words
    sums = torch.zeros(-(-len(words) // block_words), dtype=torch.int64, device=data.device)
    return sums.index_add_(0, blocks, words * factors)


def refused(actor: Actor, method: str, *args: object) -> str:
    try:
        actor.call(method, *args)
    except RuntimeError as error:
        return str(error)
    return "nothing was refused"


def round_trip(dtype: str, precision: str, master: str, reader_dtype: str) -> None:
    file = SlotFile()
    writer, reader = Actor(lambda: Writer(file, dtype, precision)), Actor(lambda: Reader(file, reader_dtype, precision))
    with Actors([writer, reader]):
        for version in (0, 1, 2, 3):
            assert writer.call("publish", version)[1]
            assert reader.call("load", version) > 0
            assert reader.call("holds", version, master)
            assert reader.call("sums_match_reference", version % NUM_SLOTS)
        assert "StaleWeights" in refused(reader, "load", 1)


def bf16_arrives_bit_for_bit() -> None:
    round_trip("bfloat16", "", "bfloat16", "bfloat16")


def fp32_arrives_bit_for_bit() -> None:
    round_trip("float32", "", "float32", "float32")


def fp32_masters_are_narrowed_as_torch_does() -> None:
    round_trip("float32", "bf16", "float32", "bfloat16")


def fp8_is_made_on_the_way() -> None:
    round_trip("float32", "fp8", "float32", "bfloat16")


def damage_is_noticed_and_the_old_weights_stay() -> None:
    file = SlotFile()
    writer, reader = Actor(lambda: Writer(file)), Actor(lambda: Reader(file))
    with Actors([writer, reader]):
        writer.call("publish", 0)
        reader.call("load", 0)
        writer.call("publish", 1)
        for at in (0, 12_345_678, -1 - 64 * 4):
            reader.call("flip", 1, at)
            assert "does not match its checksum" in refused(reader, "load", 1)
            assert reader.call("holds", 0)
            reader.call("flip", 1, at)
        reader.call("swap_words", 1, 17, 18)
        assert "does not match its checksum" in refused(reader, "load", 1)
        reader.call("swap_words", 1, 17, 18)
        reader.call("load", 1)
        assert reader.call("holds", 1)


def readers_survive_the_death_of_the_writer() -> None:
    file = SlotFile()
    writer, reader = Actor(lambda: Writer(file)), Actor(lambda: Reader(file))
    with Actors([reader]) as actors:
        checksum = writer.call("publish", 4)[0]
        writer.call("publish", 5)
        reader.call("load", 4)
        writer.close()
        reader.call("load", 5)
        assert reader.call("holds", 5), "a reader that knew the slots"
        newcomer = Actor(lambda: Reader(file))
        actors.append(newcomer)
        newcomer.call("load", 4)
        assert newcomer.call("holds", 4), "and one that was born after the writer's death"
        successor = Actor(lambda: Writer(file))
        actors.append(successor)
        assert successor.call("publish", 4) == [checksum, False], "its successor makes the same version again"
        successor.call("publish", 6)
        for one in (reader, newcomer):
            one.call("load", 6)
            assert one.call("holds", 6)


def death_in_the_middle_leaves_the_old_version() -> None:
    file = SlotFile()
    writer, reader = Actor(lambda: Writer(file)), Actor(lambda: Reader(file))
    with Actors([reader]):
        for version in (0, 1):
            writer.call("publish", version)
        reader.call("load", 0)
        writer.begin("die_while_publishing", 2)
        with suppress(ConnectionError):
            writer.end()
        os.waitpid(writer.pid, 0)
        for gone in (0, 2):
            assert "StaleWeights" in refused(reader, "load", gone)
        assert reader.call("holds", 0)
        reader.call("load", 1)
        assert reader.call("holds", 1)


def publication_beside_work_takes_the_weights_between_two_steps() -> None:
    file = SlotFile()
    writer, reader = Actor(lambda: Writer(file, overlapped=True)), Actor(lambda: Reader(file))
    with Actors([writer, reader]):
        for version in range(3):
            assert writer.call("publish_beside_work", version) == version
            reader.call("load", version)
            assert reader.call("holds", version)


def a_host_reader_takes_device_weights_through_host_memory() -> None:
    class HostWriter(Writer):
        def __init__(self, file: SlotFile) -> None:
            super().__init__(file)
            self._writer = SlotWriter(file, self._weights, lease_s=5, device=HOST)

    file = SlotFile()
    writer, reader = Actor(lambda: HostWriter(file)), Actor(lambda: Reader(file))
    with Actors([writer, reader]):
        writer.call("publish", 1)
        reader.call("load", 1)
        assert reader.call("holds", 1)


SCENARIOS: list[Callable[[], None]] = [
    bf16_arrives_bit_for_bit,
    fp32_arrives_bit_for_bit,
    fp32_masters_are_narrowed_as_torch_does,
    fp8_is_made_on_the_way,
    damage_is_noticed_and_the_old_weights_stay,
    readers_survive_the_death_of_the_writer,
    death_in_the_middle_leaves_the_old_version,
    publication_beside_work_takes_the_weights_between_two_steps,
    a_host_reader_takes_device_weights_through_host_memory,
]


def run_all() -> dict[str, str]:
    outcome = {}
    for scenario in SCENARIOS:
        try:
            scenario()
            outcome[scenario.__name__] = "ok"
        except Exception:
            outcome[scenario.__name__] = traceback.format_exc()
    return outcome


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    if not torch.cuda.device_count():
        pytest.skip("no CUDA device")
    done = subprocess.run(
        [sys.executable, str(Path(__file__))], capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_between_two_processes_on_one_gpu(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == "ok", outcome[name] + outcome["stderr"]


if __name__ == "__main__":
    print(json.dumps(run_all()))
