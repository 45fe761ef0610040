"""Tokens are drawn from the distribution that their log-probs name, with random numbers that nothing else can shift."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, fields
from torch import Tensor

from llamarl.config import GeneratorConfig
from llamarl.generate.sampling import sample_tokens, uniform_draws
from llamarl.generate.slots import Opening, SlotState
from llamarl.types import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, -6.0])


def draws(count: int, *, seed: int = 0, ordinal: int = 0, sample: int = 0) -> Tensor:
    positions = torch.arange(count)
    return uniform_draws(seed, torch.full_like(positions, ordinal), torch.full_like(positions, sample), positions)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """The value that chance exceeds once in a million times (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.753 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5, 10.0])
def test_sampled_frequencies_are_the_probabilities(temperature: float) -> None:
    count = 200_000
    temperatures = torch.full((count,), temperature)
    tokens, _ = sample_tokens(LOGITS.expand(count, -1), draws(count), {"temperature": temperatures})
    probabilities = (LOGITS.double() / temperature).softmax(-1)
    kept = probabilities * count >= 5  # chi-square needs a few in every cell; the rest is pooled
    counts = torch.bincount(tokens, minlength=len(LOGITS)).double()
    pooled_counts = torch.cat([counts[kept], counts[~kept].sum()[None]]) if (~kept).any() else counts
    pooled = torch.cat([probabilities[kept], probabilities[~kept].sum()[None]]) if (~kept).any() else probabilities
    assert chi_square(pooled_counts, pooled) < chi_square_limit(len(pooled) - 1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_the_logprob_is_that_of_the_distribution_really_sampled_from(temperature: float) -> None:
    logits = torch.randn(500, 11, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample_tokens(logits, draws(500), {"temperature": torch.full((500,), temperature)})
    expected = torch.log_softmax(logits / temperature, dim=-1).gather(1, tokens[:, None])[:, 0]
    assert torch.equal(logprobs, expected)


def test_temperature_zero_takes_the_likeliest_token_whatever_the_draw() -> None:
    logits = torch.randn(300, 11, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = sample_tokens(logits, draws(300), {"temperature": torch.zeros(300)})
    assert torch.equal(tokens, logits.argmax(dim=-1))
    assert torch.equal(logprobs, torch.log_softmax(logits, dim=-1).max(dim=-1).values)


def test_every_row_has_a_temperature_of_its_own() -> None:
    logits = LOGITS.expand(3, -1)
    temperatures = torch.tensor([0.0, 0.5, 2.0])
    together, _ = sample_tokens(logits, draws(3), {"temperature": temperatures})
    for row in range(3):
        alone, _ = sample_tokens(
            logits[row : row + 1], draws(3)[row : row + 1], {"temperature": temperatures[row : row + 1]}
        )
        assert together[row] == alone[0]


def test_the_ends_of_the_unit_interval_give_tokens_that_can_occur() -> None:
    """Tokens without any probability are never drawn, at 0 and just below 1 alike."""
    impossible = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    for draw, token in [(0.0, 1), (1 - 2**-53, 2)]:
        tokens, logprobs = sample_tokens(
            impossible, torch.tensor([draw], dtype=torch.float64), {"temperature": torch.ones(1)}
        )
        assert tokens.item() == token
        assert logprobs.item() == pytest.approx(math.log(0.5))


@given(st.integers(0, 2**62), st.integers(-(2**40), 2**40), st.integers(0, 2**20), st.integers(0, 2**20))
def test_a_draw_depends_on_its_four_counters_only(seed: int, ordinal: int, sample: int, position: int) -> None:
    one = torch.tensor([[ordinal], [sample], [position]])
    alone = uniform_draws(seed, *one)
    among = uniform_draws(seed, *torch.cat([one + 5, one, one - 3], dim=1))
    assert alone[0] == among[1]
    assert 0.0 <= alone.item() < 1.0


@settings(max_examples=40)
@given(st.integers(0, 2**62 - 1), st.integers(-1000, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_every_counter_changes_the_draw(seed: int, ordinal: int, sample: int, position: int) -> None:
    def draw(*counters: int) -> float:
        first, *others = counters
        return float(uniform_draws(first, *(torch.tensor([value]) for value in others)))

    found = {
        draw(seed, ordinal, sample, position),
        draw(seed + 1, ordinal, sample, position),
        draw(seed, ordinal + 1, sample, position),
        draw(seed, ordinal, sample + 1, position),
        draw(seed, ordinal, sample, position + 1),
    }
    assert len(found) == 5


def test_counters_are_not_interchangeable() -> None:
    """(seed, ordinal, sample, position) = (1, 2, 3, 4) and its permutations are different draws."""
    orders = list(permutations((1, 2, 3, 4)))
    found = {uniform_draws(seed, *torch.tensor([[o], [s], [p]])).item() for seed, o, s, p in orders}
    assert len(found) == len(orders)


@pytest.mark.parametrize("counter", ["seed", "ordinal", "sample", "position"])
def test_draws_are_uniform_along_every_counter(counter: str) -> None:
    """Consecutive counters are what a job uses: a weak hash would show there first."""
    count, cells = 40_000, 50
    steps, fixed = torch.arange(count), torch.full((count,), 7)
    if counter == "seed":
        found = torch.cat([uniform_draws(seed, fixed[:1], fixed[:1], fixed[:1]) for seed in range(2_000)])
    else:
        names = ("ordinal", "sample", "position")
        found = uniform_draws(3, *(steps if name == counter else fixed for name in names))
    counts = torch.histc(found, bins=cells, min=0, max=1).double()
    assert chi_square(counts, torch.full((cells,), 1 / cells, dtype=torch.float64)) < chi_square_limit(cells - 1)


def test_neighboring_draws_are_independent() -> None:
    """Pairs (position, position + 1), (ordinal, ordinal + 1), (sample, sample + 1) fill the unit square evenly."""
    base = torch.arange(300).repeat_interleave(300), torch.arange(300).repeat(300)
    zeros = torch.zeros_like(base[0])
    for first, second in [
        (uniform_draws(0, base[0], zeros, base[1]), uniform_draws(0, base[0], zeros, base[1] + 1)),
        (uniform_draws(0, base[0], zeros, base[1]), uniform_draws(0, base[0] + 1, zeros, base[1])),
        (uniform_draws(0, zeros, base[0], base[1]), uniform_draws(0, zeros, base[0] + 1, base[1])),
        (uniform_draws(0, base[0], zeros, base[1]), uniform_draws(1, base[0], zeros, base[1])),
    ]:
        cell = (first * 16).long() * 16 + (second * 16).long()
        counts = torch.bincount(cell, minlength=256).double()
        assert chi_square(counts, torch.full((256,), 1 / 256, dtype=torch.float64)) < chi_square_limit(255)


FILTERS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all together": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "none": {},
}


def kept_by_hand(
    logits: list[float], temperature: float = 1.0, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """The distribution to be sampled from, by walking down the sorted probabilities."""
    weights = [math.exp(score / temperature) for score in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: int(top_k)] if top_k else order
    total, reached, chosen = sum(weights[token] for token in kept), 0.0, list[int]()
    for token in kept:
        if reached < top_p:
            chosen.append(token)
        reached += weights[token] / total
    chosen = [token for token in chosen if weights[token] >= min_p * weights[order[0]]]
    mass = sum(weights[token] for token in chosen)
    return [weights[token] / mass if token in chosen else 0.0 for token in range(len(weights))]


@pytest.mark.parametrize("option", FILTERS)
def test_frequencies_match_probabilities_for_every_option(option: str) -> None:
    """Chi-square over 60,000 draws; the log-probs are those of what was really sampled from."""
    count, knobs = 60_000, FILTERS[option]
    logits = (torch.randn(24, generator=torch.Generator().manual_seed(4)) * 1.5).tolist()
    expected = kept_by_hand(logits, **knobs)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | knobs
    rows = {name: torch.full((count,), value) for name, value in full.items()}
    tokens, logprobs = sample_tokens(torch.tensor(logits).expand(count, -1), draws(count), rows, filtered=True)
    found = torch.bincount(tokens, minlength=24).tolist()
    possible = [token for token, probability in enumerate(expected) if probability > 0]
    assert sum(found[token] for token in possible) == count, "a token was drawn that the option rules out"
    assert option in {"none", "temperature"} or len(possible) < 24
    statistic = sum((found[t] - count * expected[t]) ** 2 / (count * expected[t]) for t in possible)
    freedom = len(possible) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4  # far beyond the 99.9th percentile
    for token in possible:
        said = logprobs[tokens == token]
        assert torch.allclose(said, torch.full_like(said, math.log(expected[token])), atol=1e-5)


def test_rows_without_filters_do_not_notice_that_others_have_them() -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) * 2
    temperatures = torch.full((40,), 0.9)
    idle = {"top_k": torch.zeros(40, dtype=torch.int32), "top_p": torch.ones(40), "min_p": torch.zeros(40)}
    plain = sample_tokens(logits, draws(40), {"temperature": temperatures})
    filtered = sample_tokens(logits, draws(40), {"temperature": temperatures, **idle}, filtered=True)
    assert torch.equal(plain[0], filtered[0])
    assert torch.equal(plain[1], filtered[1])


def test_every_field_of_sampling_is_a_setting_and_reaches_its_slot() -> None:
    settings = GeneratorConfig(max_new_tokens=4, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    assert all(hasattr(settings, field.name) for field in fields(Sampling) if field.name != "samples")
    expected = Sampling(samples=1, max_new_tokens=4, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    state = SlotState(2, 4, (0,), torch.device("cpu"))
    state.open([Opening(slot=1, ordinal=0, sample=0, token=1, position=0, count=0, sampling=settings.sampling)])
    assert settings.sampling == expected
    assert {name: column[1].item() for name, column in state.sampling.items()} == asdict(expected)
