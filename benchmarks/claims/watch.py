"""How busy the GPU is while a run goes on: the driver's own count of the time in which a kernel was running."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

_EVERY_MS = 200


def _query(*what: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(what)}", "--format=csv,noheader,nounits"]


def gpu_name() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    return subprocess.run(_query("name"), capture_output=True, text=True, check=True).stdout.strip()


def memory_used() -> int:
    """Bytes of all GPUs' memory that are in use; 0 where there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(_query("memory.used"), capture_output=True, text=True, check=True).stdout.split()
    return sum(int(mib) for mib in found) << 20


class GpuWatch:
    """Appends a row [unix seconds, busy share] to a file several times a second; nothing where there is no GPU."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def __enter__(self) -> GpuWatch:
        if shutil.which("nvidia-smi"):
            command = [*_query("utilization.gpu"), "-lms", str(_EVERY_MS)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def _copy(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._file.open("a", buffering=1) as out:
            for line in self._process.stdout:
                if line.strip().isdigit():
                    out.write(json.dumps([time.time(), int(line) / 100]) + "\n")

    @staticmethod
    def read(file: Path) -> list[tuple[float, float]]:
        if not file.exists():
            return []
        return [(at, busy) for at, busy in map(json.loads, file.read_text().splitlines())]
