"""The paper's table, fitted on its first row: that row is as published, and the gain grows with the model."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llamarl.plan.paper import PUBLISHED, Assumed, fit_answers, predict_row


def test_the_gain_grows_with_the_model_as_published() -> None:
    assumed = Assumed()
    answers = fit_answers(assumed)
    first, second, third = (predict_row(row, answers, assumed) for row in PUBLISHED)
    assert first.sync_s == pytest.approx(PUBLISHED[0].sync_s, rel=0.01)
    assert first.async_s == pytest.approx(PUBLISHED[0].async_s, rel=0.01)
    for smaller, larger in pairwise([first, second, third]):
        assert smaller.gain < larger.gain
        assert smaller.m < larger.m, "the larger the model, the more GPUs the baseline's copy takes"
    assert second.gain == pytest.approx(PUBLISHED[1].gain, rel=0.3)
