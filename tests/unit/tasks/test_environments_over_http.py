"""Environments against a real endpoint with training sessions: what was sampled is trained, exactly and once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from helpers.serving import ScriptedBackend, chat_tokenizer, served

from llamarl.config import AgentConfig
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.backend import Ask, Piece
from llamarl.serve.session_access import SessionAccess
from llamarl.serve.sessions import TrainingSession
from llamarl.tasks.agents.client import AgentClient
from llamarl.tasks.agents.environment import load_environment
from llamarl.types import Problem, Sampling

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")
ROOT = Path(__file__).parents[3]
MAZE = Problem("Go!", "", columns={"maze": ["..", "#."], "start": [0, 0], "goal": [1, 1]})


class OneAfterTheOther(ScriptedBackend):
    """Says its texts in order, one for each request."""

    async def ask(self, ask: Ask) -> AsyncIterator[Piece]:
        self.asked.append(ask)
        for piece in self._pieces(ask, 0, self.said.pop(0) or ""):
            yield piece


def play(
    tokenizer: Tokenizer, said: list[str], settings: AgentConfig, problem: Problem, *, max_positions: int = 9000
) -> tuple[dict[str, float], dict[int, TrainingSession]]:
    access = SessionAccess(tokenizer, max_calls=50)
    key = access.open(0, Sampling())
    backend = OneAfterTheOther(tokenizer, said, max_positions=max_positions)
    with served(backend, access=access) as client:
        agent = AgentClient(str(client.base_url).rstrip("/"), key, "m")
        returned = asyncio.run(load_environment(settings)(problem, agent))
    return returned, access.close(key)


def test_tools_are_called_over_http_and_the_dialogue_stays_one_branch(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    said = [
        'Hm. <tool_call>{"name": "look", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "move", "arguments": {"direction": "south"}}</tool_call>',
        '<tool_call>{"name": "move", "arguments": {"direction": "up"}}</tool_call>',
        '<tool_call>{"name": "move"',
        '<tool_call>{"name": "move", "arguments": {"direction": "east"}}</tool_call>\n'
        '<tool_call>{"name": "move", "arguments": {"direction": "south"}}</tool_call>',
    ]
    settings = AgentConfig(environment=f"{ROOT / 'examples' / 'maze.py'}:Maze")
    returned, sessions = play(tokenizer, list(said), settings, MAZE)
    assert returned == {"reward": pytest.approx(1.2), "turns": 5.0, "wrong_calls": 3.0}
    (session,) = sessions.values()
    assert session.counts.unmatched == 0
    (branch,) = session.branches()
    assert [tokenizer.decode(list(turn.tokens)) for turn in branch.trained] == said
    text = tokenizer.decode(list(branch.tokens))
    assert "error: there is a wall in the south" in text and "Invalid enum value 'up'" in text
    assert "that is no call of a tool" in text and "where to go; there must be no wall" in text


def test_players_over_http_have_sessions_of_their_own(tmp_path: Path) -> None:
    settings = AgentConfig(environment=f"{ROOT / 'examples' / 'nim.py'}:Nim")
    nim = Problem("5=", "", columns={"heap": 5})
    returned, sessions = play(chat_tokenizer(tmp_path), ["1", "2", "1", "1"], settings, nim)
    assert returned == {"reward": -1.0, "turns": 4.0}
    trained = [[len(branch.trained) for branch in one.branches()] for one in sessions.values()]
    assert (trained, [one.reward for one in sessions.values()]) == ([[2], [2]], [None, 1.0])


def test_a_dialogue_that_no_longer_fits_ends_with_what_it_has(tmp_path: Path) -> None:
    settings = AgentConfig(environment=f"{ROOT / 'examples' / 'guess_number.py'}:GuessNumber")
    tokenizer = chat_tokenizer(tmp_path)
    returned, sessions = play(tokenizer, ["1"] * 9, settings, Problem("0 9=", "7"), max_positions=100)
    assert returned["cut_off"] == 1.0 and returned["reward"] == 0.0
    (branch,) = sessions[0].branches()
    assert returned["turns"] == len(branch.trained) > 1
