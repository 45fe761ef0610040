"""A top-level scorer function, which any process can import."""

from __future__ import annotations


class Bonus:
    """A scorer with a setting of its own."""

    def __init__(self, right: float) -> None:
        self._right = right

    def __call__(self, completion: str, answer: str) -> float:
        return self._right * float(completion == answer)


double_bonus = Bonus(2.0)


def nearness(completion: str, answer: str) -> float:
    return 1.0 if completion == answer else 0.1 * float(completion[:1] == answer[:1])
