"""Text of models and files on a terminal, where a control character could do anything."""

from __future__ import annotations


def printable(text: str, *, lines: bool = False) -> str:
    """The text with everything but plain characters escaped: control characters, and marks that reorder or hide text. With
    `lines`, line breaks stay."""
    kept = "\n" if lines else ""
    return "".join(char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text)
