"""A worker: loads its scorers or its tool once, then forks a child for every answer, so that no answer can affect the next.

Run as a program: `python -m llamarl.tasks.workers.worker FD PARENT`. The worker itself never reads a completion. The child
does, under limits, and sends one verdict over its own pipe. A late child is killed.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from llamarl.errors import LlamaRLError
from llamarl.io.frames import BadFrame, FrameReader, encode_frame
from llamarl.plugins import is_reference, load_function
from llamarl.processes import die_with_parent
from llamarl.tasks.agents.environment import Environment
from llamarl.tasks.agents.running import load_agent, run_agents
from llamarl.tasks.custom_scorers import Signature, call, rewards_in, signature_of
from llamarl.tasks.in_process_scorers import failure, timed
from llamarl.tasks.math.symbolic import load_equal
from llamarl.tasks.programs import load_examiner
from llamarl.tasks.tools.registry import Tool, load_tool
from llamarl.tasks.workers.confine import Refused, adopt_orphans, limit, seal
from llamarl.tasks.workers.protocol import (
    KILL_SHARE,
    AgentItem,
    Call,
    Inbox,
    Item,
    NotReady,
    Ready,
    Setup,
    Verdict,
    WorkRequest,
    decode_request,
    decode_setup,
    decode_verdict,
    encode,
    pack_text,
    send,
    unpack_text,
    unpack_turns,
)

_READ_BYTES = 1 << 16
_MAX_VERDICT_BYTES = 1 << 26
Scorer = Callable[..., Any]
_PLAIN = Signature()  # of the built-in scorers


def load_scorers(setup: Setup) -> dict[str, Scorer]:
    """Load the scorers that run in workers, by name."""
    return {name: _load(name, setup) for name in setup.scorers}


def _load(name: str, setup: Setup) -> Scorer:
    if name == "math":
        equal = load_equal()
        return lambda completion, answer, prompt: float(equal(answer, completion))
    if name == "regex":
        return _regex_scorer(setup.pattern)
    if name == "code":
        return load_examiner(setup.sandbox, share=setup.share_of_tests)
    if name == "llm_judge":
        from llamarl.tasks.llm_judge import load_llm_judge  # imports TLS and httpx, which no other worker needs

        return load_llm_judge(setup.llm)
    if name == "reasoning_gym":
        from llamarl.tasks.reasoning_gym import load_reasoning_gym_scorer  # imports much that no other worker needs

        return load_reasoning_gym_scorer(setup.answer_from)
    return load_function("reward.scorer", name)


def _regex_scorer(source: str) -> Scorer:
    """Whether the pattern is found. If it has a group, the first group of the last match must be the answer."""
    pattern = re.compile(source)

    def score(completion: str, answer: str, prompt: str) -> float:
        last = None
        for last in pattern.finditer(completion):  # noqa: B007, only the last match is needed
            pass
        if last is None or not pattern.groups:
            return float(last is not None)
        return float((last.group(1) or "").strip() == answer.strip())

    return score


class LoadedScorers(NamedTuple):
    """What a worker has loaded: scorers, a tool, or an agent."""

    scorers: dict[str, Scorer]
    tool: Tool | None
    signatures: dict[str, Signature]
    run_agents: Callable[[tuple[AgentItem, ...]], Verdict] | None = None
    has_tools: bool = False  # the agent is an environment that shows tools to the model


class Worker:
    """Judges each request in a child process of its own."""

    def __init__(self, setup: Setup, loaded: LoadedScorers, connection: socket.socket) -> None:
        self._setup, self._loaded, self._connection = setup, loaded, connection
        self._needs_io = bool(loaded.tool or loaded.run_agents) or any(map(_needs_io, setup.scorers))
        # The sandbox limits programs; the limit of this process must not be below the sandbox's.
        runs = "code" in setup.scorers or setup.conversation.tool == "python"
        self._memory_mb = max(setup.memory_mb, setup.sandbox.memory_mb if runs else 0)

    def judge(self, request: WorkRequest) -> Verdict:
        start_s = time.monotonic()
        _prepare_items(request.items, self._loaded.scorers)
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._connection.close()
            self._run_child(request, writing, parent)
        os.close(writing)
        message = _read_message(reading, start_s + KILL_SHARE * self._setup.timeout_s)
        os.close(reading)
        status, peak_mb = _kill(pid)
        return msgspec.structs.replace(
            self._verdict(message, status, request), seconds=time.monotonic() - start_s, peak_mb=peak_mb
        )

    def _verdict(self, message: bytes | None, status: int, request: WorkRequest) -> Verdict:
        if message is None:
            return Verdict("timeout", reason=f"took longer than {self._setup.timeout_s:g} s")
        with suppress(msgspec.MsgspecError):
            verdict = decode_verdict(message)
            several = request.num_verdicts
            whole = len(verdict.each) == several if several else len(verdict.rewards) == request.num_rewards
            if verdict.status != "ok" or whole:
                return verdict
        return Verdict("error", reason=f"its process ended without a verdict ({_describe(status)})")

    def _run_child(self, request: WorkRequest, writing: int, parent: int) -> None:
        """Everything that the child does; never returns."""
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setpgid(0, 0)
            die_with_parent(parent)
            limit(self._memory_mb, self._setup.timeout_s, on_top=self._needs_io)
            message = encode(_judge_request(request, self._loaded, self._setup.timeout_s))
            view = memoryview(encode_frame(message))
            while view:
                view = view[os.write(writing, view) :]
        finally:
            os._exit(0)


def _prepare_items(items: tuple[Item, ...], scorers: Mapping[str, Scorer]) -> None:
    """What a scorer does for a problem before it sees an answer (`prepare`, with the problem's columns): here, where all
    children find it. If it fails, the child fails the same way, and tells."""
    for item in items:
        ours = None if is_reference(item.scorer) else scorers.get(item.scorer)
        if prepare := getattr(ours, "prepare", None):
            with suppress(Exception):
                prepare(**json.loads(item.columns))


def _judge_request(request: WorkRequest, loaded: LoadedScorers, limit_s: float) -> Verdict:
    try:
        if loaded.run_agents and request.agents:
            return loaded.run_agents(request.agents)
        if loaded.tool and request.call:
            return _call_tool(loaded.tool, request.call)
        return _gather(request.items, loaded, limit_s) if request.gathered else Verdict("ok", _rewards(request, loaded))
    # The function may be the user's own; its failure is not a wrong answer.
    except (Exception, SystemExit, Refused) as error:
        return failure(error, "scorer" if loaded.tool is None else "tool")


def _call_tool(tool: Tool, call: Call) -> Verdict:
    reply = _awaited_if_needed(tool(unpack_text(call.text), unpack_turns(call.turns)))
    if reply is not None and not isinstance(reply, str):
        return Verdict("error", reason=f"tool gave {type(reply).__name__}; it must give text, or None at the end")
    return Verdict("ok", reply=None if reply is None else pack_text(reply))


def _gather(items: tuple[Item, ...], loaded: LoadedScorers, limit_s: float) -> Verdict:
    """Run the user's coroutines concurrently. Failures and time-outs do not affect the others: late coroutines are cancelled
    shortly before the process would be killed."""

    async def each() -> list[Verdict]:
        return await asyncio.gather(*(judge(item) for item in items))

    async def judge(item: Item) -> Verdict:
        signature = loaded.signatures[item.scorer]
        return await timed(lambda: _call(item, loaded), signature, len(item.completions), limit_s, KILL_SHARE**2)

    return Verdict("ok", each=tuple(asyncio.run(each())))


def _rewards(request: WorkRequest, loaded: LoadedScorers) -> tuple[float, ...]:
    """Run the user's functions and programs first: they may need files, a network or processes. The process gives these up
    before our own scorers start."""
    found = {index: _score(item, loaded) for index, item in enumerate(request.items) if _needs_io(item.scorer)}
    seal()
    found |= {index: _score(item, loaded) for index, item in enumerate(request.items) if index not in found}
    return tuple(reward for index in range(len(request.items)) for reward in found[index])


def _needs_io(scorer: str) -> bool:
    return is_reference(scorer) or scorer in ("code", "llm_judge", "reasoning_gym")


def _score(item: Item, loaded: LoadedScorers) -> tuple[float, ...]:
    return rewards_in(
        _awaited_if_needed(_call(item, loaded)), loaded.signatures.get(item.scorer, _PLAIN), len(item.completions)
    )


def _call(item: Item, loaded: LoadedScorers) -> Any:
    completions, answer, prompt = (
        [*map(unpack_text, item.completions)],
        unpack_text(item.answer),
        unpack_text(item.prompt),
    )
    signature = loaded.signatures.get(item.scorer, _PLAIN)
    return call(loaded.scorers[item.scorer], signature, completions, answer, prompt, json.loads(item.columns))


def _awaited_if_needed(value: Any) -> Any:
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _read_message(reading: int, deadline_s: float) -> bytes | None:
    """Return the child's message, empty bytes if it ended without one, or None if it is late."""
    reader, poll = FrameReader(_MAX_VERDICT_BYTES), select.poll()
    poll.register(reading, select.POLLIN)
    while (left_s := deadline_s - time.monotonic()) > 0 and poll.poll(left_s * 1000):
        data = os.read(reading, _READ_BYTES)
        try:
            arrived = reader.feed(data)
        except BadFrame:
            return b""
        if arrived or not data:
            return arrived[0] if arrived else b""
    return None


def _kill(pid: int) -> tuple[int, float]:
    """Kill the child and everything that it started. Returns its exit status and peak memory in MB."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    _kill_orphans()
    return status, usage.ru_maxrss / 1024


def _kill_orphans() -> None:
    """Kill processes that the child started and that left its group; as orphans they have become our children."""
    with suppress(ChildProcessError):
        while True:
            for stray in _children():
                with suppress(ProcessLookupError):
                    os.kill(stray, signal.SIGKILL)
            os.waitpid(-1, 0)


def _exit_with_orphans(number: int, frame: object) -> None:
    """On SIGTERM: the pool is gone, or has ended this worker. Kill what answers have started, then exit."""
    _kill_orphans()
    os._exit(0)


def _children() -> list[int]:
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
    return []


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _prepare(setup: Setup) -> LoadedScorers | NotReady:
    try:
        tool = load_tool(setup.conversation, setup.sandbox) if setup.conversation.tool else None
        scorers = load_scorers(setup)
        own = {
            name: signature_of(name, scorer)
            for name, scorer in scorers.items()
            if is_reference(name) or name == "reasoning_gym"
        }
        agent = load_agent(setup.agent, setup.served) if setup.agent else None
        agents = partial(run_agents, agent, settings=setup.agent) if agent else None
        loaded = LoadedScorers(scorers, tool, own, agents, has_tools=isinstance(agent, Environment) and agent.has_tools)
    except re.error as error:
        return NotReady(f"reward.pattern: {error}")
    except LlamaRLError as error:
        return NotReady(str(error))
    except (Exception, SystemExit) as error:  # importing the user's file may raise anything
        return NotReady(f"{error}" if isinstance(error, ImportError) else f"{type(error).__name__}: {error}")
    gc.collect()
    gc.freeze()
    gc.disable()  # in a short-lived child it would only copy shared pages
    return loaded


def main() -> None:
    fd, parent = map(int, sys.argv[1:])
    signal.signal(signal.SIGTERM, _exit_with_orphans)
    die_with_parent(parent, signal.SIGTERM)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parents
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=fd)
    inbox = Inbox(connection)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        setup = decode_setup(inbox.wait())
        loaded = _prepare(setup)
        if isinstance(loaded, NotReady):
            send(connection, loaded)
            return
        send(connection, Ready(loaded.signatures, loaded.has_tools))
        worker = Worker(setup, loaded, connection)
        while True:
            send(connection, worker.judge(decode_request(inbox.wait())))


if __name__ == "__main__":
    main()
