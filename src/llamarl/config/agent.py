"""`agent`: agents of your own, which talk to the policy over HTTP and are trained through it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class AgentConfig(Section, frozen=True):
    """Agents that talk to the policy at a URL, one for each sample; see docs/agents.md."""

    run: Annotated[
        str,
        Meta(
            description="FILE.py:NAME of a function run(problem, client), or of a class whose objects have such a method; "
            "empty: no function"
        ),
    ] = ""
    command: Annotated[
        tuple[str, ...],
        Meta(
            description="program and arguments instead of a function; finds URL and key in OPENAI_BASE_URL and so on, "
            "and the problem as JSON on standard input"
        ),
    ] = ()
    environment: Annotated[
        str,
        Meta(
            description="FILE.py:CLASS of an environment instead, with reset and step, or reset and typed methods that "
            "become tools; verifiers: the one that task.env names; see docs/environments.md"
        ),
    ] = ""
    arguments: Annotated[dict[str, Any], Meta(description="environment: arguments of its class, such as {size: 5}")] = (
        field(default_factory=dict)
    )
    max_turns: Annotated[
        int,
        Meta(ge=1, le=100_000, description="environment: turns of the model, of all players together; then it ends"),
    ] = 10
    reward: Annotated[
        Literal["agent", "scorer"],
        Meta(
            description="agent: what the function returns, the last line of the command, or POST /rl/reward; scorer: "
            "reward.scorer judges what the model wrote last"
        ),
    ] = "agent"
    max_calls: Annotated[int, Meta(ge=1, le=100_000, description="model calls of one agent; one more fails it")] = 50
    workers: Annotated[
        int, Meta(ge=1, le=1024, description="processes per executor; each runs the agents of one group at a time")
    ] = 4
    replicas: Annotated[int, Meta(ge=1, le=1024, description="executors that run agents")] = 1
    timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="time limit of one agent, with all its model calls and their waiting")
    ] = 600.0
    memory_mb: Annotated[
        int, Meta(ge=0, description="memory of one process, beyond what the agent itself loads; 0: no limit")
    ] = 2048
    retries: Annotated[int, Meta(ge=0, le=10, description="retries of a failed agent, each in a new session")] = 1
    max_failure_share: Annotated[
        float,
        Meta(ge=0, le=1, description="the job stops when more than this share of the last 1,000 agents failed"),
    ] = 0.1

    def __post_init__(self) -> None:
        if sum(map(bool, (self.run, self.command, self.environment))) > 1:
            wrong, other = ("command", "run") if self.run and self.command else ("environment", "run or command")
            raise ConfigError(f"agent.{wrong}: cannot take effect beside agent.{other}; leave one of them out")
        if self.run and ":" not in self.run:
            raise ConfigError(f"agent.run: '{self.run}' is not FILE.py:NAME")
        if self.environment and ":" not in self.environment and self.environment != "verifiers":
            raise ConfigError(f"agent.environment: '{self.environment}' is neither FILE.py:CLASS nor verifiers")
        if self.arguments and (not self.environment or self.environment == "verifiers"):
            raise ConfigError("agent.arguments: cannot take effect without a class as agent.environment")
        if self.environment == "verifiers" and self.reward != "agent":
            raise ConfigError("agent.reward: environments of verifiers give their own rewards; leave it agent")
        if self.environment and self.max_turns > self.max_calls:
            raise ConfigError(f"agent.max_turns: is above agent.max_calls={self.max_calls}; raise that too")
        if self.command and not self.command[0]:
            raise ConfigError("agent.command: the program is empty")

    def __bool__(self) -> bool:
        """Whether agents sample the answers of the job."""
        return bool(self.run or self.command or self.environment)
