"""Environments of the user: classes whose objects answer what the model writes, turn by turn. They run as agents do.

An object is made for every sample. Either its `step` reads what the model wrote and says what is next, or its typed methods
are tools that the model calls. Several players of one game have a dialogue, a session and a reward each.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from llamarl.config import AgentConfig
from llamarl.errors import ConfigError
from llamarl.plugins import load_function
from llamarl.tasks.agents.calling import AgentFailed, awaited, is_number
from llamarl.tasks.agents.client import TOO_LONG, AgentClient, AskRefused
from llamarl.tasks.agents.tool_methods import ToolMethods, looks_like_a_call
from llamarl.types import Problem

_KEY = "agent.environment"
_NOT_A_CALL = 'error: that is no call of a tool; write {"name": ..., "arguments": {...}} as JSON'
Messages = list[dict[str, Any]]


def load_environment(settings: AgentConfig) -> Environment:
    """The environment that the config names. Raises ConfigError if its class cannot be one."""
    reference = settings.environment
    made: Any = load_function(_KEY, reference)
    if not inspect.isclass(made):
        raise ConfigError(f"{_KEY}: {reference} is not a class")
    if not callable(getattr(made, "reset", None)):
        raise ConfigError(f"{_KEY}: the class {reference} has no method reset(problem)")
    try:
        inspect.signature(made).bind(**settings.arguments)
    except TypeError as error:
        raise ConfigError(f"agent.arguments: {reference} cannot be made with {settings.arguments}: {error}") from None
    except ValueError:
        pass  # no signature, as with some classes written in C
    has_step = callable(getattr(made, "step", None))
    tools = None if has_step else ToolMethods(made, reference)
    if tools is not None and not tools:
        raise ConfigError(f"{_KEY}: the class {reference} has neither a method step nor public methods as tools")
    players = getattr(made, "players", 1)
    if not isinstance(players, int) or not 1 <= players <= 100:
        raise ConfigError(f"{_KEY}: players of {reference} is {players!r}; it must be 1 to 100")
    if players > 1 and not has_step:
        raise ConfigError(f"{_KEY}: {reference} has {players} players, who need a method step(text, player)")
    return Environment(made, settings, tools, players)


class Environment:
    """Runs as an agent: plays the model against a new object of the user's class."""

    def __init__(self, made: type, settings: AgentConfig, tools: ToolMethods | None, players: int) -> None:
        self._made, self._settings, self._tools, self._players = made, settings, tools, players

    @property
    def has_tools(self) -> bool:
        return self._tools is not None

    async def __call__(self, problem: Problem, client: AgentClient) -> dict[str, float]:
        game = await awaited(self._made, **self._settings.arguments)
        try:
            episode = _Episode(game, client, self._players, self._settings.max_turns)
            await episode.open(problem)
            await (episode.play_with(self._tools) if self._tools is not None else episode.play())
            return await episode.settle()
        finally:
            if callable(close := getattr(game, "close", None)):
                await awaited(close)


