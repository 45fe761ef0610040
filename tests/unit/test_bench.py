"""The benchmarks measure what they say, on any machine."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.cli import llamarl
from helpers.models import SHAPE
from msgspec.structs import replace

from llamarl.bench import decode_windows
from llamarl.bench.decode import DecodeBench, bench_decode, describe_decode
from llamarl.bench.decode_case import DecodeCase
from llamarl.bench.decode_floor import cached_tokens, floor_s
from llamarl.bench.machine import Ceilings
from llamarl.bench.train import TrainBench, prepare
from llamarl.errors import InputError
from llamarl.families.parameters import num_parameters
from llamarl.model_spec import shape_named


def test_decoding_is_measured_in_every_way_that_it_names() -> None:
    case = DecodeCase("small", 8, 16, 16, 4, "fp32", "cpu")
    result = bench_decode(SHAPE, case)
    assert result.tokens_per_s > 0 < result.heavy_tailed_tokens_per_s
    assert 0 < result.share_of_floor < 1, "quicker than the machine allows: the floor or the rate is wrong"
    assert result.share_of_floor == pytest.approx(result.tokens_per_s / result.floor_tokens_per_s)
    assert "tokens/s" in describe_decode(result)


def test_prompts_are_read_before_decoding_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones are read between bursts, a few at a time; a step of a calibration was five times as long for it."""
    bench, waiting = DecodeBench(SHAPE, DecodeCase("small", 4, 600, 16, 1, "fp32", "cpu"), longest=16), list[int]()
    monkeypatch.setattr(bench.decoder._schedule, "prefill_tokens", 600)
    step = bench.decoder.step

    def counted() -> Any:
        waiting.append(bench.decoder.num_waiting)
        return step()

    monkeypatch.setattr(bench.decoder, "step", counted)
    bench.run([16] * 4)
    assert waiting and not any(waiting)


@pytest.mark.parametrize("streams", [{}, {"sft": True}, {"teacher": "smollm2-135m"}], ids=["policy", "sft", "teacher"])
def test_training_is_measured_in_each_stream(streams: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.bench.train.shape_named", lambda name: replace(SHAPE, hidden_size=16, head_dim=4))
    bench = TrainBench(model="small", tokens=128, length=64, device="cpu", compile=False, updates=1, **streams)
    learner, documents = prepare(bench, SHAPE)
    metrics = learner.accumulate(documents).metrics(documents, 4.0)
    assert ("sft_loss" in metrics, "teacher_kl" in metrics) == ("sft" in streams, "teacher" in streams)


def test_the_floor_of_a_step_is_its_bytes_when_few_sequences_run() -> None:
    """One sequence: every weight is read once, so a machine twice as quick in memory halves the time."""
    shape, case = shape_named("llama-3.2-1b"), DecodeCase("1b", 1, 128, 256, 1, "bf16", "cpu")
    slow = floor_s(shape, case, Ceilings(flops=1e15, bytes=1e12))
    assert slow == pytest.approx(2 * floor_s(shape, case, Ceilings(flops=1e15, bytes=2e12)), rel=1e-6)
    assert slow * 1e12 == pytest.approx(2 * num_parameters(shape), rel=0.03)


def test_the_floor_of_a_step_is_its_work_when_many_run() -> None:
    shape, case = shape_named("llama-3.2-1b"), DecodeCase("1b", 100_000, 1, 16, 1, "bf16", "cpu")
    work = 2 * num_parameters(shape) * case.batch
    assert floor_s(shape, case, Ceilings(flops=1e12, bytes=1e18)) * 1e12 == pytest.approx(work, rel=0.01)


def test_the_floor_counts_a_prompt_once_for_its_group() -> None:
    alone, shared = (DecodeCase("1b", 32, 4097, 128, samples, "bf16", "cpu") for samples in (1, 8))
    assert cached_tokens(alone) == 32 * (4097 + 64)
    assert cached_tokens(shared) == 4 * 4096 + 32 * (1 + 64), (
        "all full pages are shared; the last token is each one's own"
    )


def test_windows_tell_what_whole_runs_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts the tokens in the cache of every step, both ways give the same rate."""
    case = DecodeCase("small", 4, 9, 40, 2, "fp32", "cpu")
    work = 0.0
    bench = DecodeBench(SHAPE, case, clock=lambda: work)
    launch = bench.decoder._device.launch

    def counted(batch, steps, **options):  # type: ignore[no-untyped-def]
        nonlocal work
        running = bench.decoder._schedule.running
        work += 100 + sum(running[slot].tokens_after(0) for slot in batch.slots)
        return launch(batch, steps, **options)

    monkeypatch.setattr(bench.decoder._device, "launch", counted)
    monkeypatch.setattr(decode_windows, "_WINDOW_S", 1e9)
    monkeypatch.setattr(decode_windows, "_TAIL_S", 20_000)
    whole, windows = bench.whole(), decode_windows.DecodeWindows(bench).measure()
    assert (whole.windows, windows.windows) == (0, 5)
    assert windows.rate == pytest.approx(whole.rate, rel=0.03)
    assert windows.heavy_tailed == pytest.approx(whole.heavy_tailed, rel=0.15)
    assert bench.decoder.idle
    assert bench.decoder.cache_share == 0.0


def test_a_long_run_is_measured_by_windows_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_windows, "_QUICK_S", 0.0)
    monkeypatch.setattr(decode_windows, "_TAIL_S", 0.2)
    case = DecodeCase("small", 8, 16, 32, 4, "fp32", "cpu")
    result = bench_decode(SHAPE, case)
    assert result.windows == 5
    assert 0 < result.share_of_floor < 1
    assert "windows at 5 lengths of answer" in describe_decode(result)
    assert bench_decode(SHAPE, case, by="whole").windows == 0


def test_windows_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_windows, "_TAIL_S", 0.2)
    case = DecodeCase("small", 8, 16, 32, 4, "fp32", "cpu", burst=2)
    assert bench_decode(SHAPE, case, by="windows").windows == 5
    with pytest.raises(InputError, match="32 tokens are too short for windows"):
        bench_decode(SHAPE, replace(case, burst=16), by="windows")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-3.2-1c"], "no model shape is named 'llama-3.2-1c'; did you mean 'llama-3.2-1b'?"),
        (["--model", "smollm2-135m", "--new", "9000"], "--new: 128 + 9000 tokens exceed the 8192 positions"),
        (["--device", "cuda:99"], "--device cuda:99: cannot be used here"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    done = llamarl("bench", "decode", *arguments)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
