"""A completion without the thought before its answer: <think>...</think>, as reasoning models write it."""

from __future__ import annotations


def without_thought(text: str) -> str:
    """What follows the last </think>; nothing where a thought begins the text and is never ended."""
    _, ended, after = text.rpartition("</think>")
    if ended:
        return after
    return "" if text.lstrip().startswith("<think>") else text
