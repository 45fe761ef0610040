"""The MPS daemon of a job, played by a script: it starts, ends with the job however that ends, and what is wrong is told."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.engine.local import child, mps, mps_products
from llamarl.engine.local.engine import LocalEngine
from llamarl.engine.local.mps import (
    JobMps,
    MpsDaemon,
    describe_mps,
    executor_variables,
    expects_mps,
    mps_of_job,
    uses_mps,
)
from llamarl.engine.local.mps_process import PROGRAM
from llamarl.engine.local.mps_products import first_wrong, wrong_products
from llamarl.engine.local.protocol import ForkRank, decode_order
from llamarl.errors import ConfigError, JobFailed
from llamarl.model_spec import SHAPES

DAEMON = 'echo "$$" > "$PID_FILE"; touch "$CUDA_MPS_PIPE_DIRECTORY/control"; exec sleep 100'


@pytest.fixture
def daemon_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A daemon on the PATH; the file that it writes its process number to."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    write_program(tmp_path, DAEMON)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    monkeypatch.setattr(mps, "_DEFAULT_PIPES", str(tmp_path / "none"))  # whatever runs on this machine
    yield tmp_path / "pid"


def write_program(folder: Path, body: str) -> None:
    program = folder / "bin" / PROGRAM
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def is_gone(pid: int) -> bool:
    """Within five seconds. A zombie is gone too."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_it_ends_with_its_folder(daemon_pid: Path, tmp_path: Path) -> None:
    daemon = MpsDaemon(tmp_path / "mps.log")
    folder, pid = Path(daemon.folder), int(daemon_pid.read_text())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "control").exists()
    daemon.stop()
    assert is_gone(pid)
    assert not any((tmp_path / "tmp").iterdir())


def test_its_server_has_ended_too(daemon_pid: Path, tmp_path: Path) -> None:
    server = '(sleep 1; touch "$PID_FILE.ended") < /dev/null > /dev/null 2>&1 &\n'
    write_program(tmp_path, f"{server}{DAEMON}")
    daemon = MpsDaemon(tmp_path / "mps.log")
    ended = tmp_path / "pid.ended"
    assert not ended.exists()
    daemon.stop()
    assert ended.exists()


