"""How executors that train save their states: copied at once, written beside the next update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from llamarl.errors import ModelError
from llamarl.messages import Report, SaveState, StateNotSaved, StateSaved
from llamarl.train.exchange import Exchange
from llamarl.train.mesh import TrainerMesh
from llamarl.train.state import TrainingState

_LOOK_AGAIN_S = 0.005  # the time that one call of `work` waits for a snapshot that is being written


class StateSaver:
    """The states of one executor, which are one part of a snapshot. Only the first, the policy, is saved of version
    `policy_only_at`, and nothing if there is no policy here."""

    def __init__(
        self, states: Sequence[TrainingState], mesh: TrainerMesh, *, policy_only_at: int | None = None
    ) -> None:
        self._states, self._policy_only_at = states, policy_only_at
        self._exchange = Exchange(mesh)
        self._pool = ThreadPoolExecutor(1)
        self._saving: tuple[int, Future[dict[str, str]]] | None = None

    @property
    def idle(self) -> bool:
        return self._saving is None

    def begin(self, message: SaveState) -> None:
        """Copy, then write in a thread: the next update waits for the copy only."""
        if self._saving is not None:
            wait([self._saving[1]])  # the controller has given this attempt up
        policy_only = message.version == self._policy_only_at
        states = [one for one in self._states if one.is_policy or not policy_only]
        for state in states:
            state.take(policy_only=policy_only)
        self._saving = (message.version, self._pool.submit(_write, states, Path(message.folder)))

    def work(self) -> Iterable[Report]:
        """Ranks call this together. The snapshot is saved when the last rank has written its part."""
        if self._saving is None:
            return
        version, written = self._saving
        wait([written], timeout=_LOOK_AGAIN_S)
        if not self._exchange.all_true(written.done()):
            return
        self._saving = None
        files, problem = self._exchange.merge(*_result(written))
        yield StateNotSaved(version, problem) if problem else StateSaved(version, files)


def _write(states: Sequence[TrainingState], folder: Path) -> dict[str, str]:
    return {name: digest for state in states for name, digest in state.write(folder).items()}


def _result(written: Future[dict[str, str]]) -> tuple[dict[str, str], str]:
    """The files and their hashes, or the reason why there are none: a full disk stops nothing but the snapshot."""
    try:
        return written.result(), ""
    except (OSError, ModelError) as error:
        return {}, str(error)
