"""Descriptions of GPUs: known by name, read from and written to files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamarl.errors import InputError
from llamarl.plan.fit import Measured, fit_factors
from llamarl.plan.gpus import GPUS, TrainFactors, gpu_named, gpu_to_json, peaks_of, read_gpu


@pytest.mark.parametrize("name", ["h100", "h200", "a100", "b200", "l40s"])
def test_known_by_name(name: str) -> None:
    gpu = gpu_named(name.upper())
    assert gpu.name == name
    assert gpu.flops("bf16") < gpu.tflops.bf16 * 1e12


@pytest.mark.parametrize(
    ("device", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA GH200 480GB", 989),
    ],
)
def test_peaks_are_those_of_the_longest_name_that_fits(device: str, bf16: float) -> None:
    found = peaks_of(device)
    assert found is not None
    assert found.bf16 == bf16


def test_an_unknown_device_has_no_peaks() -> None:
    assert peaks_of("NVIDIA GeForce GTX 1080") is None


def test_a_file_says_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(gpu_to_json(GPUS["h100"]))
    assert gpu_named(str(path)) == GPUS["h100"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", "did you mean 'h100'"),
        ("nothing.json", "cannot be read"),
        ("x200000", "a .json file of `llamarl bench --calibrate`"),
    ],
)
def test_what_is_not_known_is_told(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gpu_named(name)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"name": "x", "unknown": 1}')
    with pytest.raises(InputError, match="not a description"):
        read_gpu(path)
    with pytest.raises(InputError, match="has no fp8 products; it has fp32, bf16"):
        GPUS["a100"].flops("fp8")


def test_factors_are_found_again_from_the_times_that_they_make() -> None:
    true = TrainFactors(products=1.6, attention=3.0, traffic=2.0, optimizer=1.0, layer_s=3e-4, update_s=0.02)
    random = np.random.default_rng(0)
    measured = []
    for number in range(40):
        terms = dict(zip(true.__struct_fields__, random.uniform(0.1, 1, 6) * [1, 0.5, 0.5, 0.1, 3000, 40], strict=True))
        measured.append(Measured(str(number), sum(getattr(true, n) * v for n, v in terms.items()), terms))
    found = fit_factors(TrainFactors(), measured)
    for name in ("products", "attention", "traffic", "layer_s", "update_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.15), name


def test_factors_never_become_negative() -> None:
    odd = [
        Measured("a", 1.0, {"products": 2.0, "update_s": 1.0}),
        Measured("b", 2.0, {"products": 2.0, "update_s": 0.0}),
    ]
    found = fit_factors(TrainFactors(), odd)
    assert found.products > 0
    assert found.update_s >= 0
