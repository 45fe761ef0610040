"""NVIDIA's MPS for a job: kernels of executors that share a GPU run side by side, instead of in time slices.

The daemon is the job's own, in a folder that only its user can read, and ends with the job, however that ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from llamarl.builders.devices import generator_devices, trainer_devices
from llamarl.config import Config
from llamarl.engine.local.mps_process import CONTROL, PIPES, PROGRAM
from llamarl.errors import ConfigError, JobFailed
from llamarl.processes import PYTHON
from llamarl.weights.cuda_driver import device_uuids, mps_enabled

_END_S = 10.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def uses_mps(config: Config, first_gpus: Mapping[str, int]) -> bool:
    """Whether the job starts a daemon. `auto`: where the program is, and generator and trainer compute on the same GPU at the
    same time. One that the user has started is used as it is."""
    if own_daemon():
        return False
    if config.engine.mps == "auto":
        return _could_use(config, first_gpus) and shutil.which(PROGRAM) is not None
    return config.engine.mps == "on"


def own_daemon() -> str:
    """The folder of a daemon that the user has started and every process finds by itself; empty: none."""
    folder = os.environ.get(PIPES, "")
    return folder if folder and (Path(folder) / CONTROL).exists() else ""


def shared_gpus(config: Config, first_gpus: Mapping[str, int]) -> list[str]:
    """GPUs on which both generator and trainer compute."""
    sides = (generator_devices(config, first_gpus), trainer_devices(config, first_gpus))
    one, other = ({device.index or 0 for device in side if device.type == "cuda"} for side in sides)
    return [f"cuda:{number}" for number in sorted(one & other)]


def _could_use(config: Config, first_gpus: Mapping[str, int]) -> bool:
    at_once = config.engine.kind == "local" and config.placement != "colocated"
    return at_once and bool(shared_gpus(config, first_gpus))


def describe_mps(config: Config, first_gpus: Mapping[str, int]) -> list[str]:
    """What the job says of `engine.mps` when it begins. ConfigError if it was asked for and cannot be had."""
    settings = config.engine
    if settings.mps == "on":
        if settings.kind != "local":
            raise ConfigError(f"engine.mps: cannot take effect with engine={settings.kind}")
        if config.placement == "colocated":
            raise ConfigError("engine.mps: cannot take effect with placement=colocated, where roles take turns")
        if not shared_gpus(config, first_gpus):
            raise ConfigError("engine.mps: generator and trainer share no GPU here; leave it off")
        if shutil.which(PROGRAM) is None and not own_daemon():
            raise ConfigError(f"engine.mps: {PROGRAM}, a part of NVIDIA's driver, is not on the PATH")
    if settings.mps == "off" or not _could_use(config, first_gpus):
        return []
    shared = ", ".join(shared_gpus(config, first_gpus))
    if folder := own_daemon():
        return [f"generator and trainer share {shared} by the MPS daemon of {folder} ({PIPES})"]
    if not uses_mps(config, first_gpus):
        return [f"generator and trainer share {shared} in time slices: {PROGRAM} is not on the PATH (engine.mps)"]
    return [f"generator and trainer share {shared} side by side, by NVIDIA's MPS (engine.mps)"]


class MpsDaemon:
    """A running daemon, and the variables by which executors find it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        # Numbers of devices would be taken for those among the daemon's own, which it counts anew.
        self._visible = {_VISIBLE: ",".join(device_uuids())} if os.environ.get(_VISIBLE) else {}
        self._start()

    @property
    def environment(self) -> dict[str, str]:
        return {PIPES: self.folder, **self._visible}

    def revive(self) -> None:
        """Start another one if this one has ended: executors would share in time slices."""
        if self._keeper.poll() is not None:
            self._start()

    def stop(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self._keeper.wait(_END_S)
        if self._keeper.poll() is None:
            self._keeper.kill()
            self._keeper.wait()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [*PYTHON, "-m", "llamarl.engine.local.mps_process"],
                stdin=subprocess.PIPE,  # closed by the kernel if this process is killed
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._visible},
                process_group=0,  # not the terminal's group, to which Ctrl-C is sent
            )
        assert self._keeper.stdout is not None
        try:
            with self._keeper.stdout as told:
                self.folder = told.readline().decode().strip()
        except BaseException:
            self.stop()
            raise
        if not self.folder:
            self.stop()
            raise JobFailed(f"engine.mps: {PROGRAM} did not start; see {self._log}")


@contextmanager
def mps_daemon(
    config: Config, first_gpus: Mapping[str, int], log: Path, note: Callable[[str], None]
) -> Iterator[MpsDaemon | None]:
    """The daemon of a job, until it ends; None if it uses none. Where `auto` starts it in vain, a note says so."""
    daemon = None
    if uses_mps(config, first_gpus):
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            daemon = MpsDaemon(log)
        except JobFailed as error:
            if config.engine.mps == "on":
                raise
            note(f"{error}; kernels share GPUs in time slices")
    try:
        yield daemon
    finally:
        if daemon is not None:
            daemon.stop()


def not_joined() -> str:
    """In an executor's process: what is wrong if CUDA runs without MPS, since the driver says nothing where it finds no
    daemon; empty if nothing is, or the driver is too old to tell."""
    if torch.cuda.is_initialized() and mps_enabled(torch.cuda.current_device()) is False:  # type: ignore[no-untyped-call]
        return "engine.mps: CUDA started without it; see logs/mps.log"
    return ""
