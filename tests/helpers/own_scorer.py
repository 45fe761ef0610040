"""A top-level scorer function, which any process can import."""

from __future__ import annotations


def nearness(completion: str, answer: str) -> float:
    return 1.0 if completion == answer else 0.1 * float(completion[:1] == answer[:1])
