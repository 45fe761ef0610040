"""Runs that claims are read from. One that has been made is not made again, so claims share runs and a broken-off series
of them goes on with the next.

    arm = Arm("async")                          # examples/gsm8k_qwen.yaml as it stands
    record = made(arm, options)                 # runs `llamarl train`, the GPU watched beside it

`options` come from the command line of a claim (`read_options`): where runs and results lie, and KEY=VALUE settings for
every arm, such as the folders of model and data. Claims that read learning, not time, may make several runs at a time on
one GPU (`side_by_side`, --beside N): while one starts, compiles or saves, another computes; with --mps, also while kernels
of one leave room. `--tiny` makes every run a small
one of arithmetic on a CPU, to see a script work to its end before a GPU is paid for. `--small`, where a claim has it, is a
measurement: the same question asked with a small model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

from watch import GpuWatch, gpu_name

from llamarl.engine.local.mps import MpsDaemon
from llamarl.errors import JobFailed
from llamarl.observe.display import format_seconds
from llamarl.observe.run_lock import is_locked

ROOT = Path(__file__).parents[2]
GSM8K = ROOT / "examples" / "gsm8k_qwen.yaml"
MATH = ROOT / "examples" / "math_qwen.yaml"
ARITHMETIC = ROOT / "examples" / "arithmetic.yaml"
SMOLLM2 = ROOT / "examples" / "smollm2_arithmetic.yaml"


@dataclass(frozen=True)
class Arm:
    name: str
    settings: tuple[str, ...] = ()
    config: Path = GSM8K

    def beginning_with(self, model: str | Path) -> Arm:
        """The same with a model of its own, whatever the others begin with."""
        return replace(self, settings=(*self.settings, f"model.path={model}"))


ASYNC = Arm("async")
SYNC = Arm(
    "sync",
    (
        "placement=colocated",
        "schedule.max_staleness=0",
        "schedule.updates=20",
        "evaluate.prompts=0",
        "evaluate.every=0",
    ),
)


# Of --small: additions by the tiny model, half a minute on two cores, and the same at every run.
SMALL = (
    "schedule.deterministic=true",
    "schedule.updates=50",
    "trainer.lr=3e-5",  # at the example's own 8e-5, 4 updates lead too far away for any correction
    "evaluate.every=0",
    "evaluate.prompts=512",
    "snapshots.at_end=none",
)


# Of --tiny: 24 updates are as many as the windows of all claims need.
TINY = (
    "model.path=tiny",
    "task.kind=arithmetic",
    "task.path=''",
    "task.chat=false",
    "task.template=''",
    "reward.scorer=auto",
    "reward.answer_from=auto",
    "reward.pattern=''",
    "reward.workers=1",
    "generator.threads=1",
    "generator.slots=32",
    "generator.kv_pages=0",
    "generator.max_prompt_tokens=128",
    "generator.max_new_tokens=8",
    "trainer.threads=1",
    "trainer.warmup_updates=0",
    "schedule.updates=24",
    "schedule.groups_per_update=4",
    "schedule.samples_per_group=4",
    "schedule.window=1",
    "evaluate.split=held_out",
    "evaluate.prompts=16",
)
TINY_DATA = ROOT / "tests" / "data"

Figures = Mapping[str, Any]  # what a claim has measured, as its JSON file holds it
Made = TypeVar("Made")
Key = TypeVar("Key", bound=Hashable)
_SAYING = threading.Lock()


@dataclass
class Options:
    runs: Path
    results: Path
    settings: tuple[str, ...]
    at_most: int  # runs that may still be made
    math: Path  # folder of MATH, with MATH-500 as its test.jsonl
    beside: int = 1  # runs at a time
    mps: bool = False  # whether one daemon of NVIDIA's MPS serves all runs that are made at a time
    updates: int = 0  # of runs that are made in stages; 0: as many as the claim says
    stage: int = 0  # updates of a stage; 0: as the claim says
    tiny: bool = False  # whether only the script is tried
    small: bool = False  # whether the claim is measured with a small model, on a CPU
    command: tuple[str, ...] = ()  # what the figures say that they were made with
    made_on: dict[str, Any] = field(default_factory=dict)  # when and on what the runs that are read were made
    to_make: int = 0  # runs of this claim that are still to be made, as far as it has said
    took_s: list[float] = field(default_factory=list)  # seconds of those that this command made
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, what: str) -> None:
        """Called before anything long, so that a series of runs can be spread over several commands."""
        with self._lock:
            if not self.at_most:
                sys.exit(f"{what}: is the next to be made; the same command goes on with it")
            self.at_most -= 1

    def expect(self, *names: str) -> None:
        """What the claim is about to make, so that the end of each run can tell how long the others will take."""
        self.to_make = sum(not _finished(self.runs / name) for name in names)

    def ended(self, name: str, seconds: float) -> None:
        """Tell how long a run took, and the rest at that rate."""
        with self._lock:
            self.took_s.append(seconds)
            self.to_make = max(0, self.to_make - 1)
            left_s = self.to_make * sum(self.took_s) / len(self.took_s) / self.beside
        rest = f"; {self.to_make} more, about {format_seconds(left_s)} left" if self.to_make else ""
        _say(f"== {name}: took {format_seconds(seconds)}{rest}")

    def chosen(self, key: str, default: str) -> str:
        """What the command line says about a setting."""
        found = [one.partition("=")[2] for one in self.settings if one.startswith(f"{key}=")]
        return found[-1] if found else default


def side_by_side(chains: Sequence[Callable[[], Made]], options: Options) -> list[Made]:
    """The results of all, in order, `--beside` of them under way at a time. One that fails leaves the others alone, and is
    told of when they have ended."""
    with _one_daemon(options) if options.mps else nullcontext(), ThreadPoolExecutor(options.beside) as pool:
        ended = [pool.submit(chain) for chain in chains]
    if failed := [str(one.exception()) for one in ended if one.exception() is not None]:
        sys.exit("\n".join(failed))
    return [one.result() for one in ended]


@contextmanager
def _one_daemon(options: Options) -> Iterator[None]:
    """Every run finds the daemon by the variables that it inherits, and says so when it begins."""
    options.runs.mkdir(parents=True, exist_ok=True)
    try:
        daemon = MpsDaemon(options.runs / "mps.log")
    except JobFailed as error:
        sys.exit(str(error))
    before = {name: os.environ.pop(name, None) for name in daemon.environment}
    os.environ.update(daemon.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        daemon.stop()


def made_all(arms: Mapping[Key, Arm], options: Options) -> dict[Key, Record]:
    """The run of every arm, `--beside` of them at a time."""
    options.expect(*(arm.name for arm in arms.values()))
    records = side_by_side([partial(made, arm, options) for arm in arms.values()], options)
    return dict(zip(arms, records, strict=True))


def llamarl(name: str, command: Sequence[str], options: Options) -> int:
    """Its exit status. Of several at a time, every line of output says whose it is."""
    _say(f"== {name}: llamarl {' '.join(command)}")
    whole = [sys.executable, "-m", "llamarl.cli", *command]
    if options.beside == 1:
        return subprocess.run(whole, check=False).returncode
    if command[0] == "train" and not options.mps:
        whole += ["engine.mps=off"]  # jobs beside each other would each start a daemon
    with subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            _say(f"{name}: {line.rstrip()}")
    return process.returncode


def _say(line: str) -> None:
    """Whole: `print` writes a line and its end apart, and another thread's line may come between them."""
    with _SAYING:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def claim_parser(description: str | None, *, small: str = "") -> argparse.ArgumentParser:
    """The options that all claims have; one may add its own. `small`: what the claim measures without a GPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs (runs/claims; with --tiny: runs/tiny)")
    parser.add_argument(
        "--results",
        type=Path,
        help="where JSON and plot go (benchmarks/claims/results; with --tiny: the folder of the runs)",
    )
    parser.add_argument(
        "--math", type=Path, default=Path("data/math"), help="folder of MATH, for claims that ask MATH-500 too"
    )
    parser.add_argument(
        "--at-most", type=int, default=10_000, metavar="N", help="stop after N runs; the same command goes on"
    )
    parser.add_argument(
        "--beside", type=int, default=1, metavar="N", help="N at a time, where learning is read and not time"
    )
    parser.add_argument(
        "--mps",
        action="store_true",
        help="with --beside: one daemon of NVIDIA's MPS serves all that are made at a time",
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=0,
        metavar="N",
        help="updates of runs that are made in stages; 0: as the claim says",
    )
    parser.add_argument(
        "--stage", type=int, default=0, metavar="N", help="updates of each of these stages; 0: as the claim says"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="try the script: the tiny model does sums on a CPU; its figures say nothing"
    )
    if small:
        parser.add_argument("--small", action="store_true", help=f"measure it on a CPU: {small}")
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings for every run, such as model.path=..."
    )
    return parser


def options_of(args: argparse.Namespace) -> Options:
    """From the command line, parsed by a `claim_parser`."""
    runs = args.runs or Path("runs/tiny" if args.tiny else "runs/claims")
    results = args.results or (runs if args.tiny else Path(__file__).parent / "results")
    results.mkdir(parents=True, exist_ok=True)
    settings = (*TINY, *args.settings) if args.tiny else tuple(args.settings)
    updates = args.updates or (2 if args.tiny else 0)
    return Options(
        runs=runs,
        results=results,
        settings=settings,
        at_most=args.at_most,
        math=args.math,
        beside=args.beside,
        mps=args.mps,
        updates=updates,
        stage=args.stage,
        tiny=args.tiny,
        small=getattr(args, "small", False),
        command=_as_asked(),
    )


def _as_asked() -> tuple[str, ...]:
    """The command line without where runs and results lie, which figures do not depend on."""
    words, kept = iter(sys.argv[1:]), list[str]()
    for word in words:
        if word in ("--runs", "--results"):
            next(words, None)
        elif not word.startswith(("--runs=", "--results=")):
            kept.append(word)
    return tuple(kept)


def read_options(description: str | None, *, small: str = "") -> Options:
    return options_of(claim_parser(description, small=small).parse_intermixed_args())


@dataclass(frozen=True)
class Window:
    """Updates from `first` to `last`, and the seconds of the run in which they were made."""

    first: int
    last: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def update_s(self) -> float:
        return self.seconds / (self.last - self.first + 1)


class Record:
    """The run folder of an arm, read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        timings = _rows(folder / "timings.jsonl")
        self.updates = {row["update"]: row for row in timings if "update" in row}
        self.metrics = {row["update"]: row for row in _rows(folder / "metrics.jsonl") if row["role"] == "trainer"}
        self.accuracy = {row["version"]: row["accuracy"] for row in _rows(folder / "evaluations.jsonl")}
        self.transfers = [row for row in timings if "version" in row]

    @property
    def alone(self) -> bool:
        """Whether it had the machine to itself: the times of others say nothing."""
        return not _beside_file(self.folder).exists()

    def mean(self, metric: str) -> float:
        """Over all updates that have it."""
        found = [row[metric] for row in self.metrics.values() if metric in row]
        return float(sum(found) / max(1, len(found)))

    def window(self, first: int, last: int) -> Window:
        return Window(first, last, self.updates[first - 1]["at_s"], self.updates[last]["at_s"])

    def minutes(self, version: int) -> float:
        """Of training, until this version was made."""
        start_s = self.updates[0]["at_s"] - self.updates[0]["update_s"]
        return (self.updates[version - 1]["at_s"] - start_s) / 60 if version else 0.0

    def answer_tokens(self, window: Window) -> float:
        """Generated for one update, on average."""
        rows = [self.metrics[update] for update in range(window.first, window.last + 1)]
        return float(sum(row["answer_tokens"] * row["completions"] for row in rows) / len(rows))

    def waiting(self, executor: str, window: Window) -> float:
        """The share of the window in which the executor had nothing to do, from the run's timeline."""
        rows = json.loads((self.folder / "timeline.json").read_text())["traceEvents"]
        track = next(row["tid"] for row in rows if row["ph"] == "M" and row["args"]["name"] == executor)
        waits = [row for row in rows if row["ph"] == "X" and row["tid"] == track and row["cat"] == "wait"]
        spans = ((row["ts"] / 1e6, (row["ts"] + row["dur"]) / 1e6) for row in waits)
        idle_s = sum(max(0.0, min(end, window.end_s) - max(start, window.start_s)) for start, end in spans)
        return float(idle_s / window.seconds)

    def gpu_idle(self, window: Window) -> float | None:
        """The share of the window in which no kernel ran, by the driver's own count; None without a GPU."""
        samples = GpuWatch.read(_watch_file(self.folder))
        begun = self.summary["started_at"]
        within = [busy for at, busy in samples if window.start_s < at - begun < window.end_s]
        return 1.0 - sum(within) / len(within) if within else None


