"""AdamW: on fp32 it is torch's, bit for bit; on bf16 it keeps fp32 masters without holding them whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from llamarl.config import TrainerConfig
from llamarl.train.optimizer import AdamW, gradient_norm, host_state, join_halves, split_halves

SETTINGS = TrainerConfig(weight_decay=0.1, betas=(0.9, 0.95))


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (7, 5), "norm": (5,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def torch_adamw(mine: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    groups = [
        {"params": [mine["matrix"]], "weight_decay": 0.1},
        {"params": [mine["norm"]], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def give_gradients(mine: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in mine.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_on_fp32_it_is_torchs_bit_for_bit_and_decays_matrices_only() -> None:
    mine, theirs = parameters(), parameters()
    optimizer, expected = AdamW(mine, SETTINGS), torch_adamw(theirs)
    for step in range(5):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        optimizer.step(0.01)
        expected.step()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_on_bf16_the_masters_are_those_of_fp32_training(scale: float) -> None:
    """Two hundred steps, each far below what bf16 can resolve, would all be lost without masters."""
    narrow, wide = parameters(torch.bfloat16), parameters()
    optimizer, expected = AdamW(narrow, SETTINGS), torch_adamw(wide)
    for name, parameter in wide.items():
        optimizer.set_master(name, parameter.detach())
    for step in range(200):
        give_gradients(narrow, step)
        for name, parameter in wide.items():
            parameter.grad = narrow[name].grad.float() * scale  # type: ignore[union-attr]
        optimizer.step(1e-5, scale)
        for group in expected.param_groups:
            group["lr"] = 1e-5
        expected.step()
    for name, master in optimizer.masters():
        assert torch.allclose(master, wide[name], rtol=0, atol=1e-6)
        assert (narrow[name].float() - master).abs().max() <= master.abs().max() * 2**-8
    moved = (dict(optimizer.masters())["matrix"] - parameters()["matrix"]).abs().max()
    assert moved > 1e-4


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**126, min_value=-(2.0**126)),
        min_size=1,
    )
)
def test_halves_hold_every_fp32_exactly_and_the_upper_one_is_the_nearest_bf16(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    high, low = split_halves(master)
    assert torch.equal(join_halves(high, low), master)
    rounded, nearest = high.view(torch.bfloat16).float(), master.bfloat16().float()
    assert torch.equal((rounded - master).abs(), (nearest - master).abs()), "as near; ties may go the other way"


def test_bf16_gradients_of_several_passes_are_summed_in_fp32() -> None:
    """A thousand small numbers after a large one vanish in a bf16 sum."""
    narrow = {"matrix": nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))}
    optimizer = AdamW(narrow, SETTINGS)
    for value in (1.0, *[2.0**-10] * 1000):
        narrow["matrix"].grad = torch.full((4, 4), value, dtype=torch.bfloat16)
        optimizer.collect()
    assert torch.allclose(optimizer.gradients()["matrix"], torch.full((4, 4), 1.0 + 1000 / 1024))
    optimizer.zero_grad()
    assert optimizer.gradients() == {}


def test_the_norm_is_that_of_all_gradients_together_whatever_their_precision() -> None:
    grads: dict[str, Tensor] = {"a": torch.full((3,), 2.0), "b": torch.full((4,), 1.0)}
    assert gradient_norm(grads, lambda name: True, None).item() == 4.0
    narrow = {name: grad.bfloat16() for name, grad in grads.items()}
    assert gradient_norm(narrow, lambda name: True, None).item() == 4.0
    others = gradient_norm(grads, lambda name: name == "b", lambda squares: squares + 12)
    assert others.item() == 4.0, "this rank counts b, another one a"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_is_not_sound_leaves_every_bit_where_it_is(dtype: torch.dtype) -> None:
    mine = parameters(dtype)
    optimizer = AdamW(mine, SETTINGS)
    give_gradients(mine, 0)
    assert optimizer.step(0.01)
    before = {name: master.clone() for name, master in optimizer.masters()}
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    mine["matrix"].grad = torch.full_like(mine["matrix"], torch.nan)
    assert not optimizer.step(0.01, torch.tensor(torch.nan), torch.tensor(False))
    assert optimizer.num_steps == 1
    assert all(torch.equal(master, before[name]) for name, master in optimizer.masters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.state_tensors().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_in_host_memory_is_what_it_would_be_on_the_device_in_one_piece_without_waste(dtype: torch.dtype) -> None:
    optimizer = AdamW(parameters(dtype), TrainerConfig())
    memory, home = host_state(optimizer.slots)
    for slot in optimizer.slots:
        for key, here in slot.state.items():
            there = home[slot.name][key]
            assert (there.shape, there.dtype) == (here.shape, here.dtype) and not there.any()
            there.fill_(1)
    wanted = sum(one.nbytes for slot in optimizer.slots for one in slot.state.values())
    parts = [one for state in home.values() for one in state.values()]
    assert sum(one.nbytes for one in parts) == wanted
    assert memory.nbytes - wanted < 64 * len(parts)
    starts = sorted((one.data_ptr(), one.nbytes) for one in parts)
    assert all(start + size <= other for (start, size), (other, _) in pairwise(starts))
