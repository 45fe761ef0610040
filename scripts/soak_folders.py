"""Soak test of run folders: second owners, full disks, live copies and damaged files, against whole jobs.

    python scripts/soak_folders.py [--rounds 10] [--seed 0] [--keep DIR]

Each round runs a small job while its folder is disturbed, and resumes it if it ends early. At the end the job must be
finished, with a clean audit and staleness within the bound. A second owner must be refused. A copy made while the job ran
must resume to a clean end or be refused in one line. Full disks need root for a small tmpfs; without it they are left out.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llamarl.controller.ledger import FINISHED, read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import InputError
from llamarl.io.record_log import segment_files

UPDATES, STALENESS = 40, 1
SETTINGS = (
    f"schedule.updates={UPDATES}",
    f"schedule.max_staleness={STALENESS}",
    "schedule.groups_per_update=8",
    "schedule.samples_per_group=4",
    "schedule.max_restarts=20",
    "generator.slots=64",
    "generator.threads=1",
    "trainer.threads=1",
    "snapshots.every=4",
    "evaluate.prompts=16",
)
DISK_MB = 96
RUN_S = 300.0
LLAMARL = (sys.executable, "-m", "llamarl.cli")
DERIVED = ("metrics.jsonl", "timings.jsonl", "evaluations.jsonl", "spans.jsonl", "starts.jsonl", "events.jsonl.gz")


class Round:
    """One job and the disturbances of its folder."""

    def __init__(self, folder: Path, chance: random.Random, done: Counter[str]) -> None:
        self.folder, self._chance, self._done = folder / "run", chance, done
        self._disk, self._copies = folder, list[Path]()
        self.wrong: list[str] = []
        self._job = self._start(*SETTINGS)

    def run(self, full_disks: bool) -> None:
        actions = [self._second_owner, self._copy, self._tear, self._freeze] + [self._fill_disk] * full_disks
        deadline_s = time.monotonic() + RUN_S
        while time.monotonic() < deadline_s:
            time.sleep(self._chance.uniform(0.5, 2.0))
            code = self._job.poll()
            if code == 0:
                break
            if code is not None:
                self._expect(code == 3, f"the job ended with {code}")
                self._resume()
            elif (self.folder / "snapshots").is_dir():
                self._chance.choice(actions)()
        self._job.kill()
        self._expect(self._job.wait() == 0, "the job did not end")
        self._check(self.folder)
        for copy in self._copies:
            self._resume_copy(copy)

    # Disturbances

    def _second_owner(self) -> None:
        self._done["second owners"] += 1
        second = self._llamarl("train", "--run", str(self.folder), "--resume", "--quiet")
        if (
            self._job.poll() is None and not self._finished
        ):  # otherwise it may rightly have continued the run, or had nothing to do
            refused = second.returncode == 2 and "is at work there" in second.stderr
            self._expect(refused, f"second owner: {second.returncode} {second.stderr}")

    def _freeze(self) -> None:
        self._done["frozen jobs"] += 1
        self._job.send_signal(signal.SIGSTOP)
        try:
            self._second_owner()
        finally:
            self._job.send_signal(signal.SIGCONT)

    def _fill_disk(self) -> None:
        self._done["full disks"] += 1
        filler = self._disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(self._chance.uniform(0.2, 1.5))
        filler.unlink()

    def _copy(self) -> None:
        self._done["live copies"] += 1
        copy = self._disk.parent / f"copy-{self._disk.name}-{len(self._copies)}"
        with suppress(shutil.Error):  # files may come and go during the copy
            shutil.copytree(self.folder, copy)
        self._copies.append(copy)

    def _tear(self) -> None:
        """Kill the job and damage its files: the end, the middle or all of a file; ledger and groups may lose their end."""
        self._job.kill()
        self._job.wait()
        self._done["kills"] += 1
        for name in self._chance.sample(DERIVED, 2):
            self._damage(self.folder / name, self._chance.choice(["end", "middle", "zeros", "gone"]))
        for name in ("ledger", "groups"):
            if self._chance.random() < 0.3 and (segments := segment_files(self.folder / name)):
                self._damage(segments[-1], "end")
        self._resume()

    def _damage(self, path: Path, how: str) -> None:
        if not path.is_file():
            return
        self._done[f"torn files ({how})"] += 1
        data = path.read_bytes()
        at = self._chance.randrange(len(data) + 1)
        match how:
            case "end":
                os.truncate(path, max(0, len(data) - self._chance.randrange(200)))
            case "middle":
                path.write_bytes(data[:at] + data[at + 30 :])
            case "zeros":
                path.write_bytes(data[:at] + bytes(40))
            case _:
                path.unlink()

    @property
    def _finished(self) -> bool:
        return audit(read_ledger(self.folder / "ledger")).closed == FINISHED

    # What must be true

    def _resume_copy(self, copy: Path) -> None:
        ended = self._llamarl("train", "--run", str(copy), "--resume", "--quiet")
        if ended.returncode == 0:
            self._done["copies that went on"] += 1
            self._check(copy)
        else:
            self._done["copies refused"] += 1
            one_line = ended.returncode == 2 and ended.stderr.count("\n") == 1
            self._expect(one_line, f"copy {copy.name}: {ended.returncode} {ended.stderr}")
        shutil.rmtree(copy)

    def _check(self, folder: Path) -> None:
        try:
            found = audit(read_ledger(folder / "ledger"))
        except InputError as error:
            self.wrong.append(f"{folder}: {error}")
            return
        self._expect(found.clean and found.updates == UPDATES, f"{folder}: the audit is not clean: {found}")
        self._expect(found.max_staleness <= STALENESS, f"{folder}: staleness {found.max_staleness}")
        replayed = self._llamarl("replay", str(folder))
        nothing_left = "nothing was left to compare" in replayed.stdout  # if the logs were damaged
        same = replayed.returncode == 0 or nothing_left or folder != self.folder
        self._expect(same, f"{folder}: replay: {replayed.stdout}{replayed.stderr}")

    def _expect(self, condition: bool, otherwise: str) -> None:
        if not condition:
            self.wrong.append(otherwise)

    def _start(self, *args: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*LLAMARL, "train", "--run", str(self.folder), "--quiet", *args], stderr=subprocess.DEVNULL
        )

    def _resume(self) -> None:
        self._job = self._start("--resume")

    def _llamarl(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*LLAMARL, *args], capture_output=True, text=True, timeout=RUN_S, check=False)


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small disk at `folder`; yields False if we lack the rights."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "llamarl", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the runs; without it they are removed")
    args = parser.parse_args()
    chance, done, wrong = random.Random(args.seed), Counter[str](), list[str]()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.rounds):
            with small_disk((args.keep or Path(temporary)) / f"round-{number}") as full_disks:
                one = Round((args.keep or Path(temporary)) / f"round-{number}", chance, done)
                one.run(full_disks)
                wrong += one.wrong
            print(f"round {number}: {'; '.join(one.wrong) or 'well'}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in sorted(done.items())))
    print(f"soak of folders {'FAILED' if wrong else 'passed'} after {time.monotonic() - started_s:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
