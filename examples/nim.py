"""A game of two players in which the policy plays both: `llamarl train examples/nim.yaml`.

There is one heap. In turn, each player takes 1, 2 or 3; who takes the last one wins. A player reads the size of the heap,
such as `7=`, and takes the first digit that it writes. Each player has a dialogue of its own, reads nothing else, and has its
own reward: it is compared with the same player in the other samples of the group. docs/environments.md explains environments.
"""

from __future__ import annotations


class Nim:
    """Players are numbered from 0. One object is one game."""

    players = 2

    def reset(self, heap: int) -> None:
        """`heap` is a column of the data. The first player begins with the prompt, which is its size."""
        self.heap = heap

    def step(self, text: str, player: int) -> tuple[str | None, dict[int, float]]:
        """The reply goes to the other player, whose turn it is then. Rewards are by player."""
        other = 1 - player
        taken = text.strip()[:1]
        if taken not in ("1", "2", "3") or int(taken) > self.heap:
            return None, {player: -1.0, other: 0.0}  # the other one has not won by playing well
        self.heap -= int(taken)
        if not self.heap:
            return None, {player: 1.0, other: -1.0}
        return f"{self.heap}=", {}
