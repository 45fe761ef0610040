"""Environments: what the model reads, how rewards add up, what is told to the model, and what is a failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import AgentConfig, Config
from llamarl.config.paths import with_absolute_paths
from llamarl.errors import ConfigError
from llamarl.tasks.agents.calling import AgentFailed
from llamarl.tasks.agents.client import TOO_LONG, AgentClient, AskRefused
from llamarl.tasks.agents.environment import load_environment
from llamarl.tasks.agents.runner import AgentRunner
from llamarl.types import Problem, Turn

GAMES = """
from typing import Literal

class Adds:
    def __init__(self, bonus=0.0):
        self.bonus, self.seen = bonus, []
    def reset(self, problem):
        return [{"role": "system", "content": "add"}, {"role": "user", "content": problem.prompt}]
    async def step(self, text):
        self.seen.append(text)
        return ("more", 0.25) if len(self.seen) < 3 else (None, 1 + self.bonus)

class Row:
    def reset(self, low, prompt, high=9):
        return f" from {low} to {high}"
    def step(self, messages):
        self.reward = len(messages)
        return "go on" if len(messages) < 4 else None

class Whole:
    def reset(self, **row):
        self.reward = float(sorted(row) == ["answer", "low", "prompt"])
    def step(self, text):
        return None

class Versus:
    players = 2
    def reset(self, problem):
        return {0: "you are white", 1: [{"role": "user", "content": "you are black"}]}
    def step(self, text, player):
        if text == "resign":
            return None, {player: -1, 1 - player: 1}
        if text == "again":
            return {player: "once more"}
        return f"they said {text}"

class Shop:
    '''Sells.'''
    def reset(self, problem):
        self.reward, self.done, self.closed = 0.0, False, False
    def buy(self, item: Literal["tea", "milk"], count: int = 1) -> dict:
        '''Buy something.

        Args:
            item: what to buy;
                one of two
            count (int): how many
        Returns:
            what is in the basket
        '''
        if count < 1:
            raise ValueError("count must be positive")
        if count > 99:
            raise RuntimeError("the shop burned down")
        self.reward += count
        return {"basket": [item] * count}
    async def leave(self) -> None:
        '''End.'''
        self.done = True
    def _helper(self):
        pass

class NoReward:
    def reset(self, problem): pass
    def step(self, text): return None

class BadReward(NoReward):
    def step(self, text): return None, float("inf")

class BadPlayer(NoReward):
    def step(self, text): return None, {3: 1.0}

class BadTuple(NoReward):
    def step(self, text): return 1, 2, 3, 4

class BadReply(NoReward):
    def step(self, text): return 7

class NoReset:
    def step(self, text): return None

class Nothing:
    def reset(self, problem): pass

class Untyped(Nothing):
    def go(self, where):
        '''Go.'''

class Silent(Nothing):
    def go(self, where: str): pass

class Odd(Nothing):
    def go(self, where: complex):
        '''Go.'''

class TwoWithTools(Shop):
    players = 2


function = print
"""
PROBLEM = Problem("4 ", "9", columns={"low": 2})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "games.py").write_text(GAMES)
    return tmp_path / "games.py"


class Model:
    """Answers with what the test says, in order, and keeps what it was asked and paid."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers, self.asked, self.paid = [*answers], list[Any](), dict[str, float]()

    def post(self, client: AgentClient, path: str, body: dict[str, Any]) -> Any:
        if path == "/rl/reward":
            self.paid[client.api_key] = body["reward"]
            return {}
        self.asked.append((client.api_key, json.loads(json.dumps(body["messages"])), body.get("tools")))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        message = answer if isinstance(answer, dict) else {"content": answer}
        return {"choices": [{"message": {"role": "assistant", **message}}]}


Play = Callable[..., tuple[dict[str, float], Model]]


