"""An environment of several turns, number guessing: `llamarl train examples/guess_number.yaml`.

The prompt `2 7=` says that the number is from 2 to 7. The first digit that the model writes is its guess. To a wrong one the
game says + (it is larger) or - (it is smaller), and an early right guess is worth more than a late one. These signs are all
that the model that ships with LlamaRL can read; for a model that chats, say it in words. docs/environments.md explains
environments.
"""

from __future__ import annotations


class GuessNumber:
    """One game. A new object is made for every sample."""

    def __init__(self, price: float = 0.1) -> None:
        self.price = price  # of every further guess

    def reset(self, answer: str) -> None:
        """`answer` is a column of the data. Nothing is returned: the game begins with the prompt as it is."""
        self.number, self.guesses = int(answer), 0

    def step(self, text: str) -> str | tuple[str | None, float]:
        """What the model reads next; no reply ends the game. The sum of the rewards is the reward of the sample."""
        self.guesses += 1
        guess = text.strip()[:1]
        if guess not in tuple("0123456789"):
            return None, -1.0
        if int(guess) == self.number:
            return None, 1.0 - self.price * (self.guesses - 1)
        return ("+" if int(guess) < self.number else "-"), 0.0
