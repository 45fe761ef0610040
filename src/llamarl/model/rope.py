"""Rotary frequencies and the tables of cos and sin, for every type of RoPE; as transformers computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamarl.model.ops import Rope
from llamarl.model_spec import LinearScaling, Llama3Scaling, LongScaling, ModelSpec, RopeScaling, YarnScaling


def rope_frequencies(shape: ModelSpec, device: torch.device | None = None) -> Tensor:
    """Rotary frequencies [D/2] in fp32, scaled as the spec says; those of layers that have none of their own."""
    steps = _steps(shape, device)
    match shape.rope_scaling:
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / (shape.rope_theta**steps), scaling)
        case LinearScaling() as scaling:
            return 1.0 / (shape.rope_theta**steps) / scaling.factor
        case YarnScaling() as scaling:
            return _yarn(shape, steps, scaling)
        case LongScaling() as scaling:
            factors = torch.tensor(scaling.short_factors, dtype=torch.float32, device=device)
            return 1.0 / (factors * shape.rope_theta**steps)
        case _:
            return 1.0 / (shape.rope_theta**steps)


def _steps(shape: ModelSpec, device: torch.device | None) -> Tensor:
    return torch.arange(0, shape.rotated_size, 2, dtype=torch.int64, device=device).float() / shape.rotated_size


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(shape: ModelSpec, steps: Tensor, scaling: YarnScaling) -> Tensor:
    size = shape.rotated_size

    def dim_of(turns: float) -> float:
        """The place, among the frequencies, of the one that makes so many turns over the original positions."""
        inside = scaling.original_max_positions / (turns * 2 * math.pi)
        return size * math.log(inside) / (2 * math.log(shape.rope_theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    places = torch.arange(size // 2, dtype=torch.float32, device=steps.device)
    ramp = ((places - low) / ((high - low) or 0.001)).clamp(0, 1)
    wavelengths = shape.rope_theta**steps
    return 1.0 / (scaling.factor * wavelengths) * ramp + 1.0 / wavelengths * (1 - ramp)


def _attention_factor(scaling: RopeScaling | None) -> float:
    """Factor of cos and sin."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling | LongScaling) else 1.0


def rope_table(shape: ModelSpec, positions_BT: Tensor) -> Rope:
    """cos and sin for every position, [B, T, 1, D], in fp32; then those of layers with a window, if they rotate apart."""
    frequencies = rope_frequencies(shape, positions_BT.device)
    table = _turned(positions_BT, frequencies, _attention_factor(shape.rope_scaling))
    if not shape.has_local_rope:
        return table
    local = 1.0 / (shape.local_rope_theta ** _steps(shape, positions_BT.device))
    return *table, *_turned(positions_BT, local, 1.0)


def _turned(positions_BT: Tensor, frequencies: Tensor, factor: float) -> Rope:
    angles = positions_BT[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rope_up_to(shape: ModelSpec, length: int, device: torch.device | str) -> Rope:
    """The table of all positions below `length`, [T, 1, D], for callers that look up theirs."""
    return tuple(part[0] for part in rope_table(shape, torch.arange(length, device=device)[None]))
