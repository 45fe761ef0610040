"""NVIDIA's MPS for a job: kernels of executors that share a GPU run side by side, instead of in time slices.

The daemon is the job's own, in a folder that only its user can read, and ends with the job, however that ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from llamarl.builders.devices import generator_devices, trainer_devices
from llamarl.config import Config
from llamarl.engine.local.mps_process import PIPES, PROGRAM
from llamarl.errors import ConfigError, JobFailed
from llamarl.processes import PYTHON
from llamarl.weights.cuda_driver import mps_enabled

_END_S = 10.0


def uses_mps(config: Config, first_gpus: Mapping[str, int]) -> bool:
    """Whether the job starts a daemon. `auto`: where the program is, and generator and trainer compute on the same GPU at the
    same time."""
    if config.engine.mps == "auto":
        at_once = config.engine.kind == "local" and config.placement != "colocated"
        return at_once and bool(shared_gpus(config, first_gpus)) and shutil.which(PROGRAM) is not None
    return config.engine.mps == "on"


def shared_gpus(config: Config, first_gpus: Mapping[str, int]) -> list[str]:
    """GPUs on which both generator and trainer compute."""
    both = {*generator_devices(config, first_gpus)} & {*trainer_devices(config, first_gpus)}
    return sorted(str(device) for device in both if device.type == "cuda")


def describe_mps(config: Config, first_gpus: Mapping[str, int]) -> list[str]:
    """What the job says of `engine.mps` when it begins. ConfigError if it was asked for and cannot be had."""
    settings = config.engine
    if settings.mps == "on":
        if settings.kind != "local":
            raise ConfigError(f"engine.mps: cannot take effect with engine={settings.kind}")
        if not shared_gpus(config, first_gpus):
            raise ConfigError("engine.mps: generator and trainer share no GPU here; leave it off")
        if shutil.which(PROGRAM) is None:
            raise ConfigError(f"engine.mps: {PROGRAM}, a part of NVIDIA's driver, is not on the PATH")
    elif settings.mps == "off" or settings.kind != "local" or config.placement == "colocated":
        return []
    shared = ", ".join(shared_gpus(config, first_gpus))
    if not shared:
        return []
    if not uses_mps(config, first_gpus):
        return [f"generator and trainer share {shared} in time slices: {PROGRAM} is not on the PATH (engine.mps)"]
    return [f"generator and trainer share {shared} side by side, by NVIDIA's MPS (engine.mps)"]


class MpsDaemon:
    """A running daemon. `folder` is where its clients find it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start()

    def revive(self) -> None:
        """Start another one if this one has ended: executors would silently share in time slices."""
        if self._keeper.poll() is not None:
            self._start()

    def stop(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [*PYTHON, "-m", "llamarl.engine.local.mps_process"],
                stdin=subprocess.PIPE,  # closed by the kernel if this process is killed
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,  # not the terminal's group, to which Ctrl-C is sent
            )
        assert self._keeper.stdout is not None
        with self._keeper.stdout as told:
            self.folder = told.readline().decode().strip()
        if not self.folder:
            self.stop()
            raise JobFailed(f"engine.mps: {PROGRAM} did not start; see {self._log}")


def join_mps(folder: str) -> None:
    """In an executor's process, before CUDA starts: its kernels go through the daemon of that folder."""
    os.environ[PIPES] = folder


def check_joined() -> None:
    """In an executor's process: fails if CUDA runs without MPS, since the driver says nothing when it finds no daemon."""
    if torch.cuda.is_initialized() and mps_enabled(torch.cuda.current_device()) is False:  # type: ignore[no-untyped-call]
        raise RuntimeError("engine.mps: CUDA started without it; see logs/mps.log")
