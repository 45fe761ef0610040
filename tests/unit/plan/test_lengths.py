"""Distributions of lengths: drawn lengths agree with the figures computed from quantiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamarl.errors import InputError
from llamarl.plan.lengths import Lengths, lognormal_with

SPECS = ["fixed:100", "uniform:min=10,max=500", "lognormal:median=800,sigma=1,max=8192"]


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_computed_is_what_is_drawn(spec: str) -> None:
    lengths = Lengths(spec)
    drawn = lengths.draw(np.random.default_rng(0), 200_000).astype(float)
    assert lengths.mean == pytest.approx(drawn.mean(), rel=0.02)
    assert lengths.mean_square == pytest.approx((drawn**2).mean(), rel=0.04)
    assert lengths.longest_of(64) == pytest.approx(drawn[:192_000].reshape(-1, 64).max(axis=1).mean(), rel=0.02)
    above = float((drawn > 300).mean())
    assert float(lengths.share_above(np.array([300.0]))[0]) == pytest.approx(above, abs=0.02)
    assert drawn.max() <= lengths.longest
    assert drawn.min() >= 1


def test_the_longest_of_more_is_longer() -> None:
    lengths = Lengths(SPECS[2])
    found = [lengths.longest_of(count) for count in (1, 8, 256, 2048, 100_000)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(lengths.mean)
    assert found[-1] == pytest.approx(8192, rel=0.01)


def test_lengths_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("3\n5\n7\n")
    lengths = Lengths(f"file:{path}")
    assert lengths.mean == pytest.approx(5, rel=0.02)
    assert set(lengths.draw(np.random.default_rng(0), 100).tolist()) == {3, 5, 7}


def test_a_distribution_from_its_mean_and_the_share_that_was_cut_off() -> None:
    lengths = lognormal_with(1035, 0.1744, 2048)
    drawn = lengths.draw(np.random.default_rng(1), 100_000)
    assert drawn.mean() == pytest.approx(1035, rel=0.01)
    assert (drawn == 2048).mean() == pytest.approx(0.1744, abs=0.01)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("normal:5", "write fixed:N"),
        ("fixed:many", "'many' is not a length"),
        ("lognormal:median=5,sigma=1", "max is missing"),
        ("uniform:min=9,max=3", "max is less than min"),
        ("uniform:min=9,width=3", "cannot read 'width=3'"),
        ("file:/no/such/file", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Lengths(spec)
