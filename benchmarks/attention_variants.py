"""Decode attention in several tilings, layer by layer.

    python benchmarks/attention_variants.py [--case 1B] [--budget 170] [--workers 8] [--json result.json]

Every tiling is first held against plain PyTorch on a small scene, in processes of their own, which also compile it; one that
fails is reported as such. Then each is timed: a CUDA graph of eight layers, each with a cache of its own, so that nothing is
found in the GPU's own memory; the median of several replays. TB/s counts keys, values and scales that must be read, once.
Without a GPU, `TRITON_INTERPRET=1 ... --tiny` checks on a CPU and times nothing worth reading.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llamarl.bench.machine import measure_ceilings
from llamarl.generate.attention import Readings, attend_pages, members_of_reading
from llamarl.generate.kv_cache import PagedCache, Pages
from llamarl.model import ops
from llamarl.model.quantize import FP8
from llamarl.model.rope import rope_up_to
from llamarl.model_spec import ModelSpec

LAYERS, REPLAYS, TIMES = 8, 4, 7
CHECKED_ROWS = 20
TOLERANCE = 2e-2
LONG_PROMPT = 4096


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    heads: int
    kv_heads: int
    size: int
    context: int
    narrow: bool = False
    prompt: int = 0  # shared by groups of 8
    spread: float = 0.0  # of log-normal contexts about the mean; 0: all are equal
    longest_first: bool = True


CASES = (
    Case("1B", 256, 32, 8, 64, 250),
    Case("8B", 256, 32, 8, 128, 500),
    Case("8B fp8", 256, 32, 8, 128, 500, narrow=True),
    Case("8B shared", 256, 32, 8, 128, 500, prompt=384),
    Case("8B fp8 shared", 256, 32, 8, 128, 500, narrow=True, prompt=384),
    Case("1B tails", 256, 32, 8, 64, 370, spread=0.8),
    Case("1B tails, any order", 256, 32, 8, 64, 370, spread=0.8, longest_first=False),
    Case("SmolLM2", 512, 9, 3, 64, 250),
    Case("Qwen 1.5B", 256, 12, 2, 128, 400),
    Case("Qwen 1.5B, GSM8K", 512, 12, 2, 128, 320, spread=0.35),
    Case("Qwen 1.5B, MATH", 512, 12, 2, 128, 900, spread=0.8),
    Case("Qwen 1.5B, MATH, any order", 512, 12, 2, 128, 900, spread=0.8, longest_first=False),
    Case("1B shared", 256, 32, 8, 64, 250, prompt=128),
    Case("8B, 4k shared by 32", 32, 32, 8, 128, 4160, prompt=4096),
    Case("8B, 8k shared by 64", 64, 32, 8, 128, 8704, prompt=8192),
)
Tile = tuple[int, ...]  # tokens of a page, then a `Tiling`
CUTS = ((2, 32), (4, 16), (4, 32), (4, 64), (8, 16), (8, 32))  # parts at most, and blocks of one at least
TILES: dict[tuple[int, bool], tuple[Tile, ...]] = {
    (64, False): (
        (16, 16, 1, 3),
        (16, 16, 1, 4),
        (16, 16, 1, 5),
        (16, 16, 1, 6),
        (16, 32, 1, 3),
        (16, 16, 1, 3, 2),
        (16, 16, 1, 3, 4),
        (64, 64, 4, 3),
        *((16, 16, 1, 3, *cut) for cut in CUTS),
    ),
    (128, False): (
        (16, 16, 1, 3),
        (16, 16, 1, 4),
        (16, 16, 1, 6),
        (16, 16, 1, 4, 1),
        (16, 16, 1, 4, 2),
        (16, 16, 1, 4, 4),
        (64, 32, 1, 2),
        *((16, 16, 1, 4, *cut) for cut in CUTS),
        (16, 16, 1, 3, 8, 32),
        (16, 32, 2, 3, 4, 16),
    ),
    (128, True): (
        (16, 32, 1, 2),
        (16, 32, 1, 3),
        (16, 32, 1, 2, 2),
        (64, 64, 2, 3),
        (16, 32, 1, 2, 8, 16),
    ),
}
SHARED_TILES = ((64, 4, 3, 4), (32, 4, 3, 4), (32, 4, 4, 4), (16, 4, 4, 4))
LONG_SHARED_TILES = tuple(
    (*tile, parts) for tile in ((16, 4, 4), (32, 4, 3), (64, 4, 3), (64, 8, 3)) for parts in (4, 8, 16, 32)
)


@dataclass(frozen=True)
class Variant:
    case: str
    tile: Tile
    shared_tile: tuple[int, int, int, int] | None = None

    @property
    def name(self) -> str:
        page, *tile = self.tile
        shared = f", prompts {'/'.join(map(str, self.shared_tile))}" if self.shared_tile else ""
        return f"page {page}, {'/'.join(map(str, tile))}{shared}"


def variants(case: Case) -> list[Variant]:
    """Where prompts are shared: the second tiling, with several for the prompts."""
    tiles = TILES[case.size, case.narrow]
    if not case.prompt:
        return [Variant(case.name, tile) for tile in tiles]
    shared_tiles = LONG_SHARED_TILES if case.prompt >= LONG_PROMPT else SHARED_TILES
    return [Variant(case.name, tiles[1], shared) for shared in shared_tiles]


def with_short_parts(variant: Variant) -> Variant:
    """So that sequences of 90 tokens are cut too."""
    return replace(variant, tile=(*variant.tile[:5], 2)) if len(variant.tile) == 6 else variant


@dataclass
class SimulationSetup:
    """Sequences in the middle of their answers."""

    cache: PagedCache
    table_SP: Tensor
    slots_B: Tensor
    positions_S: Tensor
    rope: ops.Rope
    qkv: tuple[Tensor, Tensor, Tensor]
    readings: Readings | None
    read_tokens: int


def contexts_of(case: Case, rows: int) -> list[int]:
    if not case.spread:
        return [case.context] * rows
    chance, median = random.Random(0), case.context / math.exp(0.5 * case.spread**2)
    found = [round(min(8 * median, max(4.0, median * math.exp(chance.gauss(0, case.spread))))) for _ in range(rows)]
    return sorted(found, reverse=True) if case.longest_first else found


def shape_of(heads: int, kv_heads: int, size: int, layers: int, positions: int) -> ModelSpec:
    """Of a model of which only the attention counts."""
    return ModelSpec(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        max_positions=positions,
    )


def random_qkv(
    shape: ModelSpec, rows: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one token a row, as one product makes them."""
    heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
    qkv = torch.randn(rows, 1, sum(heads) * shape.head_dim, device=generator.device, generator=generator).to(dtype)
    parts = torch.split(qkv, [count * shape.head_dim for count in heads], dim=-1)
    q, k, v = (part.view(rows, 1, -1, shape.head_dim) for part in parts)
    return q, k, v