def made(arm: Arm, options: Options) -> Record:
    """The run of an arm. One that was broken off is made anew: its clock starts once."""
    folder = options.runs / arm.name
    settings = [*arm.settings, *options.settings]
    _check(folder, settings)
    if not _finished(folder):
        options.begin(arm.name)
        _remove(folder)
        _run(arm, folder, settings, options)
    if _made_on_file(folder).exists():
        options.made_on = json.loads(_made_on_file(folder).read_text())
    return Record(folder)


def made_in_stages(arm: Arm, updates: int, each: int, options: Options) -> Record:
    """A run too long for one command, in stages of so many updates each: every one goes on from the last snapshot of the one
    before. Times say nothing then, since each stage starts anew; a stage that was broken off is made again from there."""
    folder, settings = options.runs / arm.name, [*arm.settings, *options.settings]
    _check(folder, settings)
    ends = [until for until in (*range(each, updates, each), updates) if until > _updates_of(folder)]
    options.to_make = max(options.to_make, len(ends))
    for until in ends:
        name = f"{arm.name}, updates to {until}"
        options.begin(name)
        begun = ["--resume"] if _snapshots(folder) else []
        if not begun:
            _remove(folder)
        _begin_folder(folder, settings)
        command = ["train", str(arm.config), *settings, f"schedule.updates={until}", "--run", str(folder), *begun]
        _train(name, folder, command, options)
    options.made_on = json.loads(_made_on_file(folder).read_text())
    return Record(folder)


