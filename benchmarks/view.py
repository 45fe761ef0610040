"""How fast is the page of a large run, and does an open page slow training down?

    python scripts/make_large_run.py /tmp/large && python benchmarks/view.py /tmp/large
    python benchmarks/view.py --training [--windows 8] [--window-s 20]

Large run: `llamarl view` is started as a user starts it, without the table of rollouts that it keeps. Time counts from the
first request (of the page itself, its scripts, its overview and its curves, one after the other) to the last byte of the
first view; where Playwright and Chromium are there, also from opening the address to the first view as it is drawn. Then
answers are opened at random, while the table is still being built and afterwards. Memory is the peak of the server.

Training: in one job, the page is open in every other window of time: a client asks what the page asks, as often. The times
of updates in windows with and without it are compared, and so is the processor time that the server takes. With a page open
in a browser on the same machine, the browser's own work comes on top.

Exits with 1 if a promise is broken: first view under 2 s, any answer under 0.5 s, under 500 MB, under 1% of a slowdown.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STATIC = ("", "uplot.css", "style.css", "uplot.js", "app.js", "api.js", "dom.js", "overview.js", "plot.js", "route.js")
CURVES = (
    "reward,staleness_mean,staleness_max,effective_sample_size,clipped_share,logprob_gap,zero_variance_share,truncated_share,"
    "answer_tokens,grad_norm,generated_per_s,trained_per_s,entropy,kl_behavior,lr"
)
WAITING = "waiting.generator,waiting.reward,waiting.trainer"
FIRST_VIEW_S, ANSWER_S, MEMORY_MB, SLOWDOWN = 2.0, 0.5, 500.0, 0.01


class Client:
    """Asks what a browser asks, over one connection that stays open."""

    def __init__(self, url: str) -> None:
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?key=(\S+)", url)
        assert match, url
        self.url = url
        self._connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=120)
        self._headers = {"Cookie": f"llamarl-view-{match[1]}={match[2]}"}

    def get(self, path: str) -> bytes:
        self._connection.request("GET", f"/{path}", headers=self._headers)
        reply = self._connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{path}: {reply.status} {body[:200]!r}")
        return body

    def json(self, path: str) -> Any:
        return json.loads(self.get(f"api/{path}"))

    def first_view(self) -> None:
        for name in STATIC:
            self.get(name)
        self.json("live")
        self.overview()

    def overview(self) -> None:
        self.json("run/0/overview")
        self.json(f"run/0/series?names={CURVES}&points=500")

    def waiting(self) -> None:
        self.json(f"run/0/series?names={WAITING}&points=500")


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[Client, int]]:
    """`llamarl view` in a process of its own: a client of it, and its number."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llamarl", "view", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    try:
        yield Client(line), process.pid
    finally:
        process.terminate()
        process.wait(30)


