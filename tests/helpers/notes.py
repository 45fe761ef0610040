"""A display that records its notes."""

from __future__ import annotations


class Notes:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def progress(self, done: int, of: int) -> None:
        pass

    def update(self, snapshot: object) -> None:
        pass

    def note(self, text: str) -> None:
        self.seen.append(text)

    def close(self) -> None:
        pass