class _Episode:
    """One sample: the object of the user's class, the dialogue of each player, and their rewards."""

    def __init__(self, game: Any, client: AgentClient, players: int, max_turns: int) -> None:
        self._game, self._max_turns = game, max_turns
        self._clients = [client.player(number) for number in range(players)]
        self._dialogues: list[Messages] = [[] for _ in range(players)]
        self._rewards: dict[int, float] = {}
        self._counts: dict[str, float] = {"turns": 0.0}
        self._next = 0

    async def open(self, problem: Problem) -> None:
        """Reset the game. What it returns begins the dialogue."""
        opening = await awaited(self._game.reset, **_asked_for(self._game.reset, problem))
        if opening is None or isinstance(opening, str):
            opening = _with(_messages_of(problem), opening or "")
        self._tell(opening, 0)

    async def play(self) -> None:
        """Turns until the game ends, with `step`."""
        names = inspect.signature(self._game.step).parameters
        while (said := await self._turn()) is not None:
            player, dialogue = self._next, self._dialogues[self._next]
            given: dict[str, Any] = {"player": player} if "player" in names else {}
            read = [dict(message) for message in dialogue] if "messages" in names else said.get("content") or ""
            result = StepResult.of(await awaited(self._game.step, read, **given), player, len(self._clients))
            self._pay(result.rewards)
            if result.ends:
                return
            self._tell(result.reply, (player + 1) % len(self._clients))

    async def play_with(self, tools: ToolMethods) -> None:
        """Turns until the model calls no tool any more, or the game says that it is done."""
        dialogue = self._dialogues[0]
        while (said := await self._turn(tools=tools.schemas)) is not None:
            calls = said.get("tool_calls") or ()
            if not calls and not looks_like_a_call(said.get("content") or ""):
                return
            if not calls:
                dialogue.append({"role": "user", "content": _NOT_A_CALL})
                self._count("wrong_calls")
            for call in calls:
                text, proper = await tools.call(self._game, call)
                dialogue.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                self._count("wrong_calls", not proper)
            if getattr(self._game, "done", False):
                return

    async def settle(self) -> dict[str, float]:
        """Give every player its reward. Returns the first one's, and what was counted."""
        final = getattr(self._game, "reward", None)
        self._pay(_rewards_in(await awaited(final) if callable(final) else final, 0, len(self._clients)))
        if not self._rewards:
            return self._counts
        for player, client in enumerate(self._clients[1:], start=1):
            if self._asked(player):
                await client.reward(self._rewards.get(player, 0.0))
        return {"reward": self._rewards.get(0, 0.0), **self._counts}

    async def _turn(self, **fields: Any) -> dict[str, Any] | None:
        """The next message of the player whose turn it is; None where the dialogue is too long, or has had all its turns."""
        if self._counts["turns"] >= self._max_turns:
            return None
        dialogue = self._dialogues[self._next]
        try:
            said = await self._clients[self._next].chat(dialogue, **fields)
        except AskRefused as error:
            if error.code != TOO_LONG or not self._asked(self._next):
                raise
            self._count("cut_off")
            return None
        self._count("turns")
        dialogue.append({key: said[key] for key in ("role", "content", "tool_calls") if said.get(key) is not None})
        return said

    def _asked(self, player: int) -> bool:
        return any(message["role"] == "assistant" for message in self._dialogues[player])

    def _tell(self, told: Any, player: int) -> None:
        """Append to dialogues. Of several players that are told something, the first one has the next turn."""
        each = told if _by_player(told) else {player: told}
        for number, words in each.items():
            _check_player(number, len(self._clients))
            self._dialogues[number] += _as_messages(words)
        self._next = next(iter(each))
        if not self._dialogues[self._next]:
            raise AgentFailed(f"gave no message to player {self._next}, whose turn it is")

    def _pay(self, rewards: Mapping[int, float]) -> None:
        for player, reward in rewards.items():
            self._rewards[player] = self._rewards.get(player, 0.0) + reward

    def _count(self, name: str, more: float = 1.0) -> None:
        if more:
            self._counts[name] = self._counts.get(name, 0.0) + more


class StepResult(Struct, frozen=True):
    """What `step` returned: a reply, rewards by player, and whether the game has ended."""

    reply: Any
    rewards: dict[int, float]
    ends: bool

    @classmethod
    def of(cls, returned: Any, player: int, players: int) -> StepResult:
        """A reply, or a tuple (reply, reward) or (reply, reward, done). A number is the reward of `player`."""
        if not isinstance(returned, tuple):
            return cls(returned, {}, returned is None)
        if len(returned) not in (2, 3):
            raise AgentFailed(
                f"gave a tuple of {len(returned)} from step; it must be (reply, reward) with or without done"
            )
        reply, reward, *done = returned
        return cls(reply, _rewards_in(reward, player, players), reply is None or bool(done and done[0]))


def _rewards_in(given: Any, player: int, players: int) -> dict[int, float]:
    if given is None:
        return {}
    each = given if isinstance(given, Mapping) else {player: given}
    for number, reward in each.items():
        _check_player(number, players)
        if not is_number(reward):
            raise AgentFailed(f"gave {reward!r:.50} as a reward; it must be a finite number")
    return {number: float(reward) for number, reward in each.items()}


def _check_player(number: Any, players: int) -> None:
    if not isinstance(number, int) or not 0 <= number < players:
        raise AgentFailed(f"named player {number!r:.50}; the class has players = {players}, counted from 0")


def _by_player(told: Any) -> bool:
    return isinstance(told, Mapping) and "role" not in told and bool(told)


def _as_messages(told: Any) -> Messages:
    """Text, one message or several, as messages; text is the user's."""
    if isinstance(told, str):
        return [{"role": "user", "content": told}]
    messages = [told] if isinstance(told, Mapping) else told
    if not isinstance(messages, Sequence) or not all(isinstance(one, Mapping) and "role" in one for one in messages):
        raise AgentFailed(f"gave {told!r:.80}; reset and step give text, messages, or either by player")
    return [dict(message) for message in messages]


def _messages_of(problem: Problem) -> Messages:
    turns = [{"role": turn.role, "content": turn.content} for turn in problem.turns]
    return turns or [{"role": "user", "content": problem.prompt}]


def _with(messages: Messages, more: str) -> Messages:
    """The messages, with text behind the last one."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": last["content"] + more}]


def _asked_for(reset: Any, problem: Problem) -> dict[str, Any]:
    """The arguments of `reset`: the problem, or what it names of the data row."""
    parameters = inspect.signature(reset).parameters
    if "problem" in parameters:
        return {"problem": problem}
    row = {**problem.columns, "prompt": problem.prompt, "answer": problem.answer}
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return row
    missing = [name for name, one in parameters.items() if one.default is one.empty and name not in row]
    if missing:
        raise AgentFailed(f"reset needs '{missing[0]}', which is no column of the data; there are: {', '.join(row)}")
    return {name: row[name] for name in parameters if name in row}
