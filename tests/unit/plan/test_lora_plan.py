"""Planner, simulator and memory check reckon with adapters: frozen weights, and versions that are adapters only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from helpers.cli import llamarl

from llamarl.config import LoraConfig
from llamarl.config.file import load_config
from llamarl.config.lora import NO_LORA
from llamarl.families.adapters import num_adapter_parameters
from llamarl.families.parameters import num_parameters
from llamarl.jobs.memory_check import job_parts
from llamarl.layout.mesh import Mesh, Side
from llamarl.layout.model import model_plan
from llamarl.machine import GIB
from llamarl.model_spec import SHAPES
from llamarl.plan.gpus import gpu_named
from llamarl.plan.terms import (
    decode_terms,
    held_bytes,
    pass_bytes,
    published_bytes,
    train_terms,
    training_state,
    weight_bytes,
)

SHAPE, LORA = SHAPES["qwen3-8b"], LoraConfig(rank=32)
ADAPTERS, WEIGHTS = num_adapter_parameters(SHAPE, LORA), num_parameters(SHAPE)


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    state = training_state(SHAPE, 1, 1, lora=LORA)
    assert sum(state.values()) == 2 * WEIGHTS + 16 * ADAPTERS
    assert state["optimizer state"] == 8 * ADAPTERS and state["gradients"] == 4 * ADAPTERS
    assert sum(training_state(SHAPE, 2, 4, lora=LORA).values()) == sum(state.values()) / 8
    frozen, whole = (sum(pass_bytes(SHAPE, 8192, "full", 1, 1, lora=lora).values()) for lora in (LORA, NO_LORA))
    assert frozen < whole, "head and embedding have no gradients"


def test_a_version_is_its_adapters() -> None:
    trainer, generator = Side(Mesh((("fsdp", 2), ("tp", 2))), "bf16"), Side(Mesh((("tp", 2),)), "bf16")
    plan = model_plan(SHAPE, trainer, generator, LORA)
    whole = [one for one in plan.received_bytes if one]
    assert len(whole) == 2 and ADAPTERS < sum(whole) < 4 * ADAPTERS, "some are split over the ranks, some whole on each"
    assert published_bytes(SHAPE, "fp8", LORA) == 2 * ADAPTERS
    assert held_bytes(SHAPE, "bf16", LORA) == 2 * (WEIGHTS + ADAPTERS)
    assert held_bytes(SHAPE, "bf16", LORA, merged=True) > 1.7 * held_bytes(SHAPE, "bf16", LORA)


def test_an_update_takes_about_two_thirds_and_a_decode_step_little_more() -> None:
    gpu = gpu_named("h200")
    frozen, whole = (
        train_terms(SHAPE, gpu, "bf16", tokens=1e6, answer_tokens=8e5, squares=1e9, passes=10, lora=lora)
        for lora in (LORA, NO_LORA)
    )
    assert frozen["products"] / whole["products"] == pytest.approx(0.68, abs=0.02)
    assert frozen["traffic"] / whole["traffic"] == pytest.approx(2.07, abs=0.05), (
        "thin products read all that others do"
    )
    assert frozen["optimizer"] < 0.02 * whole["optimizer"]
    beside, plain = (decode_terms(SHAPE, gpu, "bf16", 256, 1e5, lora=lora)["products"] for lora in (LORA, NO_LORA))
    assert 1.0 < beside / plain < 1.05


def test_the_command_plans_what_full_training_cannot() -> None:
    asked = ["plan", "--model", "qwen3-32b", "--gpus", "2", "--gpu", "h200", "--answer", "fixed:1024", "--groups", "16"]
    assert "optimizer state in host memory (" in llamarl(*asked).out
    found = llamarl(*asked, "--lora", "32")
    assert found.code == 0 and "rank: 32" in found.out and "offload" not in found.out


def test_a_job_with_adapters_counts_less_memory_and_no_second_reference() -> None:
    def held(*settings: str) -> dict[str, float]:
        sizes: dict[str, float] = {}
        for part in job_parts(load_config(None, ["algo.reference_kl=0.1", "reference.place=trainer", *settings])):
            sizes[part.what] = sizes.get(part.what, 0.0) + part.num_bytes
        return sizes

    whole, frozen = held(), held("model.lora.rank=4")
    assert "weights of the reference" in whole and "weights of the reference" not in frozen
    assert (
        frozen["the frozen base"] + frozen["adapters and their optimizer state"]
        < 0.6 * whole["optimizer state and gradients"]
    )
    assert frozen["weights of the generator"] < 0.1 * whole["weights of the generator"], "the base is counted once"
    apart = held("model.lora.rank=4", "generator.quantize=fp8")
    assert apart["frozen weights and adapters"] > 0.99 * frozen["the frozen base"]
    assert apart["weights of the generator"] > 0.2 * whole["weights of the generator"]
    assert held("model.lora.rank=4", "model.base=fp8")["the frozen base"] < 0.6 * frozen["the frozen base"]
    for what in ("published weights", "copy for snapshots"):
        assert frozen[what] < 0.3 * whole[what]


ONE = ["plan", "--gpus", "1", "--gpu", "h200", "--samples", "8", "--json"]


def planned(*asked: str) -> dict[str, Any]:
    found = llamarl(*ONE, *asked)
    assert found.code == 0, found.err
    plan: dict[str, Any] = msgspec.json.decode(found.out)["async"]
    return plan


def test_one_gpu_holds_the_base_once() -> None:
    asked = ["--model", "qwen3-32b", "--lora", "32", "--groups", "16", "--answer", "fixed:1024"]
    plan = planned(*asked)
    base = weight_bytes(SHAPES["qwen3-32b"], "bf16") / GIB
    parts = plan["layout"]["trainer"]["memory_gib"] + plan["layout"]["generator"]["memory_gib"]
    assert plan["memory_gib"] == pytest.approx(parts - base) and base > 60
    assert planned(*asked, "--base", "fp8")["memory_gib"] < plan["memory_gib"]


def test_what_does_not_fit_in_bf16_is_planned_on_a_base_in_fp8() -> None:
    asked = ["--model", "llama-3.1-70b", "--lora", "32", "--groups", "8", "--answer", "fixed:512"]
    plan = planned(*asked)
    assert "a base in fp8" in plan["note"] and plan["memory_gib"] < 125
    text = llamarl(*ONE[:-1], *asked).out
    assert "base: fp8" in text and "quantize: none" in text and "cannot be run" not in text
    assert "--base: cannot take effect without --lora" in llamarl(*ONE, *asked[:2], "--base", "fp8").err
    assert "expected bf16 or fp8" in llamarl(*ONE, *asked, "--base", "int4").err
    assert "leave out --precision" in llamarl(*ONE, *asked, "--base", "fp8", "--precision", "bf16").err


def test_a_job_with_adapters_is_simulated() -> None:
    asked = ["simulate", "schedule.updates=2", "--gpu", "h200", "--model", "qwen3-8b", "--json"]
    whole, frozen = (llamarl(*asked, *more) for more in ([], ["model.lora.rank=32"]))
    assert whole.code == frozen.code == 0, frozen.err