def scene_of(case: Case, page: int, layers: int, rows: int, device: torch.device) -> SimulationSetup:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # Triton's interpreter has no product of bf16
    generator = torch.Generator(device=device).manual_seed(0)
    contexts = contexts_of(case, rows)
    width = max(contexts) // page + 1
    shape = shape_of(case.heads, case.kv_heads, case.size, layers, width * page)
    cache = PagedCache(shape, rows * width, page, dtype=FP8 if case.narrow else dtype, device=device)
    fill(cache, layers, generator, dtype)
    order = torch.randperm(rows * width, device=device, generator=generator)
    table_SP = (order + 1).view(rows, width).to(torch.int32)
    readings, saved = share(case, table_SP, page)
    return SimulationSetup(
        cache=cache,
        table_SP=table_SP,
        slots_B=torch.arange(rows, device=device),
        positions_S=torch.tensor(contexts, device=device),
        rope=rope_up_to(shape, width * page, device),
        qkv=random_qkv(shape, rows, dtype, generator),
        readings=readings,
        read_tokens=sum(contexts) - saved,
    )


def fill(cache: PagedCache, layers: int, generator: torch.Generator, dtype: torch.dtype) -> None:
    for layer in range(layers):
        for pages in (cache.keys(layer), cache.values(layer)):
            if pages.scales_KPT is None:
                pages.values_KPTD.normal_(generator=generator)
            else:  # any bytes but those that are no number
                pages.values_KPTD.random_(0, 127, generator=generator)
                pages.values_KPTD[..., ::2] += 128
                pages.scales_KPT.uniform_(1e-3, 1e-2, generator=generator)


