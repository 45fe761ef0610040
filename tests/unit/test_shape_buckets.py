"""Few sizes occur, and none is much larger than what is asked for."""

from __future__ import annotations

from llamarl.shape_buckets import padded_rows, padded_tokens


def test_rows_are_padded_to_few_sizes() -> None:
    sizes = sorted({padded_rows(count, 1000) for count in range(1, 1001)})
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1000]


def test_rows_that_cost_are_padded_by_half_at_most() -> None:
    for count in range(1, 3000):
        padded = padded_rows(count, 3000)
        assert count <= padded < (1.5 * count if count > 128 else 2 * count)
        assert padded == 3000 or padded_rows(padded, 3000) == padded


def test_tokens_of_prompts() -> None:
    assert [padded_tokens(count) for count in (0, 1, 16, 17, 64, 65)] == [16, 16, 16, 32, 64, 128]
