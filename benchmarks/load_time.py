"""Our reader and writer of safetensors files against the safetensors library: time, peak memory, and damaged files.

    python benchmarks/load_time.py [--shape qwen2.5-0.5b] [--rounds 5]

Each figure is taken in a fresh process, with the files in the page cache; both sides alternate, and medians are shown. All
loads end in memory that the process owns, in the wanted dtype, as training and generation need it. `shard` loads what the
second of two tensor-parallel ranks holds. `save` writes the model in the dtype it has, `save as bfloat16` in a narrower one.
Peak memory is that of the whole process over what it had before it began; pages of files that are mapped count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from model_load import DTYPES, peak_bytes, reset_peak, warm
from safetensors import safe_open
from safetensors.torch import save_file

from llamarl.errors import ModelError
from llamarl.families.family import ParameterSpec
from llamarl.families.parameters import parameters
from llamarl.layout.boxes import Box, relative, whole
from llamarl.layout.mesh import Mesh, box_on
from llamarl.layout.model import placement_of
from llamarl.model.checkpoint import all_of, empty_model, load_model, random_model, save_model
from llamarl.model.hf_config import read_shape
from llamarl.model.safetensors_file import read_spans
from llamarl.model.transformer import Transformer
from llamarl.model_spec import shape_named

FILE = "model.safetensors"


def second_of_two(parameter: ParameterSpec) -> Box:
    return box_on(1, parameter.shape, placement_of(parameter), Mesh((("tp", 2),)))


@torch.no_grad()
def library_load(folder: Path, dtype: torch.dtype, box_of: Callable[[ParameterSpec], Box] = all_of) -> Transformer:
    shape = read_shape(folder)
    model = empty_model(shape, dtype=dtype, device="cpu", box_of=box_of)
    with safe_open(folder / FILE, framework="pt") as file:
        for name, parameter in model.named_parameters():
            spec = parameters(shape)[name]
            box = box_of(spec)
            part = file.get_slice(name)[relative(box, whole(spec.shape))] if box_of != all_of else file.get_tensor(name)
            parameter.copy_(part)
    return model


def library_save(model: Transformer, path: Path, dtype: torch.dtype) -> None:
    save_file({name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}, path)


Action = Callable[[Path, torch.dtype], object]
LOADS: dict[str, dict[str, Action]] = {
    "load": {"ours": lambda folder, dtype: load_model(folder, dtype=dtype), "library": library_load},
    "shard": {
        "ours": lambda folder, dtype: load_model(folder, dtype=dtype, box_of=second_of_two),
        "library": lambda folder, dtype: library_load(folder, dtype, second_of_two),
    },
}


def measure(action: str, side: str, folder: Path, dtype: torch.dtype) -> None:
    """In the child process: do it once and print what it took."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        if action == "save":
            model = random_model(read_shape(folder))
            target = Path(scratch) / "saved"
            before, started_s = start()
            if side == "ours":
                save_model(model, target, dtype=dtype)
            else:
                library_save(model, target, dtype)
                with target.open("rb") as file:
                    os.fsync(file.fileno())  # as ours does
        else:
            before, started_s = start()
            held = LOADS[action][side](folder, dtype)
            assert held is not None
        wall_s = time.perf_counter() - started_s
        print(json.dumps({"wall_s": wall_s, "peak_gb": (peak_bytes() - before) / 1e9}))


def start() -> tuple[int, float]:
    reset_peak()
    return peak_bytes(), time.perf_counter()


def in_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, __file__, *arguments], check=False, capture_output=True, text=True)