def share(case: Case, table_SP: Tensor, page: int) -> tuple[Readings | None, int]:
    """Groups of 8 begin with the same pages; returns how to read them, and the tokens that this saves."""
    if not case.prompt:
        return None, 0
    rows, full = len(table_SP), (case.prompt - 1) // page
    members = members_of_reading(case.heads // case.kv_heads)
    firsts, counts, skips = torch.zeros(3, rows, dtype=torch.int64, device=table_SP.device)
    saved = 0
    for reading, first in enumerate(range(0, rows, members)):
        count = min(members, rows - first)
        table_SP[first : first + count, :full] = table_SP[first, :full].clone()
        firsts[reading], counts[reading], saved = first, count, saved + (count - 1) * full * page
    skips += full * page
    return Readings(firsts, counts, skips), saved


Attend = Callable[[SimulationSetup, int], Tensor]


def attend_of(variant: Variant) -> Attend:
    from llamarl.generate import attention_kernels as kernels

    how = kernels.Tiling(*variant.tile[1:])
    shared_how = kernels.Tiling(*variant.shared_tile) if variant.shared_tile else None

    def attend(scene: SimulationSetup, layer: int) -> Tensor:
        keys, values = scene.cache.keys(layer), scene.cache.values(layer)
        where = (scene.table_SP, scene.slots_B, scene.positions_S, scene.rope, scene.readings)
        return kernels.attend_pages(scene.qkv, keys, values, *where, how=how, shared_how=shared_how)

    return attend


def expected(scene: SimulationSetup, page: int) -> Tensor:
    """What plain PyTorch attends to, over the pages as the kernel has left them, the new token among them."""
    positions_B, table_BP = scene.positions_S[scene.slots_B], scene.table_SP[scene.slots_B].long()
    at = tuple(part[positions_B][:, None] for part in scene.rope)
    mask_BT = torch.arange(table_BP.shape[1] * page, device=table_BP.device)[None] <= positions_B[:, None]
    turned = ops.rotate(scene.qkv[0].float(), at).to(scene.qkv[0].dtype).float()
    keys, values = (wide(pages) for pages in (scene.cache.keys(0), scene.cache.values(0)))
    return attend_pages(turned, keys, values, table_BP, mask_BT[:, None, None])


def wide(pages: Pages) -> Pages:
    return pages if pages.narrow else Pages(pages.values_KPTD.float(), None)


def written_error(scene: SimulationSetup, page: int) -> float:
    """How far the new keys and values in their pages are from what was to be written, against the largest of each vector."""
    positions_B = scene.positions_S[scene.slots_B]
    pages_B = scene.table_SP[scene.slots_B].long().gather(1, positions_B[:, None] // page)[:, 0]
    at = tuple(part[positions_B][:, None] for part in scene.rope)
    wanted = (ops.rotate(scene.qkv[1], at)[:, 0], scene.qkv[2][:, 0])
    worst = 0.0
    for pages, new_BKD in zip((scene.cache.keys(0), scene.cache.values(0)), wanted, strict=True):
        read_BKTD = pages.read(pages_B[:, None], torch.float32).float()
        index = (positions_B % page)[:, None, None, None].expand(-1, read_BKTD.shape[1], 1, read_BKTD.shape[3])
        gap_BKD = (read_BKTD.gather(2, index)[:, :, 0] - new_BKD.float()).abs()
        worst = max(worst, float((gap_BKD.amax(-1) / new_BKD.float().abs().amax(-1)).max()))
    return worst


@torch.inference_mode()
def check(case: Case, variant: Variant, device: torch.device, rows: int = CHECKED_ROWS) -> str:
    """Empty, or what is wrong with the variant."""
    try:
        scene = scene_of(case, variant.tile[0], 1, rows, device)
        found = attend_of(variant)(scene, 0).float()
        wanted = expected(scene, variant.tile[0])
        gap = float(((found - wanted).abs() - 0.01 * wanted.abs()).max())
        written = written_error(scene, variant.tile[0])
    except Exception as error:  # whatever a compiler may say
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:90] if str(error).strip() else ''}"
    # Half a step of fp8 is 1/32 of the largest; Triton's interpreter rounds carelessly.
    narrowest = (1.1 / 28 if device.type == "cuda" else 0.6) if case.narrow else 1e-2
    wrong = not gap < TOLERANCE or not written < narrowest
    return f"off by {gap:.3g}, written by {written:.3g}" if wrong else ""


