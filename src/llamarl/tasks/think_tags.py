"""Removes the thought of reasoning models, <think>...</think>, from a completion."""

from __future__ import annotations


def without_thought(text: str) -> str:
    """Return the text after the last </think>, or nothing if the text begins with a thought that never ends."""
    _, ended, after = text.rpartition("</think>")
    if ended:
        return after
    return "" if text.lstrip().startswith("<think>") else text
