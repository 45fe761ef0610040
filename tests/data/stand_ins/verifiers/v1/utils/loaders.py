"""Loads environments: `sums` has sums as its tasks, `old` has the interface of before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from verifiers.v1.configs.agent import AgentConfig


class Data:
    def __init__(self, row: dict[str, Any]) -> None:
        self._row = row

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return self._row


class SumTask:
    def __init__(self, number: int, prompt: str) -> None:
        self.data = Data({"idx": number, "prompt": prompt, "info": {"seed": number}})


class Sums:
    def __init__(self, *, one_prompt: bool) -> None:
        self._one_prompt = one_prompt

    def take(self, count: int) -> list[SumTask]:
        print("environments print what they like")
        prompts = [
            "1+1=" if self._one_prompt else f"{number % 9}+{number // 9 % 9}=" for number in range(min(count, 81))
        ]
        return [SumTask(number, prompt) for number, prompt in enumerate(prompts)]


class SumsEnvironment:
    def __init__(self, config: dict[str, Any]) -> None:
        self.taskset = Sums(one_prompt=config.get("one_prompt", False))


class SumsConfig:
    model_fields: ClassVar[dict[str, Any]] = {
        "player": SimpleNamespace(default=AgentConfig()),
        "id": SimpleNamespace(default=""),
    }


def import_taskset(name: str) -> Any:
    if name == "old":
        return SimpleNamespace(load_environment=dict)
    if name != "sums":
        raise ModuleNotFoundError(f"taskset {name!r} not found")
    return SimpleNamespace(__all__=["Sums"])


def taskset_class(name: str) -> type[Sums]:
    return Sums


def default_harness_id(name: str) -> str:
    return "bash"


def env_config_type(name: str, environment: str) -> type[SumsConfig]:
    return SumsConfig


def resolve_env_config(config: dict[str, Any]) -> dict[str, Any]:
    assert config["player"]["runtime"] == {"type": "subprocess"} and config["player"]["harness"] == {"id": "null"}
    assert "agent" not in config
    return config


def load_environment(config: dict[str, Any]) -> SumsEnvironment:
    return SumsEnvironment(config)