@torch.inference_mode()
def layer_us(case: Case, variant: Variant, device: torch.device, rows: int) -> tuple[float, float]:
    """Microseconds of one layer, and TB/s."""
    on_gpu = device.type == "cuda"
    layers = LAYERS if on_gpu else 1
    scene = scene_of(case, variant.tile[0], layers, rows, device)
    attend = attend_of(variant)

    def step() -> None:
        for layer in range(layers):
            attend(scene, layer)

    seconds = graph_s(step) / layers if on_gpu else plain_s(step)
    token_bytes = case.size * (1 if case.narrow else 2) + (4 if case.narrow else 0)
    read_bytes = scene.read_tokens * case.kv_heads * 2 * token_bytes
    return seconds * 1e6, read_bytes / seconds / 1e12


def plain_s(action: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def graph_s(action: Callable[[], None]) -> float:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    graph.replay()
    found = list[float]()
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / REPLAYS / 1e3)
    return statistics.median(found)


def checked_elsewhere(arguments: argparse.Namespace, count: int) -> dict[str, str]:
    """By the name of case and variant, what other processes say of it; they compile side by side."""
    command = [sys.executable, __file__, *(f"--case={name}" for name in arguments.case)]
    command += ["--tiny"] if arguments.tiny else []
    started = [
        subprocess.Popen(
            [*command, f"--slice={part}/{count}"], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        for part in range(count)
    ]
    faults: dict[str, str] = {}
    for process in started:
        out, _ = process.communicate()
        lines = out.decode().splitlines()
        faults.update(json.loads(line) for line in lines if line.startswith("["))
    return faults


def check_slice(work: list[tuple[Case, Variant]], part: str, device: torch.device, rows: int) -> None:
    first, step = (int(number) for number in part.split("/"))
    for case, variant in work[first::step]:
        print(json.dumps([f"{case.name}: {variant.name}", check(case, variant, device, rows)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--budget", type=float, default=170.0, help="seconds; what comes later is left out")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="few sequences, for a machine without a GPU")
    parser.add_argument("--slice", default="", help="check the variants I, I + N, ... (I/N), and time none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start_s, device = time.perf_counter(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("no GPU here; TRITON_INTERPRET=1 and --tiny check the kernels on a CPU")
    cases = [case for case in CASES if not arguments.case or case.name in arguments.case]
    if arguments.tiny:
        cases = [replace(case, context=min(case.context, 90), prompt=min(case.prompt, 70)) for case in cases]
    work = [(case, variant) for case in cases for variant in variants(case)]
    if arguments.tiny:
        work = [(case, with_short_parts(variant)) for case, variant in work]
    rows = 3 if arguments.tiny else CHECKED_ROWS
    if arguments.slice:
        check_slice(work, arguments.slice, device, rows)
        return
    faults = checked_elsewhere(arguments, arguments.workers)
    print(f"{len(faults)} variants checked in {time.perf_counter() - start_s:.0f} s", flush=True)
    results = []
    print("| case | variant | us a layer | TB/s |\n|---|---|---:|---:|")
    for case, variant in work:
        fault = faults.get(f"{case.name}: {variant.name}", "not checked: its process ended")
        late = time.perf_counter() - start_s > arguments.budget
        us, rate, note = 0.0, 0.0, fault or ("left out: no time" if late else "")
        if not note:
            try:
                us, rate = layer_us(case, variant, device, rows if arguments.tiny else case.rows)
            except Exception as error:  # one that fails only at full size
                note = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:90]}"
        print(f"| {case.name} | {variant.name} | {note or f'{us:.1f}'} | {rate:.2f} |", flush=True)
        results.append({**asdict(variant), "us": us, "tb_per_s": rate, "note": note})
    ceilings = measure_ceilings(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    print(f"\na copy: {ceilings.bytes / 1e12:.2f} TB/s; all in {time.perf_counter() - start_s:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps({"copy_tb_per_s": ceilings.bytes / 1e12, "variants": results}, indent=1))


if __name__ == "__main__":
    main()
