"""Runs one episode at an environment server of verifiers, as an agent: ZMQ and msgpack, as its own client speaks.

The server's worker asks our endpoint for answers, with the key of the sample in its headers. What it tells of them is checked
against what the session has recorded; only the session is trained on.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from llamarl.errors import ConfigError
from llamarl.tasks.agents.calling import AgentFailed
from llamarl.tasks.agents.client import AgentClient
from llamarl.tasks.verifiers.episode import EpisodeReader, EpisodeResult
from llamarl.tasks.verifiers.program import TASK
from llamarl.tasks.workers.protocol import ServedEnvironment, Verdict
from llamarl.types import Problem

VERIFIERS = "verifiers"
_pack = msgspec.msgpack.Encoder().encode


def load_bridge(served: ServedEnvironment | None) -> EnvironmentBridge:
    """The agent that runs episodes. Raises ConfigError without the package that speaks to the server."""
    try:
        import zmq.asyncio
    except ImportError as error:
        raise ConfigError(f"agent.environment: verifiers needs pip install 'llamarl[verifiers]' ({error})") from None
    assert zmq.asyncio
    return EnvironmentBridge(served)


class EnvironmentBridge:
    """An agent: one call is one episode."""

    def __init__(self, served: ServedEnvironment | None) -> None:
        self._served = served

    async def __call__(self, problem: Problem, client: AgentClient) -> Verdict:
        import zmq
        import zmq.asyncio

        assert self._served is not None
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        run = uuid.uuid4().hex.encode()
        try:
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.connect(self._served.address)
            await socket.send_multipart([run, b"run", _pack(self._request(problem, client))])
            try:
                result = await _read(socket, monitor, run)
            except BaseException:
                await socket.send_multipart([uuid.uuid4().hex.encode(), b"cancel", _pack({"request_id": run.decode()})])
                raise
        finally:
            context.destroy(linger=100)
        return Verdict("ok", (result.reward,), parts=result.parts, claims=result.claims)

    def _request(self, problem: Problem, client: AgentClient) -> dict[str, Any]:
        assert self._served is not None
        endpoint = {
            "type": "train",
            "base_url": client.base_url,
            "api_key_var": "LLAMARL_NO_KEY",  # keys come from variables there; each sample's goes with its headers
            "headers": {"Authorization": f"Bearer {client.api_key}"},
            "renderer_model_name": self._served.tokenizer,
        }
        sampling = {"temperature": self._served.temperature, "max_tokens": self._served.max_new_tokens}
        return {"task_data": problem.columns[TASK], "client": endpoint, "model": client.model, "sampling": sampling}


async def _read(socket: Any, monitor: Any, run: bytes) -> EpisodeResult:
    """Frames until the reply. Raises AgentFailed when the server is gone: another one would not know the run."""
    import zmq
    import zmq.asyncio

    reader, poller = EpisodeReader(), zmq.asyncio.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while True:
        ready = dict(await poller.poll())
        if socket not in ready:
            raise AgentFailed("lost the environment server")
        frames = await socket.recv_multipart()
        if len(frames) != 3:
            raise AgentFailed(f"got {len(frames)} frames from the environment server in place of 3")
        if frames[0] == run and frames[1] == b"delta":
            reader.delta(frames[2])
        elif frames[0] == run:
            return reader.finish(frames[2])