def compare(action: str, folder: Path, dtype: str, rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {"ours": [], "library": []}
    for _ in range(rounds):
        for side, runs in found.items():
            warm(folder)
            done = in_child("--action", action, "--side", side, "--folder", str(folder), "--dtype", dtype)
            runs.append(json.loads(done.stdout))
    seconds = {side: statistics.median(run["wall_s"] for run in runs) for side, runs in found.items()}
    peaks = {side: max(run["peak_gb"] for run in runs) for side, runs in found.items()}
    what = f"{action} {folder.name} as {dtype}"
    print(
        f"{what:32} {seconds['ours']:8.2f} {seconds['library']:8.2f} {seconds['library'] / seconds['ours']:8.2f}"
        f" {peaks['ours']:10.2f} {peaks['library']:8.2f}",
        flush=True,
    )


# Damaged files


def changed_header(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> bytes:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def damages(path: Path) -> dict[str, bytes]:
    data, name = path.read_bytes(), "a"
    return {
        "cut short": data[:-8],
        "longer than told": data + bytes(8),
        "header longer than the file": (1 << 40).to_bytes(8, "little") + data[8:],
        "negative offset": changed_header(path, lambda header: header[name].update(data_offsets=[-8, 8])),
        "overlap": changed_header(path, lambda header: header["b"].update(data_offsets=[0, 16])),
        "shape that does not fill its bytes": changed_header(path, lambda header: header[name].update(shape=[5])),
        "line break in a name": changed_header(path, lambda header: header.update({"x\ny": header.pop(name)})),
        "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }


def library_verdict(path: Path) -> str:
    try:
        with safe_open(path, framework="pt") as file:
            return f"accepted: {sorted(file.keys())}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def our_verdict(path: Path) -> str:
    try:
        return f"accepted: {sorted(read_spans(path))}"
    except ModelError as error:
        return str(error).replace(f"{path}: ", "")


def read_shrinking(side: str, path: Path) -> None:
    """In the child process: the file loses its end between being opened and being read."""
    save_file({"a": torch.ones(1 << 20)}, path)
    if side == "ours":
        from llamarl.model.tensor_io import read_tensor

        span = read_spans(path)["a"]
        os.truncate(path, 4096)
        try:
            read_tensor(span, torch.empty(1 << 20))
        except ModelError as error:
            print(str(error).replace(f"{path}: ", ""))
        return
    with safe_open(path, framework="pt") as file:
        os.truncate(path, 4096)
        print(float(file.get_tensor("a").sum()))


def judge_damaged(scratch: Path) -> None:
    path = scratch / FILE
    for what, data in damages(small(path)).items():
        path.write_bytes(data)
        print(f"{what}\n  ours     {our_verdict(path)!r}\n  library  {library_verdict(path)!r}")
    print("file that shrinks while it is read")
    for side in ("ours", "library"):
        done = in_child("--action", "shrink", "--side", side, "--folder", str(path))
        killed = f"killed by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else ""
        print(f"  {side:8} {killed or done.stdout.strip() or done.stderr.strip().splitlines()[-1]!r}")


def small(path: Path) -> Path:
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--action", choices=["load", "shard", "save", "shrink"], help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=["ours", "library"], help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=list(DTYPES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.action == "shrink":
        read_shrinking(args.side, args.folder)
        return
    if args.action:
        measure(args.action, args.side, args.folder, DTYPES[args.dtype])
        return
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        for dtype in ("bfloat16", "float32"):
            save_model(random_model(shape_named(args.shape), dtype=DTYPES[dtype]), scratch / dtype)
        sizes = ", ".join(f"{(scratch / dtype / FILE).stat().st_size / 1e9:.2f} GB in {dtype}" for dtype in DTYPES)
        print(f"{args.shape}: {sizes}; medians of {args.rounds}, largest peaks")
        print(f"{'':32} {'ours s':>8} {'libr. s':>8} {'ratio':>8} {'ours GB':>10} {'libr. GB':>8}", flush=True)
        for action, files, dtype in (
            ("load", "bfloat16", "bfloat16"),
            ("load", "float32", "float32"),
            ("load", "bfloat16", "float32"),
            ("shard", "bfloat16", "bfloat16"),
            ("save", "float32", "float32"),
            ("save", "float32", "bfloat16"),
        ):
            compare(action, scratch / files, dtype, args.rounds)
        judge_damaged(scratch)


if __name__ == "__main__":
    main()
