"""The agent: prompts in, completions out, written by agents of the user that talk to the policy over HTTP.

Every sample of a group has a session with a key of its own, and an agent in a worker process that has the key. What the
agent asks becomes a call, which the job's generators answer. When the agent has ended, its session is the sample: one
completion for each branch of its dialogue. An agent that plays several sides of a game has a session for each. An agent that
fails is tried again in a new session, then its group is dropped; it never counts as a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from llamarl.config import AgentConfig
from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import (
    AgentsCounted,
    CallAnswered,
    CallRefused,
    GroupRefused,
    GroupResult,
    Message,
    MustStop,
    Noted,
    Report,
    WorkOnGroup,
)
from llamarl.serve.claims import disagreement
from llamarl.serve.endpoint import SessionEndpoint
from llamarl.serve.sessions import Branch, TrainingSession, common_prompt, completion_of
from llamarl.tasks.agents.client import AgentClient
from llamarl.tasks.agents.runner import AgentRunner
from llamarl.tasks.failures import Counts, FailureLog, FailureShare, to_stderr
from llamarl.tasks.verifiers.server import EnvironmentServer
from llamarl.tasks.workers.protocol import Verdict
from llamarl.types import CompletionGroup, PromptGroup, Rollout, RolloutGroup, tokens_to_bytes

# The time that a new message may wait: an answer for an agent, or, with no call under way, a new group.
_CALL_S = 0.001
_SLICE_S = 0.005

Key = tuple[int, int, str]  # ordinal, sample, key of the session


class EndedPlayer(Struct, frozen=True):
    """What one player has written, and its reward. Most agents have one player, number 0."""

    number: int
    session: TrainingSession
    branches: tuple[Branch, ...]
    reward: float


class EndedSample(Struct, frozen=True):
    """A sample whose agent has come through."""

    players: tuple[EndedPlayer, ...]
    parts: dict[str, float]


@dataclass
class _Underway:
    """A group whose agents are at work."""

    prompt: PromptGroup
    keys: dict[int, str] = field(default_factory=dict)  # of the open sessions, by sample
    tries_left: dict[int, int] = field(default_factory=dict)
    ended: dict[int, EndedSample] = field(default_factory=dict)


class Agents:
    """Runs the agents of groups. The job stops when more than `agent.max_failure_share` of them fail."""

    def __init__(
        self,
        endpoint: SessionEndpoint,
        runner: AgentRunner,
        settings: AgentConfig,
        log: Callable[[str], None] = to_stderr,
        server: EnvironmentServer | None = None,
    ) -> None:
        """`server` runs environments of verifiers; while it is started again, samples are held back."""
        self._server = server
        self._held: list[tuple[_Underway, list[int]]] = []
        self._endpoint, self._runner, self._settings = endpoint, runner, settings
        self._underway: dict[int, _Underway] = {}
        self._failures, self._log = FailureShare(settings.max_failure_share), FailureLog(log)
        self._failed = Counts()

    @property
    def idle(self) -> bool:
        return not self._underway

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnGroup(group=PromptGroup() as group):
                self._begin(group)
            case CallAnswered():
                self._endpoint.backend.answer(message.number, message.completions)
            case CallRefused():
                self._endpoint.backend.refuse(message.number, message.reason)
            case _:
                raise UnexpectedMessage("agent", message)
        return self._endpoint.backend.take()

    def work(self) -> Iterable[Report]:
        reports: list[Report] = [*self._endpoint.backend.take()]
        wait_s = 0.0 if reports else _CALL_S if self._endpoint.backend.num_waiting else _SLICE_S
        for key, verdict in self._runner.collect(wait_s):
            reports += self._ended(cast(Key, key), verdict)
        reports += self._look_at_server()
        return [*reports, *self._endpoint.backend.take(), *self._tell_failures()]

    def _begin(self, group: PromptGroup) -> None:
        samples = range(group.sampling.samples)
        underway = _Underway(group, tries_left=dict.fromkeys(samples, self._settings.retries))
        self._underway[group.ordinal] = underway
        self._start(underway, samples)

    def _start(self, underway: _Underway, samples: Iterable[int]) -> None:
        """Open a session for each sample, and start the agents."""
        if self._server is not None and not self._server.is_up:
            self._held.append((underway, [*samples]))
            return
        prompt, access = underway.prompt, self._endpoint.access
        opened = {sample: access.open(prompt.ordinal, replace(prompt.sampling, samples=1)) for sample in samples}
        underway.keys |= opened
        model = self._endpoint.backend.name
        self._runner.start(
            [(prompt.ordinal, sample, key) for sample, key in opened.items()],
            prompt.problem,
            [AgentClient(self._endpoint.url, key, model) for key in opened.values()],
        )

    def _look_at_server(self) -> Iterable[Report]:
        """Start what was held back, and tell what happened to the environment server."""
        if self._server is None:
            return
        notes = self._server.take_notes()
        if notes:
            yield AgentsCounted(restarts=len(notes))
        for note in notes:
            if self._log.note(note, ""):
                yield Noted(note)
        if self._server.failure:
            yield MustStop(self._server.failure)
        if self._server.is_up:
            held, self._held = self._held, []
            for underway, samples in held:
                if self._underway.get(underway.prompt.ordinal) is underway:
                    self._start(underway, samples)

    def _ended(self, key: Key, verdict: Verdict) -> list[Report]:
        ordinal, sample, api_key = key
        underway = self._underway.get(ordinal)
        if underway is None or underway.keys.get(sample) != api_key:
            return []  # of a group that was given up
        sessions = self._endpoint.access.close(underway.keys.pop(sample))
        ended = self._sample(sessions, verdict)
        self._failures.note(failed=not isinstance(ended, EndedSample))
        if isinstance(ended, EndedSample):
            underway.ended[sample] = ended
            return self._finish(underway) if len(underway.ended) == underway.prompt.sampling.samples else []
        self._failed.add("timeout" if verdict.status == "timeout" else "error")
        notes: list[Report] = [Noted(ended)] if self._log.note(ended, verdict.trace) else []
        if underway.tries_left[sample]:
            underway.tries_left[sample] -= 1
            self._start(underway, [sample])
            return notes
        return [*notes, self._give_up(underway, ended)]

    def _sample(self, sessions: Mapping[int, TrainingSession], verdict: Verdict) -> EndedSample | str:
        """What an agent has made of its sessions, or why it failed."""
        if verdict.status != "ok":
            return f"agent {verdict.reason}" if verdict.status == "timeout" else verdict.reason
        for session in sessions.values():
            if session.problem:
                return f"agent {session.problem}"
        asked = {player: session for player, session in sessions.items() if session.counts.branches}
        if not asked:
            return "agent made no call that was answered"
        if verdict.claims is not None and (lie := disagreement(asked[min(asked)], verdict.claims)):
            return f"agent: the environment server {lie}"
        told = verdict.rewards[0] if verdict.rewards else None
        rewards = {player: told if one.reward is None else one.reward for player, one in asked.items()}
        if self._settings.reward == "scorer":
            if len(asked) > 1:
                return "agent played several sides, which agent.reward=scorer cannot judge; it must give rewards itself"
        elif None in rewards.values():
            return "agent gave no reward: return a number, print it in the last line, or send it to /rl/reward"
        players = [
            EndedPlayer(player, session, tuple(session.branches()), rewards[player] or 0.0)
            for player, session in asked.items()
        ]
        return EndedSample(tuple(players), verdict.parts)

    def _give_up(self, underway: _Underway, reason: str) -> Report:
        """Drop the group: a missing sample cannot be made up. Its other agents find their sessions ended."""
        del self._underway[underway.prompt.ordinal]
        for key in underway.keys.values():
            self._endpoint.access.close(key)
        return GroupRefused(underway.prompt.ordinal, reason)

    def _finish(self, underway: _Underway) -> list[Report]:
        del self._underway[underway.prompt.ordinal]
        samples = [underway.ended[sample] for sample in sorted(underway.ended)]
        counts = [player.session.counts for sample in samples for player in sample.players]
        told = AgentsCounted(
            sessions=len(counts),
            calls=sum(one.calls for one in counts),
            branches=sum(one.branches for one in counts),
            unmatched=sum(one.unmatched for one in counts),
        )
        return [GroupResult(make_group(underway.prompt, samples, scored=self._settings.reward == "agent")), told]

    def _tell_failures(self) -> Iterable[Report]:
        if not self._failed:
            return
        failed, self._failed = self._failed, Counts()
        yield AgentsCounted(failures=failed.failures, timeouts=failed.timeouts)
        if excess := self._failures.excess:
            yield MustStop(
                f"{excess[0]} of the last {excess[1]} agents failed; more than "
                f"agent.max_failure_share={self._settings.max_failure_share:g}; the last: {self._log.last}"
            )


def make_group(prompt: PromptGroup, samples: list[EndedSample], *, scored: bool) -> CompletionGroup | RolloutGroup:
    """The samples of a group as completions, one for each branch. Their prompt is what all of them begin with."""
    shared = common_prompt(branch for sample in samples for player in sample.players for branch in player.branches)
    asked = replace(prompt, prompt_tokens=tokens_to_bytes(shared))
    rollouts = [
        Rollout(completion_of(branch, len(shared), number, player.number), player.reward, parts=sample.parts)
        for number, sample in enumerate(samples)
        for player in sample.players
        for branch in player.branches
    ]
    if scored:
        return RolloutGroup(asked, tuple(rollouts))
    return CompletionGroup(asked, tuple(rollout.completion for rollout in rollouts))