def test_it_ends_when_the_job_is_killed(daemon_pid: Path, tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from llamarl.engine.local.mps import MpsDaemon\n"
    code += "daemon = MpsDaemon(Path(sys.argv[1])); print('up', flush=True); time.sleep(100)"
    command = [sys.executable, "-c", code, str(tmp_path / "mps.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGKILL)
    assert is_gone(int(daemon_pid.read_text()))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any((tmp_path / "tmp").iterdir()):
        time.sleep(0.1)
    assert not any((tmp_path / "tmp").iterdir())


def test_one_that_died_is_started_again(daemon_pid: Path, tmp_path: Path) -> None:
    daemon = MpsDaemon(tmp_path / "mps.log")
    first, pid = daemon.folder, int(daemon_pid.read_text())
    daemon.revive()
    assert daemon.folder == first
    os.kill(pid, signal.SIGKILL)
    daemon._keeper.wait(5)
    daemon.revive()
    assert daemon.folder != first and int(daemon_pid.read_text()) != pid
    daemon.stop()
    assert not any((tmp_path / "tmp").iterdir())


def test_one_that_does_not_start_is_told(daemon_pid: Path, tmp_path: Path) -> None:
    write_program(tmp_path, "echo 'no GPU is here' >&2; exit 1")
    with pytest.raises(JobFailed, match=r"engine.mps: nvidia-cuda-mps-control did not start; see .*mps.log"):
        MpsDaemon(tmp_path / "mps.log")
    assert "no GPU is here" in (tmp_path / "mps.log").read_text()
    assert not any((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("chosen", ["MIG-1f-2", "GPU-a,GPU-b"])
def test_names_of_devices_stay_as_they_are(
    chosen: str, daemon_pid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "device_uuids", lambda: pytest.fail("asked for names"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    daemon = MpsDaemon(tmp_path / "mps.log")
    assert daemon.environment == {"CUDA_MPS_PIPE_DIRECTORY": daemon.folder}
    daemon.stop()


def test_where_auto_starts_it_in_vain_a_note_says_so(daemon_pid: Path, tmp_path: Path, one_gpu: None) -> None:
    write_program(tmp_path, "exit 1")
    noted: list[str] = []
    log = tmp_path / "logs" / "mps.log"
    with mps_of_job(load_config(None, ["engine.mps=auto"]), GPU_OF_BOTH, log, noted.append) as daemon:
        assert daemon is not None and daemon.environment() == {}
    assert "did not start" in noted[0] and "in time slices" in noted[0]
    with (
        mps_of_job(load_config(None, ["engine.mps=on"]), GPU_OF_BOTH, log, noted.append) as daemon,
        pytest.raises(JobFailed),
    ):
        assert daemon is not None and daemon.environment()


@pytest.mark.parametrize("required", [False, True])
def test_one_that_cannot_be_started_again_ends_only_a_job_that_asked_for_it(
    required: bool, daemon_pid: Path, tmp_path: Path
) -> None:
    noted: list[str] = []
    daemon = JobMps(tmp_path / "mps.log", required=required, note=noted.append)
    assert Path(daemon.environment()["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    write_program(tmp_path, "exit 1")
    os.kill(int(daemon_pid.read_text()), signal.SIGKILL)
    assert daemon._daemon is not None
    daemon._daemon._keeper.wait(5)
    for _ in range(2):
        with pytest.raises(JobFailed, match="did not start") if required else nullcontext():
            assert daemon.environment() == {}
    assert [note.partition("; kernels")[2] for note in noted] == ([] if required else [" share GPUs in time slices"])
    daemon.stop()
    assert not any((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("required", [False, True])
def test_a_full_disk_is_told_in_one_line(required: bool, daemon_pid: Path, tmp_path: Path) -> None:
    noted: list[str] = []
    (tmp_path / "no-folder").touch()
    daemon = JobMps(tmp_path / "no-folder" / "mps.log", required=required, note=noted.append)
    with pytest.raises(JobFailed, match="no-folder") if required else nullcontext():
        assert daemon.environment() == {}
    assert len(noted) == (not required)


def test_a_job_that_waits_for_its_start_ends_it_at_once(daemon_pid: Path, tmp_path: Path) -> None:
    write_program(tmp_path, 'echo "$$" > "$PID_FILE"; exec sleep 100')
    code = "import signal, sys; from pathlib import Path; from llamarl.engine.local.mps import MpsDaemon\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
    code += "MpsDaemon(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "mps.log")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as job:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (daemon_pid.exists() and daemon_pid.read_text().strip()):
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        job.wait(8)  # its keeper would wait 20 s for the daemon, and is killed after 10
    assert is_gone(int(daemon_pid.read_text()))
    assert not any((tmp_path / "tmp").iterdir())


def test_nothing_stays_of_a_keeper_that_was_killed(daemon_pid: Path, tmp_path: Path) -> None:
    daemon = MpsDaemon(tmp_path / "mps.log")
    first = Path(daemon.folder)
    daemon._keeper.kill()
    daemon._keeper.wait(5)
    assert first.exists()
    daemon.revive()
    assert not first.exists()
    daemon._keeper.kill()
    daemon.stop()
    assert not any((tmp_path / "tmp").iterdir())


@pytest.mark.usefixtures("one_gpu")
def test_a_job_whose_daemon_does_not_start_is_recorded_and_resumed(
    daemon_pid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path, "exit 1")
    monkeypatch.setattr(mps, "uses_mps", lambda config, gpus: config.engine.mps == "on")
    monkeypatch.setattr("llamarl.jobs.prepare.describe_mps", lambda config, gpus: [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    brief = ["schedule.updates=1", "schedule.groups_per_update=2", "evaluate.prompts=0"]
    with pytest.raises(JobFailed, match="did not start"):
        Job(load_config(None, [*brief, "engine.mps=on"])).run(tmp_path / "run")
    assert "did not start" in json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"]
    resumed = Job.resume(tmp_path / "run", config=load_config(None, [*brief, "engine.mps=off"]))
    assert resumed.updates == 1


def test_devices_that_were_chosen_are_told_by_name(
    daemon_pid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon counts its devices anew, so that numbers would mean others to its clients."""
    write_program(tmp_path, f'echo "$CUDA_VISIBLE_DEVICES" > {tmp_path}/seen; {DAEMON}')
    monkeypatch.setattr(mps, "device_uuids", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    daemon = MpsDaemon(tmp_path / "mps.log")
    assert daemon.environment == {"CUDA_MPS_PIPE_DIRECTORY": daemon.folder, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert (tmp_path / "seen").read_text() == "GPU-a,GPU-b\n"
    daemon.stop()


@pytest.mark.usefixtures("daemon_pid", "one_gpu")
def test_one_that_the_user_has_started_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    config = load_config(None, ["engine.mps=auto"])
    assert uses_mps(config, GPU_OF_BOTH)
    (tmp_path / "control").touch()
    assert not uses_mps(config, GPU_OF_BOTH)
    assert f"the MPS daemon of {tmp_path}" in describe_mps(config, GPU_OF_BOTH)[0]


@pytest.mark.usefixtures("daemon_pid", "one_gpu")
def test_one_at_nvidia_s_own_place_is_found_without_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(mps, "_DEFAULT_PIPES", str(tmp_path))
    assert uses_mps(load_config(None, ["engine.mps=on"]), GPU_OF_BOTH)
    (tmp_path / "control").touch()
    assert not uses_mps(load_config(None, ["engine.mps=on"]), GPU_OF_BOTH)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("setting", "given", "users", "expected"),
    [
        ("on", {}, True, True),  # whether it answers is for the driver to say
        ("auto", {}, True, True),
        ("off", {}, True, False),
        ("auto", {}, False, False),
        ("on", {"CUDA_MPS_PIPE_DIRECTORY": "/gone"}, False, True),
    ],
)
def test_executors_ask_the_driver_wherever_a_daemon_should_be(
    setting: str, given: dict[str, str], users: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if users:
        (tmp_path / "control").touch()
    assert expects_mps(load_config(None, [f"engine.mps={setting}"]), GPU_OF_BOTH, given) == expected


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("settings", "daemon", "users", "limited"),
    [
        (["engine.mps=auto"], True, False, True),
        (["engine.mps=auto"], False, True, True),
        (["engine.mps=auto"], False, False, False),  # in time slices, where it would mean nothing
        (["engine.mps=auto", "generator.device=cpu"], False, True, False),  # a GPU of its own
        (["engine.mps=auto", "placement=colocated", "schedule.max_staleness=0"], False, True, False),
        (["engine.mps=auto", "engine=inline"], False, True, False),
    ],
)
def test_only_a_trainer_beside_a_generator_has_a_share_of_the_gpu(
    settings: list[str], daemon: bool, users: bool, limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if users:
        (tmp_path / "control").touch()
    config, given = load_config(None, [*settings, "engine.mps_trainer_share=0.45"]), {"A": "b"} if daemon else {}
    whole = load_config(None, settings)
    share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "45"} if limited else {}
    assert executor_variables(config, GPU_OF_BOTH, "trainer/0", given) == {**given, **share}
    assert executor_variables(config, GPU_OF_BOTH, "generator/0", given) == given
    assert executor_variables(whole, GPU_OF_BOTH, "trainer/0", given) == given
    if not daemon:
        (told,) = describe_mps(config, GPU_OF_BOTH)
        assert ("the trainer on 45% of its multiprocessors" if limited else "has no effect") in told


@pytest.mark.usefixtures("one_gpu", "daemon_pid")
def test_a_share_of_all_executors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40")
    with pytest.raises(ConfigError, match=r"is set, which keeps all executors to a part"):
        describe_mps(load_config(None, ["engine.mps=on"]), GPU_OF_BOTH)
    assert describe_mps(load_config(None, []), GPU_OF_BOTH) == [], "without MPS it means nothing"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([], "cannot take effect with engine.mps=off; set it to auto or on"),
        (["engine.mps=on", "trainer.data=2"], "one rank"),
        (["engine.mps=on", "trainer.dtype=float16"], "bfloat16"),
        (["engine.mps=on", "model.lora.rank=8"], "without LoRA"),
        (["engine.mps=on", "algo.advantage=gae"], "critic"),
    ],
)
def test_a_share_whose_products_cannot_be_tried_is_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.mps_trainer_share: .*{reason}"):
        load_config(None, [*settings, "engine.mps_trainer_share=0.5"])


class Recorder:
    """The control socket of a fork server, which hears no order."""

    def __init__(self) -> None:
        self.orders: dict[str, ForkRank] = {}

    def sendmsg(self, buffers: list[bytes], rights: object) -> None:
        order = decode_order(buffers[0])
        assert isinstance(order, ForkRank)
        self.orders[order.executor] = order


@pytest.fixture
def orders(daemon_pid: Path, one_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ForkRank]:
    """What the fork server is told of a job whose trainer has half of the GPU."""
    config = load_config(None, ["engine.mps=on", "engine.mps_trainer_share=0.5"])
    line, daemon = default_line(config), JobMps(tmp_path / "mps.log", required=True, note=pytest.fail)
    builders = {role.name: "module:function" for role in line.roles}
    engine, recorder = LocalEngine(config, line, builders, {}, tmp_path / "logs", daemon), Recorder()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_control", recorder)
            patch.setattr(engine, "_fork_server_ready", True)
            for executor in ("generator/0", "trainer/0"):
                engine.spawn(executor, 0, None)
    finally:
        engine.stop()
        daemon.stop()
    return recorder.orders


def test_the_trainer_is_forked_with_its_share(orders: dict[str, ForkRank]) -> None:
    generator, trainer = (orders[name].variables for name in ("generator/0", "trainer/0"))
    assert generator.keys() == {"CUDA_MPS_PIPE_DIRECTORY"}
    assert trainer == {**generator, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}


def test_a_trainer_whose_products_are_wrong_is_not_built(
    orders: dict[str, ForkRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not started again: it would fail again."""
    monkeypatch.setattr(child, "wrong_products", lambda config, device: f"wrong on {device}")
    ours, _theirs = socket.socketpair()
    with pytest.raises(ConfigError, match="wrong on cuda:0"):
        child._build(orders["trainer/0"], {}, child.SocketConnection(ours, 1.0))
    with pytest.raises(ConfigError, match="'module:function' is neither"):  # the generator is to be built
        child._build(orders["generator/0"], {}, child.SocketConnection(ours, 1.0))


@pytest.fixture
def wrong_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bf16 leave out some of what they sum, in one of their tiles."""
    right = torch.Tensor.__matmul__

    def product(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found = right(left, other)
        if left.dtype == torch.bfloat16 and found.shape == (64, 128):
            found[:, 64:] -= right(left[:, :8], other[:8, 64:])
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)


SMALL = replace(
    SHAPES["llama-3.2-1b"],
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
)


@pytest.mark.usefixtures("wrong_tile")
def test_a_product_that_is_wrong_in_a_tile_is_found() -> None:
    assert first_wrong(SMALL, torch.device("cpu")) == "(64, 8192) by (8192, 128) numbers", "a gradient of weights"


def test_right_products_are_right() -> None:
    assert first_wrong(SMALL, torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("joined", "model", "told"),
    [
        (True, "tiny", r"products of 8 by 8 may be wrong on 80 multiprocessors"),
        (None, "tiny", r"products of 8 by 8 may be wrong"),  # a driver that cannot tell
        (True, "tiny-moe", r"products of experts, which cannot be tried, may be wrong"),
        (False, "tiny", ""),
    ],
)
def test_what_is_told_of_products(joined: bool | None, model: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=80))
    monkeypatch.setattr(mps_products, "mps_enabled", lambda device: joined)
    monkeypatch.setattr(mps_products, "first_wrong", lambda spec, device: "8 by 8")
    found = wrong_products(load_config(None, [f"model.path={model}"]), torch.device("cpu"))
    assert re.search(told, found) if told else not found


GPU_OF_BOTH = {"generator": 0, "trainer": 0}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("daemon_pid", "one_gpu")
def test_where_it_is_used() -> None:
    for settings, used in (
        (["engine.mps=auto"], True),
        (["engine.mps=on"], True),
        ([], False),
        (["engine.mps=auto", "generator.device=cuda", "trainer.device=cuda:0"], True),
        (["engine.mps=auto", "generator.device=cpu"], False),
        (["engine.mps=auto", "engine=inline"], False),
        (["engine.mps=auto", "placement=colocated", "schedule.max_staleness=0"], False),
    ):
        config = load_config(None, settings)
        assert uses_mps(config, GPU_OF_BOTH) == used, settings
        assert bool(describe_mps(config, GPU_OF_BOTH)) == used, settings


@pytest.mark.usefixtures("one_gpu")
def test_a_machine_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    auto = load_config(None, ["engine.mps=auto"])
    assert not uses_mps(auto, GPU_OF_BOTH)
    assert "in time slices: nvidia-cuda-mps-control is not on the PATH" in describe_mps(auto, GPU_OF_BOTH)[0]
    with pytest.raises(ConfigError, match="a part of NVIDIA's driver"):
        describe_mps(load_config(None, ["engine.mps=on"]), GPU_OF_BOTH)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["engine=inline"], "cannot take effect with engine=inline"),
        (["generator.device=cpu"], "share no GPU here"),
        (["placement=colocated", "schedule.max_staleness=0"], "roles take turns"),
    ],
)
@pytest.mark.usefixtures("daemon_pid", "one_gpu")
def test_what_was_asked_for_in_vain_is_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        describe_mps(load_config(None, ["engine.mps=on", *settings]), GPU_OF_BOTH)


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks" / "claims"))
    return importlib.import_module("arms")


def test_runs_of_claims_that_are_made_at_a_time_share_one_daemon(
    arms: ModuleType, daemon_pid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(mps, "device_uuids", lambda: ["GPU-b"])
    options = arms.Options(tmp_path / "runs", tmp_path, (), 9, tmp_path, beside=2, mps=True)
    found = arms.side_by_side([mps.own_daemon, mps.own_daemon], options)
    assert found[0] == found[1] != ""
    assert is_gone(int(daemon_pid.read_text()))
    assert mps.own_daemon() == ""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1", "what the user chose is there again"


def test_claims_without_the_daemon_that_they_ask_for_do_not_begin(
    arms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    options = arms.Options(tmp_path / "runs", tmp_path, (), 9, tmp_path, beside=2, mps=True)
    with pytest.raises(SystemExit, match="did not start"):
        arms.side_by_side([lambda: pytest.fail("begun")], options)
