"""Expert ids as bytes."""

from __future__ import annotations

import numpy as np
import pytest

from llamarl.routes import RouteFormat, RoutesDiffer, route_rows


@pytest.mark.parametrize(("experts", "row_bytes"), [(64, 128), (256, 128), (257, 256)])
def test_an_id_takes_one_byte_up_to_256_experts(experts: int, row_bytes: int) -> None:
    form = RouteFormat(layers=16, per_token=8, experts=experts)
    assert form.row_bytes == row_bytes
    ids = np.random.default_rng(0).integers(0, experts, (5, 16, 8))
    rows = ids.astype("<u1" if experts <= 256 else "<u2").view(np.uint8).reshape(5, -1)
    assert np.array_equal(form.ids(rows), ids)


def test_rows_of_prompt_and_answer_are_those_of_all_tokens_but_the_last() -> None:
    rows = route_rows(b"cdef", b"ab", num_tokens=2, num_prompt=2, of="group 1")
    assert rows.tobytes() == b"abcdef" and rows.shape == (3, 2)
    assert route_rows(b"abcdef", b"", num_tokens=3, num_prompt=0, of="group 1").tobytes() == b"cdef"
    with pytest.raises(RoutesDiffer, match="group 1: 4 bytes"):
        route_rows(b"cdef", b"a", num_tokens=2, num_prompt=2, of="group 1")
