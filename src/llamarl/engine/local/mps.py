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
from llamarl.controller.line import role_of
from llamarl.engine.local.mps_process import CONTROL, PIPES, PROGRAM, UP
from llamarl.engine.local.mps_products import SHARE
from llamarl.errors import ConfigError, JobFailed
from llamarl.processes import PYTHON
from llamarl.weights.cuda_driver import CudaRefused, device_uuids, mps_enabled

_END_S = 10.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEFAULT_PIPES = "/tmp/nvidia-mps"  # NVIDIA's own


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
    folder = os.environ.get(PIPES) or _DEFAULT_PIPES
    return folder if (Path(folder) / CONTROL).exists() else ""


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
    share = settings.mps_trainer_share
    if settings.mps == "off" or not _could_use(config, first_gpus):
        in_vain = (
            "engine.mps_trainer_share has no effect: generator and trainer do not compute on one GPU at the same time"
        )
        return [in_vain] if share < 1 else []
    if os.environ.get(SHARE):
        raise ConfigError(
            f"{SHARE}: is set, which keeps all executors to a part of each GPU, where CUDA may compute wrong products; unset "
            "it, and set engine.mps_trainer_share, whose products are tried"
        )
    shared = ", ".join(shared_gpus(config, first_gpus))
    limit = f", the trainer on {share:.0%} of its multiprocessors" if share < 1 else ""
    if folder := own_daemon():
        return [f"generator and trainer share {shared} by the MPS daemon of {folder} ({PIPES}){limit}"]
    if not uses_mps(config, first_gpus):
        in_vain = "; engine.mps_trainer_share has no effect" if share < 1 else ""
        return [
            f"generator and trainer share {shared} in time slices: {PROGRAM} is not on the PATH (engine.mps){in_vain}"
        ]
    return [f"generator and trainer share {shared} side by side, by NVIDIA's MPS (engine.mps){limit}"]


class MpsDaemon:
    """A running daemon, and the variables by which executors find it. JobFailed if it does not start."""

    def __init__(self, log: Path) -> None:
        self._log, self.folder = log, ""
        self._visible = _visible_by_name()
        self._start()

    @property
    def environment(self) -> dict[str, str]:
        return {PIPES: self.folder, **self._visible}

    def revive(self) -> None:
        """Start another one if this one has ended: executors would share in time slices."""
        if self._keeper.poll() is not None:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a keeper that was killed
            self._start()

    def stop(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._keeper.wait(_END_S)
        finally:
            if self._keeper.poll() is None:
                self._keeper.kill()
                self._keeper.wait()
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._keeper = subprocess.Popen(
                    [*PYTHON, "-m", "llamarl.engine.local.mps_process"],
                    stdin=subprocess.PIPE,  # closed by the kernel if this process is killed
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **self._visible},
                    process_group=0,  # not the terminal's group, to which Ctrl-C is sent
                )
        except OSError as error:
            raise JobFailed(f"engine.mps: {PROGRAM} did not start: {error}") from None
        assert self._keeper.stdout is not None
        try:
            with self._keeper.stdout as told:
                self.folder = told.readline().decode().strip()
                up = told.readline().decode().strip() == UP
        except BaseException:
            self.stop()
            raise
        if not up:
            self.stop()
            raise JobFailed(f"engine.mps: {PROGRAM} did not start; see {self._log}")


def _visible_by_name() -> dict[str, str]:
    """The devices that the user has chosen. Numbers would be taken for those among the daemon's own, which it counts anew;
    names, also of parts of a GPU (MIG), mean the same everywhere."""
    chosen = os.environ.get(_VISIBLE, "").split(",")
    if not any(one.strip().isdigit() for one in chosen):
        return {}
    try:
        return {_VISIBLE: ",".join(device_uuids())}
    except CudaRefused as error:
        raise JobFailed(f"engine.mps: {error}") from None


class JobMps:
    """The daemon of a job as its engine sees it. Where `auto` cannot have one, or not any more, a note says so, and executors
    share in time slices; where it was asked for, the job ends with the reason when it wants to start an executor."""

    def __init__(self, log: Path, *, required: bool, note: Callable[[str], None]) -> None:
        self._required, self._note = required, note
        self._daemon: MpsDaemon | None = None
        self._problem: JobFailed | None = None
        try:
            self._daemon = MpsDaemon(log)
        except JobFailed as error:
            self._give_up(error)

    def environment(self) -> dict[str, str]:
        """Variables for executors that start now, by which they find the daemon; empty without one."""
        if self._daemon is not None:
            try:
                self._daemon.revive()
            except JobFailed as error:
                self._give_up(error)
        if self._problem is not None:
            raise self._problem
        return self._daemon.environment if self._daemon is not None else {}

    def stop(self) -> None:
        if self._daemon is not None:
            self._daemon.stop()

    def _give_up(self, error: JobFailed) -> None:
        self._daemon = None
        if self._required:
            self._problem = error
        else:
            self._note(f"{error}; kernels share GPUs in time slices")


@contextmanager
def mps_of_job(
    config: Config, first_gpus: Mapping[str, int], log: Path, note: Callable[[str], None]
) -> Iterator[JobMps | None]:
    """Until the job ends; None if it needs no daemon of its own."""
    if not uses_mps(config, first_gpus):
        yield None
        return
    mps = JobMps(log, required=config.engine.mps == "on", note=note)
    try:
        yield mps
    finally:
        mps.stop()


def executor_variables(
    config: Config, first_gpus: Mapping[str, int], executor: str, daemon: Mapping[str, str]
) -> dict[str, str]:
    """What the process of an executor that starts now must have in its environment before CUDA starts: where the job's own
    daemon is (`daemon`; empty: there is none), and how much of a GPU the trainer may use beside the generator."""
    share = config.engine.mps_trainer_share
    if share == 1 or role_of(executor) != "trainer" or not expects_mps(config, first_gpus, daemon):
        return dict(daemon)
    return {**daemon, SHARE: str(round(100 * share))}


def expects_mps(config: Config, first_gpus: Mapping[str, int], given: Mapping[str, str]) -> bool:
    """Whether an executor should compute by a daemon, the job's (`given`) or the user's."""
    return bool(given) or (config.engine.mps != "off" and _could_use(config, first_gpus) and bool(own_daemon()))


def not_joined() -> str:
    """In an executor's process: what is wrong if CUDA runs without MPS, since the driver says nothing where it finds no
    daemon; empty if nothing is, or the driver is too old to tell."""
    if torch.cuda.is_initialized() and mps_enabled(torch.cuda.current_device()) is False:  # type: ignore[no-untyped-call]
        return f"engine.mps: CUDA started without it: the daemon of {own_daemon() or 'this job'} does not answer"
    return ""
