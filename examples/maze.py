"""A text maze, as an environment with tools and as one with a step: `llamarl train examples/maze.yaml`.

`Maze` is for models whose chat template takes tools: its typed, documented methods are what the model may call.
`MazeInDigits` is the same maze for the model that ships with LlamaRL, which only knows digits: it reads `01 22=` (where it is
and where the goal is, as row and column), and the first digit that it writes is a move by the keys of a number pad.
docs/environments.md explains environments.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Direction = Literal["north", "east", "south", "west"]
MOVES: dict[str, tuple[int, int]] = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}


class Maze:
    """`maze` has a line of text for each row; # is a wall. One object is one sample."""

    def reset(self, maze: list[str], start: list[int], goal: list[int], **row: Any) -> str:
        """Arguments are columns of the data. The text is appended to the prompt."""
        self.maze, self.place, self.goal = maze, tuple(start), tuple(goal)
        self.reward, self.done = 0.0, False
        return "\nFind the way to the goal. You see only what is next to you.\n" + self.look()

    def look(self) -> str:
        """Tell where you are, where the goal is, and which ways are open."""
        ways = ", ".join(way for way in MOVES if self._behind(way) is not None)
        return f"You are at row {self.place[0]}, column {self.place[1]}; the goal is at {self.goal}. Open: {ways or 'none'}."

    def move(self, direction: Direction) -> str:
        """Go one step.

        Args:
            direction: where to go; there must be no wall
        """
        place = self._behind(direction)
        if place is None:
            raise ValueError(f"there is a wall in the {direction}")  # told to the model
        self.reward += 0.1 * (self._distance(self.place) - self._distance(place))
        self.place = place
        if place == self.goal:
            self.reward, self.done = self.reward + 1.0, True
        return self.look()

    def _behind(self, direction: str) -> tuple[int, int] | None:
        """The next place in a direction; None for a wall or the edge."""
        row, column = (here + step for here, step in zip(self.place, MOVES[direction], strict=True))
        inside = 0 <= row < len(self.maze) and 0 <= column < len(self.maze[0])
        return (row, column) if inside and self.maze[row][column] != "#" else None

    def _distance(self, place: tuple[int, ...]) -> int:
        return sum(abs(here - there) for here, there in zip(place, self.goal, strict=True))


class MazeInDigits(Maze):
    """8 is north, 6 east, 2 south, 4 west. A class with `step` shows no tools."""

    KEYS: ClassVar = {"8": "north", "6": "east", "2": "south", "4": "west"}

    def reset(self, maze: list[str], start: list[int], goal: list[int], **row: Any) -> str:
        super().reset(maze, start, goal)
        return ""  # the prompt says it all

    def step(self, text: str) -> str | tuple[str | None, float]:
        """The reward of a turn, which the attribute `reward` is added to at the end. A useless turn costs something, but does
        not end the game: otherwise, giving up early would be worth more than trying."""
        direction = self.KEYS.get(text.strip()[:1])
        if direction is None:
            return self._places(), -0.2
        if self._behind(direction) is None:
            return self._places(), -0.1
        self.move(direction)  # type: ignore[arg-type]
        return self._places() if not self.done else (None, 0.0)

    def _places(self) -> str:
        return f"{self.place[0]}{self.place[1]} {self.goal[0]}{self.goal[1]}="
