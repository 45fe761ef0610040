"""How long loading a checkpoint takes beside reading its bytes, and how much memory it needs at its peak.

    python benchmarks/model_load.py [--shape llama-3.2-1b] [--json result.json]

Each figure is taken in a fresh process. `read` is `Path.read_bytes` of the weight files; `load` is `load_model`, with
torch already imported. Both find the files in the page cache (warm), or both find them on disk (cold). The measures
alternate, so that a change of the machine's speed meets both. `touch` only writes once to memory of the model's size, which
no loader can do without: where it alone takes longer than the limit, the limit cannot be met. Ratios are of medians, which
the limits are held against; the fastest runs are shown beside them. Peak memory is the largest seen, of the whole process,
torch included, over the bytes of the model as loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from llamarl.model.checkpoint import empty_model, load_model, random_model, save_model
from llamarl.model.hf_config import read_shape
from llamarl.model_spec import shape_named

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_TIME_RATIO, MAX_MEMORY_RATIO = 1.5, 1.2


def peak_bytes() -> int:
    """The kernel's high-water mark of resident memory, since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read(folder: Path, dtype: torch.dtype) -> int:
    held = [path.read_bytes() for path in weight_files(folder)]
    return sum(len(content) for content in held)


def load(folder: Path, dtype: torch.dtype) -> int:
    model = load_model(folder, dtype=dtype)
    return sum(parameter.nbytes for parameter in model.parameters())


@torch.no_grad()
def touch(folder: Path, dtype: torch.dtype) -> int:
    model = empty_model(read_shape(folder), dtype=dtype, device="cpu")
    for parameter in model.parameters():
        parameter.fill_(1.0)
    return sum(parameter.nbytes for parameter in model.parameters())


ACTIONS: dict[str, Callable[[Path, torch.dtype], int]] = {"read": read, "load": load, "touch": touch}


def measure(action: str, folder: Path, dtype: str) -> None:
    """In the child process: do it once and print what it took."""
    reset_peak()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    num_bytes = ACTIONS[action](folder, DTYPES[dtype])
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "num_bytes": num_bytes, "peak_bytes": peak_bytes()}))


def in_child(action: str, folder: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--action", action, "--folder", str(folder), "--dtype", dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def warm(folder: Path) -> None:
    for path in weight_files(folder):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def cool(folder: Path) -> None:
    """Asks the kernel to forget the files' pages; they were synced when they were saved."""
    for path in weight_files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def compare(folder: Path, dtype: str, prepare: Callable[[Path], None], repeats: int) -> dict[str, float]:
    results: dict[str, list[dict[str, float]]] = {action: [] for action in ACTIONS}
    for _ in range(repeats):
        for action, found in results.items():
            prepare(folder)
            found.append(in_child(action, folder, dtype))
    walls = {action: [run["wall_s"] for run in found] for action, found in results.items()}
    read_s, load_s, touch_s = (statistics.median(walls[action]) for action in ACTIONS)
    read_cpu_s, load_cpu_s = (statistics.median(run["cpu_s"] for run in results[a]) for a in ("read", "load"))
    memory = max(run["peak_bytes"] for run in results["load"])
    num_bytes = results["load"][0]["num_bytes"]
    return {
        "read_s": read_s,
        "load_s": load_s,
        "time_ratio": load_s / read_s,
        "fastest_ratio": min(walls["load"]) / min(walls["read"]),
        "touch_ratio": touch_s / read_s,
        "read_cpu_s": read_cpu_s,
        "load_cpu_s": load_cpu_s,
        "model_bytes": num_bytes,
        "peak_bytes": memory,
        "memory_ratio": memory / num_bytes,
    }


def run(shape: str, repeats: int, scratch: Path) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for files, loaded_as in (("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32")):
        folder = scratch / files
        if not folder.exists():
            save_model(random_model(shape_named(shape), dtype=DTYPES[files]), folder)
        for state, prepare in (("warm", warm), ("cold", cool)):
            figures = compare(folder, loaded_as, prepare, repeats)
            rows.append({"shape": shape, "files": files, "loaded_as": loaded_as, "page_cache": state, **figures})
            print_row(rows[-1])
    return rows


COLUMNS = (
    *("files", "loaded_as", "page_cache", "read_s", "load_s", "time_ratio", "fastest_ratio", "touch_ratio"),
    *("read_cpu_s", "load_cpu_s", "peak_bytes", "memory_ratio"),
)


def print_row(row: dict[str, float | str]) -> None:
    cells = [f"{row[name]:,.2f}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
    print(" ".join(f"{cell:>13}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--action", choices=list(ACTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=list(DTYPES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.action:
        measure(args.action, args.folder, args.dtype)
        return
    with tempfile.TemporaryDirectory() as temporary:
        print(" ".join(f"{name:>13}" for name in COLUMNS), flush=True)
        rows = run(args.shape, args.repeats, Path(temporary))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    missed = [row for row in rows if float(row["time_ratio"]) > MAX_TIME_RATIO]
    missed += [row for row in rows if float(row["memory_ratio"]) >= MAX_MEMORY_RATIO]
    for row in missed:
        print(f"over the limit: {row['files']} loaded as {row['loaded_as']}, {row['page_cache']}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
