"""All that is promised of decoding on one GPU, in one table: rates, heavy tails, sampling filters, the first token.

    python benchmarks/decode_rows.py [--only "1B bf16"] [--json result.json]
    python benchmarks/decode_rows.py --tiny          # a model of a few thousand parameters, on any machine

Models have random weights, and one follows the other in one process; the first token is that of fresh processes, without
compiled kernels on disk and with those of the one before. A rate is the median of three runs with all slots busy, from the
end of the first burst. What a real job reaches (Qwen on GSM8K): `generator_in_a_job.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from attention_variants import graph_s, plain_s  # beside this script
from msgspec import convert, structs

from llamarl.bench.decode import DecodeBench
from llamarl.bench.decode_case import DecodeCase
from llamarl.bench.machine import process_age_s
from llamarl.generate.sampling import sample_tokens, seed_state, uniform_draws
from llamarl.generate.slots import Opening, SlotState
from llamarl.model_spec import ModelSpec, shape_named
from llamarl.types import Sampling

RUNS, SAMPLES = 3, 8
TINY = ModelSpec(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
)
FILTERS: dict[str, dict[str, float]] = {
    "T alone": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
}


@dataclass(frozen=True)
class Rate:
    """Tokens a second; bounds are rates, or factors of the row that `times` names."""

    name: str
    model: str
    batch: int
    prompt: int
    precision: str
    kv_cache: Literal["auto", "fp8"] = "auto"
    must: float = 0.0
    reach: float = 0.0
    times: str = ""
    tails: bool = False  # heavy-tailed lengths too: their share of this rate
    burst: int = 0  # 0: as a job would


RATES = (
    Rate("1B bf16", "llama-3.2-1b", 256, 128, "bf16", must=130_000, reach=165_000, tails=True),
    Rate("1B bf16, bursts of 4", "llama-3.2-1b", 256, 128, "bf16", tails=True, burst=4),
    Rate("8B bf16", "llama-3.1-8b", 256, 384, "bf16", must=22_000, reach=26_000),
    Rate("8B fp8", "llama-3.1-8b", 256, 384, "fp8"),
    Rate("8B fp8, fp8 KV", "llama-3.1-8b", 256, 384, "fp8", "fp8", must=1.4, reach=1.8, times="8B bf16"),
    Rate("8B int8", "llama-3.1-8b", 256, 384, "int8"),
    Rate("SmolLM2 bf16", "smollm2-135m", 512, 128, "bf16", must=150_000, reach=250_000),
)
TAILS_MUST, TAILS_REACH = 0.85, 0.95
FIRST_TOKEN = {"no compiled kernels on disk": (60.0, 30.0), "some": (15.0, 8.0)}


@dataclass(frozen=True)
class Row:
    name: str
    found: str
    must: str = ""
    reach: str = ""
    verdict: str = ""
    value: float = 0.0


def rate_rows(rates: Iterable[Rate], device: str, tiny: bool, page: int) -> Iterable[Row]:
    found: dict[str, float] = {}
    for rate in rates:
        try:
            yield from rows_of(rate, structs.replace(case_of(rate, device, tiny), page_tokens=page), tiny, found)
        except (RuntimeError, AssertionError) as error:  # such as too little memory: the others can still be measured
            yield Row(rate.name, f"failed: {str(error).splitlines()[0][:80]}", verdict="failed")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def rows_of(rate: Rate, case: DecodeCase, tiny: bool, found: dict[str, float]) -> Iterable[Row]:
    # Slots as long as the heavy tail needs, or as the answers are.
    bench = DecodeBench(TINY if tiny else shape_named(rate.model), case, 0 if rate.tails else case.new)
    found[rate.name] = bench.steady(RUNS)
    yield judged(rate, found)
    if rate.tails:
        share = bench.heavy_tailed() / found[rate.name]
        verdict = "met" if share >= TAILS_MUST else "missed"
        bounds = f"{TAILS_MUST:.0%}", f"{TAILS_REACH:.0%}"
        yield Row(f"{rate.name}, heavy-tailed", f"{share:.1%}", *bounds, verdict, share)


def case_of(rate: Rate, device: str, tiny: bool) -> DecodeCase:
    precision = "fp32" if tiny and rate.precision == "bf16" else rate.precision
    batch, prompt, new = (8, 16, 16) if tiny else (rate.batch, rate.prompt, 256)
    return DecodeCase(rate.model, batch, prompt, new, SAMPLES, precision, device, rate.kv_cache, rate.burst)


def judged(rate: Rate, found: dict[str, float]) -> Row:
    value = found[rate.name]
    text, unit = f"{value:,.0f} tokens/s", found.get(rate.times, 0.0) if rate.times else 1.0
    if rate.times and unit:
        text += f", {value / unit:.2f} times {rate.times}"
    if not rate.must or not unit:
        return Row(rate.name, text, value=value)
    must, reach = (f"{bound:g} times" if rate.times else f"{bound:,.0f}" for bound in (rate.must, rate.reach))
    return Row(rate.name, text, must, reach, "met" if value >= rate.must * unit else "missed", value)


def sampling_rows(device: torch.device, tiny: bool) -> Iterable[Row]:
    for rows, vocabulary in ((8, 64),) if tiny else ((256, 128_256), (512, 151_936)):
        generator = torch.Generator(device=device).manual_seed(0)
        logits_BV = 3 * torch.randn(rows, vocabulary, device=device, generator=generator)
        for name, filters in FILTERS.items():
            us = 1e6 * sampling_s(logits_BV, filters)
            yield Row(f"sampling {rows} x {vocabulary:,}, {name}", f"{us:,.0f} us", value=us)


def sampling_s(logits_BV: torch.Tensor, filters: dict[str, float]) -> float:
    rows, device, filtered = len(logits_BV), logits_BV.device, bool(filters)
    state = SlotState(rows, 1024, (), device)
    state.open([opening(slot, filters) for slot in range(rows)])
    slots_B = torch.arange(rows, device=device)

    def on_gpu() -> None:
        from llamarl.generate.sampling_kernels import sample_and_advance

        sample_and_advance(logits_BV, slots_B, state, seed_state(0), filtered=filtered)

    def plain() -> None:
        draws_B = uniform_draws(0, state.ordinals[slots_B], state.samples[slots_B], state.counts[slots_B])
        state.advance(slots_B, *sample_tokens(logits_BV, draws_B, state.sampling_of(slots_B), filtered=filtered))

    timed, action = (graph_s, on_gpu) if device.type == "cuda" else (plain_s, plain)
    return timed(action)


def opening(slot: int, filters: dict[str, float]) -> Opening:
    sampling = convert({"max_new_tokens": 1024, **filters}, Sampling)
    return Opening(slot=slot, ordinal=slot, sample=0, token=1, position=4, count=0, sampling=sampling)


def first_token_rows(tiny: bool) -> Iterable[Row]:
    """Twice the same in fresh processes; the second finds what the first has compiled."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, __file__, "--first-token", *(["--tiny"] if tiny else [])]
        for name, (must_s, reach_s) in FIRST_TOKEN.items():
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            seconds = float(done.stdout.splitlines()[-1])
            verdict = "met" if seconds <= must_s else "missed"
            yield Row(
                f"1B, first token, {name}", f"{seconds:.1f} s", f"{must_s:g} s", f"{reach_s:g} s", verdict, seconds
            )