def in_browser(folder: Path) -> float:
    """Seconds from opening the address in Chromium until the first view is drawn; 0 without Playwright or Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return 0.0
    if chromium is None:
        return 0.0
    with server(folder) as (client, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto("about:blank")
        began_s = time.monotonic()
        page.goto(client.url)
        page.wait_for_selector("#page[data-ready]")
        found_s = time.monotonic() - began_s
        browser.close()
        return found_s


def peak_mb(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1000 if found else 0.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(client: Client, path: str) -> float:
    began_s = time.monotonic()
    client.json(path)
    return time.monotonic() - began_s


def large(folder: Path) -> dict[str, float]:
    for table in folder.resolve().parent.glob(f".{folder.resolve().name}.llamarl-view.db*"):
        table.unlink()
    browser_s = in_browser(folder)
    choose = random.Random(0)
    with server(folder) as (client, pid):
        began_s = time.monotonic()
        client.first_view()
        first_s = time.monotonic() - began_s
        client.waiting()
        whole_s = time.monotonic() - began_s
        kept = client.json("run/0/overview")["updates"]
        groups = kept * client.json("run/0/audit")["num_groups"] // kept
        cold = [timed(client, f"run/0/rollout?ordinal={choose.randrange(groups)}&sample=1") for _ in range(30)]
        while client.json("live")[0]["indexed"] < 1.0:
            time.sleep(0.5)
        built_s = time.monotonic() - began_s
        warm = [timed(client, f"run/0/rollout?ordinal={choose.randrange(groups)}&sample=1") for _ in range(200)]
        views = {
            "table": timed(client, "run/0/rollouts?limit=50"),
            "table of one update": timed(client, f"run/0/rollouts?update={kept // 2}&limit=50"),
            "table by reward": timed(client, "run/0/rollouts?sort=reward&limit=50"),
            "histograms": timed(client, "run/0/histograms"),
            "search, one step": timed(client, "run/0/rollouts?text=12345&limit=50"),
            "timeline": timed(client, "run/0/timeline?bins=600"),
            "audit": timed(client, "run/0/audit"),
            "lives": timed(client, "run/0/groups"),
        }
        return {
            "first view, s": first_s,
            "first view, drawn in Chromium, s": browser_s,
            "with the curve of who waits, s": whole_s,
            "an answer while the table is built, largest of 30, s": max(cold),
            "table built after, s": built_s,
            "an answer, median of 200, s": statistics.median(warm),
            "an answer, largest of 200, s": max(warm),
            **{f"{name}, s": seconds for name, seconds in views.items()},
            "peak memory of the server, MB": peak_mb(pid),
        }


def training(windows: int, window_s: float) -> dict[str, float]:
    """One job; the page is open in every other window of time."""
    folder = Path(tempfile.mkdtemp()) / "run"
    job = ["train", "schedule.updates=100000", "evaluate.every=0", "snapshots.every=0", "--run", str(folder), "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "llamarl", *job])
    try:
        while not (folder / "metrics.jsonl").exists() or len(update_times(folder)) < 3:
            time.sleep(0.5)
        spent, open_spans = 0.0, []
        with server(folder) as (client, pid):
            client.first_view()
            for window in range(windows):
                began_s, from_s, stamp = time.monotonic(), last_at_s(folder), ""
                before_s = cpu_s(pid)
                while time.monotonic() - began_s < window_s:
                    if window % 2:
                        now = client.json("live")[0]["stamp"]
                        if now != stamp:
                            client.overview()
                            client.waiting()
                            stamp = now
                    time.sleep(2.0)
                if window % 2:
                    spent += cpu_s(pid) - before_s
                    open_spans.append((from_s, last_at_s(folder)))
            memory = peak_mb(pid)
        times = update_times(folder)[3:]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        shutil.rmtree(folder.parent, ignore_errors=True)
    with_page = [update_s for at_s, update_s in times if any(a < at_s <= b for a, b in open_spans)]
    without = [update_s for at_s, update_s in times if not any(a < at_s <= b for a, b in open_spans)]
    share = spent / (window_s * (windows // 2) * (os.cpu_count() or 1))
    return {
        "updates with the page open": len(with_page),
        "updates without": len(without),
        "an update with the page open, median s": statistics.median(with_page),
        "an update without, median s": statistics.median(without),
        "standard error of a median, s": 1.25 * statistics.stdev(without) / len(without) ** 0.5,
        "processor time of the server, share of the machine": share,
        "peak memory of the server, MB": memory,
    }


def update_times(folder: Path) -> list[tuple[float, float]]:
    try:
        rows = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return [(row["at_s"], row["update_s"]) for row in rows if "update" in row]


def last_at_s(folder: Path) -> float:
    times = update_times(folder)
    return times[-1][0] if times else 0.0


def broken(found: dict[str, float]) -> list[str]:
    promises = {
        "first view, s": FIRST_VIEW_S,
        "first view, drawn in Chromium, s": FIRST_VIEW_S,
        "an answer while the table is built, largest of 30, s": ANSWER_S,
        "an answer, largest of 200, s": ANSWER_S,
        "peak memory of the server, MB": MEMORY_MB,
        "processor time of the server, share of the machine": SLOWDOWN,
    }
    return [
        f"{name}: {found[name]:.3f}, promised {most}" for name, most in promises.items() if found.get(name, 0) > most
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not asked.training and asked.folder is None:
        parser.error("name a run folder, or --training")
    found = training(asked.windows, asked.window_s) if asked.training else large(asked.folder)
    for name, value in found.items():
        print(f"{name:<56} {value:>10.4g}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    if lines := broken(found):
        print("\n".join(lines))
        sys.exit(1)


if __name__ == "__main__":
    main()
