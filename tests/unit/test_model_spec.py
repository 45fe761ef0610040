"""Well-known models: their sizes add up to the published totals, and their names are easy to find."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.errors import ConfigError, InputError
from llamarl.families.parameters import num_parameters
from llamarl.generate.parallel import TensorRank
from llamarl.layout.model import check_shared
from llamarl.model_spec import SHAPES, shape_named

PUBLISHED = {
    "smollm2-135m": 0.1345,
    "smollm2-360m": 0.3618,
    "smollm2-1.7b": 1.711,
    "llama-3.2-1b": 1.2358,
    "llama-3.2-3b": 3.2127,
    "llama-3.1-8b": 8.030,
    "llama-3.1-70b": 70.55,
    "llama-3.3-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "qwen2.5-0.5b": 0.4940,
    "qwen2.5-1.5b": 1.5437,
    "qwen2.5-3b": 3.0859,
    "qwen2.5-7b": 7.6156,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.5960,
    "qwen3-1.7b": 1.7206,
    "qwen3-4b": 4.0225,
    "qwen3-8b": 8.1907,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "mistral-7b-v0.1": 7.2417,
    "mistral-7b-v0.3": 7.2480,
    "mistral-nemo-12b": 12.248,
    "olmo-2-1b": 1.485,
    "olmo-2-7b": 7.299,
    "olmo-2-13b": 13.716,
    "olmo-2-32b": 32.234,
    "phi-3-mini-4k": 3.821,
    "phi-4": 14.66,
    "gemma-2-2b": 2.614,
    "gemma-2-9b": 9.242,
    "gemma-2-27b": 27.227,
    "gemma-3-270m": 0.2681,
    "gemma-3-1b": 0.99989,
    "mistral-small-24b": 23.572,
    "olmoe-1b-7b": 6.919,
    "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094,
    "granite-3.1-1b-a400m": 1.3346,
}  # billions of parameters


def test_every_known_model_has_its_published_size() -> None:
    assert SHAPES.keys() == PUBLISHED.keys()
    for name, billions in PUBLISHED.items():
        assert num_parameters(SHAPES[name]) / 1e9 == pytest.approx(billions, rel=1e-3), name


def test_the_page_of_models_lists_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert all(f"`{name}`" in page for name in SHAPES)


def test_windows_are_counted_by_what_they_see() -> None:
    """Against a count of pairs; without windows nothing is left out."""
    length = 6000
    gemma, plain = SHAPES["gemma-2-2b"], SHAPES["llama-3.1-8b"]
    pairs = [sum(min(token, window or token) for token in range(1, length + 1)) for window in gemma.windows]
    share = sum(pairs) / len(pairs) / (length * (length + 1) / 2)
    assert gemma.attended_share(length) == pytest.approx(share, rel=1e-3)
    assert gemma.cached_share(length) == pytest.approx((1 + 4096 / length) / 2)
    assert (gemma.attended_share(4096), plain.attended_share(length), plain.cached_share(length)) == (1.0, 1.0, 1.0)


def test_a_name_is_found_as_a_hub_writes_it() -> None:
    assert shape_named("Qwen/Qwen3-32B") == shape_named("Qwen3-32B") == SHAPES["qwen3-32b"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("qwen3-30b", ["qwen3-32b", "qwen3-8b"]),
        ("mistral-7b", ["mistral-7b-v0.1", "mistral-7b-v0.3"]),
        ("Meta/Llama-3.1-7B", ["llama-3.1-70b", "llama-3.1-8b"]),
        ("gpt2", [*SHAPES]),
    ],
)
def test_an_unknown_name_is_told_the_nearest(name: str, near: list[str]) -> None:
    with pytest.raises(InputError, match=f"no model shape is named '{name}'") as caught:
        shape_named(name)
    assert all(one in str(caught.value) for one in near)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SHAPES)
def test_builders_agree_on_how_many_ranks_share_a_model(name: str) -> None:
    for ranks in (1, 2, 3, 4, 5, 7, 8, 16, 32):
        assert SHAPES[name].splits_over(ranks) == builders_accept(name, ranks), ranks


def builders_accept(name: str, ranks: int) -> bool:
    try:
        check_shared(SHAPES[name], ranks, 1, "trainer")
        TensorRank(0, ranks).check(SHAPES[name])
    except ConfigError:
        return False
    return True