def first_token_s(device: str, tiny: bool) -> float:
    bench = DecodeBench(TINY if tiny else shape_named(RATES[0].model), case_of(RATES[0], device, tiny))
    bench.run([1] * SAMPLES)
    return process_age_s()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rate.name for rate in RATES]
    parser.add_argument("--only", action="append", default=[], choices=[*names, "sampling", "first token"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to see that this runs")
    parser.add_argument(
        "--first-token", action="store_true", help="print the seconds to the first token of this process"
    )
    parser.add_argument("--page", type=int, default=16, help="tokens in a page of the KV cache")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.tiny:
        raise SystemExit("no GPU here; --tiny runs on any machine")
    if arguments.first_token:
        print(first_token_s(device, arguments.tiny))
        return
    start_s, wanted = time.perf_counter(), arguments.only or [*names, "sampling", "first token"]
    rates = [rate for rate in RATES if rate.name in wanted]
    parts: list[tuple[bool, Callable[[], Iterable[Row]]]] = [
        (bool(rates), lambda: rate_rows(rates, device, arguments.tiny, arguments.page)),
        ("sampling" in wanted, lambda: sampling_rows(torch.device(device), arguments.tiny)),
        ("first token" in wanted, lambda: first_token_rows(arguments.tiny)),
    ]
    print("| case | found | must | reach for | |\n|---|---:|---:|---:|---|")
    rows = []
    for asked, make in parts:
        for row in make() if asked else ():
            rows.append(row)
            print(f"| {row.name} | {row.found} | {row.must} | {row.reach} | {row.verdict} |", flush=True)
    print(f"\n{time.perf_counter() - start_s:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