def _snapshots(folder: Path) -> list[Path]:
    """Whole ones: others have no number as their name."""
    return [one for one in folder.glob("snapshots/*") if one.name.isdigit()]


def _updates_of(folder: Path) -> int:
    """Updates of a run that has finished, or finished a stage."""
    summary = folder / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {"outcome": ""}
    return int(found["updates"]) if found["outcome"] == "finished" else 0


def _finished(folder: Path) -> bool:
    return _updates_of(folder) > 0


def over_updates(record: Record, metric: str, every: int) -> list[tuple[int, float]]:
    """Means of a metric over so many updates each, at the last of them."""
    rows = [(update, row[metric]) for update, row in sorted(record.metrics.items()) if metric in row]
    parts = [rows[start : start + every] for start in range(0, len(rows), every)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _check(folder: Path, settings: Sequence[str]) -> None:
    """A run is taken for this arm only if it was made with the same settings."""
    made_with = _settings_file(folder)
    if folder.exists() and (not made_with.exists() or json.loads(made_with.read_text()) != list(settings)):
        sys.exit(f"{folder}: was made with other settings; remove it, or name another folder with --runs")


def _remove(folder: Path) -> None:
    """A run that was broken off; not one that another process is still making."""
    if not folder.exists():
        return
    if is_locked(folder):
        sys.exit(f"{folder}: another process is making this run; wait for it, or end it")
    _say(f"== {folder}: was broken off; it is made anew")
    shutil.rmtree(folder)


def _begin_folder(folder: Path, settings: Sequence[str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _settings_file(folder).write_text(json.dumps(list(settings)))
    _made_on_file(folder).write_text(json.dumps(_here()))


def _run(arm: Arm, folder: Path, settings: Sequence[str], options: Options) -> None:
    _begin_folder(folder, settings)
    alone = options.beside == 1
    if not alone:
        _beside_file(folder).write_text(f"{options.beside}\n")
    _watch_file(folder).unlink(missing_ok=True)
    with GpuWatch(_watch_file(folder)) if alone else nullcontext():
        _train(arm.name, folder, ["train", str(arm.config), *settings, "--run", str(folder)], options)


def _train(name: str, folder: Path, command: Sequence[str], options: Options) -> None:
    begun_s = time.monotonic()
    if llamarl(name, command, options):
        sys.exit(f"{name}: the run failed; its logs lie in {folder / 'logs'}")
    options.ended(name, time.monotonic() - begun_s)


def _settings_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.settings.json")


def keep(name: str, options: Options, figures: Figures, picture: Callable[[Figures], str]) -> None:
    """Write JSON and plot of a claim, with its command and the machine that it was measured on, even if that was another.

    The plot is drawn from the figures as the JSON has them. Without matplotlib it is left out, since redraw.py can draw it
    elsewhere."""
    command, name = " ".join(["python", str(Path(sys.argv[0])), *options.command]), name + "_small" * options.small
    where = {**(options.made_on or _here()), "command": command}
    text = json.dumps({**where, **figures}, indent=2) + "\n"
    (options.results / f"{name}.json").write_text(text)
    if find_spec("matplotlib") is None:
        print(
            "no plot: matplotlib is missing; benchmarks/claims/redraw.py draws it where there is one", file=sys.stderr
        )
    else:
        (options.results / f"{name}.svg").write_text(picture(json.loads(text)))


def as_figures(window: Window) -> dict[str, Any]:
    return {**asdict(window), "update_s": window.update_s}


def _here() -> dict[str, Any]:
    return {"date": date.today().isoformat(), "gpu": gpu_name(), "versions": _versions()}


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for package in ("llamarl", "torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _made_on_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.made_on.json")


def _beside_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.beside")


def _watch_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.gpu.jsonl")


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
