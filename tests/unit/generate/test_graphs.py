from __future__ import annotations

import torch

from llamarl.generate.graphs import _WORTH, Graphs


def test_a_shape_that_occurs_now_and_then_is_not_worth_a_capture() -> None:
    graphs = Graphs(torch.device("cpu"))
    assert graphs.worth("seldom"), "without graphs nothing is captured, and nothing costs"
    graphs._enabled = True
    assert [graphs.worth("often") for _ in range(_WORTH + 1)] == [False] * _WORTH + [True]
    assert not graphs.worth("another")
