"""Runs one episode at an environment server of verifiers, as an agent: ZMQ and msgpack, as its own client speaks.

The server's worker asks our endpoint for answers, with the key of the sample in its headers. What it tells of them is checked
against what the session has recorded; only the session is trained on.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from llamarl.config import AgentConfig
from llamarl.errors import ConfigError
from llamarl.tasks.agents.calling import AgentFailed
from llamarl.tasks.agents.client import AgentClient
from llamarl.tasks.verifiers.episode import EpisodeReader
from llamarl.tasks.workers.protocol import ServedEnvironment, Verdict
from llamarl.types import Problem

VERIFIERS = "verifiers"
_PATIENCE_S = 60.0  # without any sign of life
_TASK = "task_data"
_pack = msgspec.msgpack.Encoder().encode


def load_bridge(settings: AgentConfig, served: ServedEnvironment | None) -> EnvironmentBridge:
    """The agent that runs episodes. Raises ConfigError without the package that speaks to the server."""
    try:
        import zmq.asyncio
    except ImportError as error:
        raise ConfigError(f"agent.environment: verifiers needs pip install 'llamarl[verifiers]' ({error})") from None
    assert zmq.asyncio
    return EnvironmentBridge(settings, served)


class EnvironmentBridge:
    """An agent: one call is one episode."""

    def __init__(self, settings: AgentConfig, served: ServedEnvironment | None) -> None:
        self._served, self._patience_s = served, min(_PATIENCE_S, settings.timeout_s / 4)

    async def __call__(self, problem: Problem, client: AgentClient) -> Verdict:
        import zmq
        import zmq.asyncio

        assert self._served is not None
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        run = uuid.uuid4().hex.encode()
        try:
            socket.connect(self._served.address)
            await socket.send_multipart([run, b"run", _pack(self._request(problem, client))])
            try:
                result = await self._read(socket, run)
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
        return {"task_data": problem.columns[_TASK], "client": endpoint, "model": client.model, "sampling": sampling}

    async def _read(self, socket: Any, run: bytes) -> Any:
        """Frames until the reply. A server that is silent is asked for a sign of life."""
        reader, heard_s = EpisodeReader(), time.monotonic()
        while True:
            if await socket.poll(self._patience_s * 250):
                frames = await socket.recv_multipart()
                heard_s = time.monotonic()
                if len(frames) != 3:
                    raise AgentFailed(f"got {len(frames)} frames from the environment server in place of 3")
                if frames[0] == run and frames[1] == b"delta":
                    reader.delta(frames[2])
                elif frames[0] == run:
                    return reader.finish(frames[2])
            elif time.monotonic() - heard_s > self._patience_s:
                raise AgentFailed(f"heard nothing from the environment server for {self._patience_s:g} s")
            else:
                await socket.send_multipart([uuid.uuid4().hex.encode(), b"health", _pack({})])