@pytest.fixture
def play(file: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    def play(name: str, *answers: Any, problem: Problem = PROBLEM, **settings: Any) -> tuple[dict[str, float], Model]:
        model = Model(answers)

        def post(client: AgentClient, path: str, body: dict[str, Any]) -> Any:
            return model.post(client, path, body)

        monkeypatch.setattr(AgentClient, "_post", post)
        environment = load_environment(AgentConfig(environment=f"{file}:{name}", **settings))
        return asyncio.run(environment(problem, AgentClient("http://nowhere", "sk", "m"))), model

    return play


def contents(messages: list[dict[str, Any]]) -> list[str]:
    return [message.get("content", "") for message in messages]


def test_rewards_of_turns_add_up_and_the_dialogue_grows(play: Play) -> None:
    returned, model = play("Adds", "a", "b", "c", arguments={"bonus": 2.0})
    assert returned == {"reward": 0.25 + 0.25 + 3.0, "turns": 3.0}
    assert [contents(messages) for _, messages, _ in model.asked] == [
        ["add", "4 "],
        ["add", "4 ", "a", "more"],
        ["add", "4 ", "a", "more", "b", "more"],
    ]


def test_an_object_of_its_own_for_every_sample(play: Play) -> None:
    assert play("Adds", "a", "b", "c")[0] == play("Adds", "a", "b", "c")[0]


def test_reset_takes_columns_and_appends_its_text_to_the_prompt(play: Play) -> None:
    returned, model = play("Row", "a", "b")
    assert contents(model.asked[0][1]) == ["4  from 2 to 9"]
    assert returned == {"reward": 4.0, "turns": 2.0}
    assert play("Whole", "a")[0]["reward"] == 1.0
    chat = Problem("x", "", turns=(Turn("system", "s"), Turn("user", "u")), columns={"low": 0})
    assert contents(play("Row", "a", "b", problem=chat)[1].asked[0][1]) == ["s", "u from 0 to 9"]
    with pytest.raises(
        AgentFailed, match="reset needs 'low', which is no column of the data; there are: prompt, answer"
    ):
        play("Row", "a", problem=Problem("x", "y"))


def test_an_environment_ends_after_its_turns_and_where_the_dialogue_no_longer_fits(play: Play) -> None:
    assert play("Adds", "a", "b", max_turns=2)[0] == {"reward": 0.5, "turns": 2.0}
    too_long = AskRefused("too long", TOO_LONG)
    assert play("Adds", "a", too_long)[0] == {"reward": 0.25, "turns": 1.0, "cut_off": 1.0}
    with pytest.raises(AskRefused):
        play("Adds", too_long)  # the opening itself does not fit: nothing was sampled
    with pytest.raises(AskRefused):
        play("Adds", "a", AskRefused("no such path", 404))


def test_players_take_turns_in_dialogues_and_with_rewards_of_their_own(play: Play) -> None:
    returned, model = play("Versus", "e4", "again", "e5", "resign")
    assert (returned, model.paid) == ({"reward": -1.0, "turns": 4.0}, {"sk.1": 1.0})
    assert [(key, contents(messages)) for key, messages, _ in model.asked] == [
        ("sk", ["you are white"]),
        ("sk.1", ["you are black", "they said e4"]),
        ("sk.1", ["you are black", "they said e4", "again", "once more"]),
        ("sk", ["you are white", "e4", "they said e5"]),
    ]
    assert play("Versus", "resign")[1].paid == {}  # the second player has written nothing


def call(name: str, arguments: str, key: str = "1") -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_methods_are_tools(play: Play) -> None:
    calls = [call("buy", '{"item": "tea", "count": 2}', "1"), call("leave", "{}", "2")]
    returned, model = play("Shop", {"content": None, "tool_calls": calls})
    assert returned == {"reward": 2.0, "turns": 1.0}
    buy, leave = (tool["function"] for tool in model.asked[0][2])
    assert leave == {
        "name": "leave",
        "description": "End.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    }
    assert (buy["name"], buy["description"]) == ("buy", "Buy something.")
    assert buy["parameters"] == {
        "type": "object",
        "properties": {
            "item": {"enum": ["milk", "tea"], "description": "what to buy; one of two"},
            "count": {"type": "integer", "default": 1, "description": "how many"},
        },
        "required": ["item"],
    }


def test_wrong_calls_are_told_to_the_model(play: Play) -> None:
    wrong = [
        call("sell", "{}", "1"),
        call("buy", '{"item": "coal"}', "2"),
        call("buy", '{"item": "tea", "many": 1}', "3"),
        call("buy", "[]", "4"),
        call("buy", '{"item": "tea", "count": 0}', "5"),
        call("buy", '{"item": "tea"}', "6"),
    ]
    broken = '<tool_call>{"name": "buy"'
    returned, model = play("Shop", {"content": None, "tool_calls": wrong}, broken, "bye")
    assert returned == {"reward": 1.0, "turns": 3.0, "wrong_calls": 6.0}
    told = [message for message in model.asked[1][1] if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in told] == ["1", "2", "3", "4", "5", "6"]
    assert told[0]["content"] == "error: there is no tool 'sell'; there are: buy, leave"
    assert told[1]["content"].startswith("error: buy: Invalid enum value 'coal'")
    assert "unknown field `many`" in told[2]["content"] and "got `array`" in told[3]["content"]
    assert told[4]["content"] == "error: count must be positive"
    assert json.loads(told[5]["content"]) == {"basket": ["tea"]}
    assert model.asked[2][1][-1]["content"].startswith("error: that is no call of a tool")


def test_a_tool_that_crashes_is_a_failure_and_no_wrong_call(play: Play) -> None:
    with pytest.raises(RuntimeError, match="burned down"):
        play("Shop", {"content": None, "tool_calls": [call("buy", '{"item": "tea", "count": 100}')]})


def test_what_an_environment_gives_is_checked(play: Play) -> None:
    assert play("NoReward", "a")[0] == {"turns": 1.0}  # the executor tells that there is no reward
    for name, told in [
        ("BadReward", "gave inf as a reward"),
        ("BadPlayer", "named player 3; the class has players = 1"),
        ("BadTuple", "a tuple of 4"),
        ("BadReply", "gave 7; reset and step give text"),
    ]:
        with pytest.raises(AgentFailed, match=told):
            play(name, "a")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("function", "is not a class"),
        ("NoReset", "has no method reset"),
        ("Nothing", "has neither a method step nor public methods as tools"),
        ("Untyped", "the tool go has no type for 'where'"),
        ("Silent", "the tool go has no docstring"),
        ("Odd", "the tool go has an argument that JSON cannot give"),
        ("TwoWithTools", "has 2 players, who need a method step"),
        ("Missing", "has no function 'Missing'"),
    ],
)
def test_classes_that_are_no_environment_are_refused(file: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^agent\.environment: .*{told}"):
        load_environment(AgentConfig(environment=f"{file}:{name}"))


def test_settings_that_cannot_take_effect_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.arguments: .* unexpected keyword argument 'size'"):
        load_environment(AgentConfig(environment=f"{file}:Adds", arguments={"size": 3}))
    with pytest.raises(ConfigError, match=r"agent\.arguments: cannot take effect without"):
        AgentConfig(run="a.py:b", arguments={"size": 3})
    with pytest.raises(ConfigError, match=r"agent\.environment: cannot take effect beside"):
        AgentConfig(run="a.py:b", environment="a.py:B")
    with pytest.raises(ConfigError, match=r"agent\.environment: 'games' is neither FILE\.py:CLASS nor verifiers"):
        AgentConfig(environment="games")
    with pytest.raises(ConfigError, match=r"agent\.max_turns: is above agent\.max_calls=50"):
        AgentConfig(environment="a.py:B", max_turns=51)


def test_a_relative_file_is_found_when_the_run_is_resumed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in (AgentConfig(environment="games.py:Adds"), AgentConfig(run="games.py:run")):
        agent = with_absolute_paths(Config(agent=settings)).agent
        assert (agent.environment or agent.run).startswith(f"{tmp_path}/games.py:")


def test_workers_say_whether_there_are_tools_and_refuse_what_cannot_be_loaded(file: Path) -> None:
    for name, has_tools in (("Shop", True), ("Adds", False)):
        runner = AgentRunner(AgentConfig(environment=f"{file}:{name}", workers=1))
        try:
            runner.prepare()
            assert runner.has_tools is has_tools
        finally:
            runner.close()
    runner = AgentRunner(AgentConfig(environment=f"{file}:Nothing", workers=1))
    try:
        with pytest.raises(ConfigError, match="has neither a method step"):
            runner.prepare()
    finally:
        runner.close()
