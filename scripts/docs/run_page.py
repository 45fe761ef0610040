"""Runs the code blocks of a page, top to bottom, in a fresh folder that has `examples/` in it.

    python scripts/docs/run_page.py docs/tutorials/01-first-run.md [--gpu] [--data FOLDER] [--show] [--keep FOLDER]

| block | what happens |
|---|---|
| `bash` | is run by `bash -e`, in the folder of the page |
| `console` | its lines that begin with `$ ` are run likewise; the others are expected output, checked like `output` |
| `python`, and every block with `title="NAME"` | without a title it is run as a script; with one it is written to that file |
| `output` | must be what the block before it printed, see below |
| `text`, or no language | is only shown |
| any other language without a title | is an error, unless a mark says that it is only shown |

A mark is a comment in the line above a block, which readers do not see:

    <!-- run: gpu -->             needs a GPU: skipped and counted, unless --gpu is given; finds --data as `data`
    <!-- run: no, the reason -->  only shown, and counted
    <!-- run: exit 2 -->          is expected to end with this code
    <!-- check: n[1] > n[0] -->   below `output`: must hold of `n`, the numbers printed where the block shows numbers

Expected output is compared loosely: any number stands for any other, any duration for any other, white space does not count,
and `...` stands for any text in its line or, alone in a line, for any lines. Lines before and after need not be shown.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = ("", "text")
BLOCK_LIMIT_S, GPU_BLOCK_LIMIT_S = 600, 1800

_FENCE = re.compile(r"^(`{3,})\s*([\w-]*)(.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_MARK = re.compile(r"^<!-- (run|check): (.*?) -->$")
_DURATION = r"\d+ h \d+ min|\d+ min \d+ s|\d+(?:\.\d+)? m?s\b"
_NUMBER = r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?"
_LOOSE = re.compile(rf"(?P<duration>{_DURATION})|(?P<number>{_NUMBER})|(?P<any>\.\.\.)")


class PageError(Exception):
    """What is wrong with a page, with the line where it is."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


@dataclass
class Block:
    """One fenced block; `line` is that of its opening fence."""

    line: int
    language: str
    title: str
    text: str
    marks: list[str]
    checks: list[tuple[int, str]] = field(default_factory=list)

    @property
    def only_shown(self) -> bool:
        return (self.language in SHOWN and not self.title) or any(mark.split(",")[0] == "no" for mark in self.marks)

    @property
    def exit_code(self) -> int:
        return next((int(mark.removeprefix("exit ")) for mark in self.marks if mark.startswith("exit ")), 0)


def blocks(text: str) -> Iterator[Block]:
    """Fenced blocks in order, with the marks around them."""
    lines, marks, last, at = text.splitlines(), list[str](), None, 0
    while at < len(lines):
        if mark := _MARK.match(lines[at]):
            if mark[1] == "run":
                marks.append(_known_mark(mark[2], at + 1))
            elif last is None or last.language not in ("output", "console"):
                raise PageError(at + 1, "a check must stand below a block of output")
            else:
                last.checks.append((at + 1, mark[2]))
        elif fence := _FENCE.match(lines[at]):
            end = next((row for row in range(at + 1, len(lines)) if lines[row].strip() == fence[1]), None)
            if end is None:
                raise PageError(at + 1, "this block is never closed")
            if last is not None:
                yield last
            title = _TITLE.search(fence[3])
            body = "\n".join(lines[at + 1 : end]) + "\n"
            last = Block(at + 1, fence[2], title[1] if title else "", body, marks)
            marks, at = [], end
        elif lines[at].strip() and marks:
            raise PageError(at + 1, "a mark must stand in the line above a block")
        at += 1
    if last is not None:
        yield last


def _known_mark(mark: str, line: int) -> str:
    if mark == "gpu" or re.fullmatch(r"no, \S.*|exit \d+", mark):
        return mark
    raise PageError(line, f"unknown mark {mark!r}; there are: gpu, 'no, REASON', exit N")


class Runner:
    """Runs the blocks of one page in `folder`. What they start in the background ends with `close`."""

    def __init__(self, folder: Path, *, gpu: bool, show: bool = False) -> None:
        self._folder, self._gpu, self._show = folder, gpu, show
        self._printed: str | None = None  # by the last block that ran; None: it was skipped, or there was none
        self._started: list[int] = []
        self.ran = self.skipped = 0
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(paths),
            "COLUMNS": "130",
            "NO_COLOR": "1",
        }

    def run(self, block: Block) -> None:
        if block.language == "output":
            self._compare(block, block.text)
        elif block.only_shown:
            self.skipped += bool(block.marks)
            self._printed = None
        elif "gpu" in block.marks and not self._gpu:
            self.skipped += 1
            self._printed = None
        elif block.title:
            self._write(block)
        elif block.language == "bash":
            self._execute(block, ["bash", "-e", "-c", block.text])
        elif block.language == "console":
            self._console(block)
        elif block.language == "python":
            (script := self._folder / f".line_{block.line}.py").write_text(block.text)
            self._execute(block, [sys.executable, script.name])
        else:
            raise PageError(
                block.line, f'a block of {block.language} needs title="FILE", or a mark that it is only shown'
            )

    def close(self) -> None:
        for group in self._started:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _write(self, block: Block) -> None:
        path = (self._folder / block.title).resolve()
        if not path.is_relative_to(self._folder.resolve()):
            raise PageError(block.line, f"{block.title} leads out of the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        self.ran += 1

    def _console(self, block: Block) -> None:
        lines = block.text.splitlines()
        commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        self._execute(block, ["bash", "-e", "-c", "\n".join(commands)])
        if expected := [line for line in lines if not line.startswith("$ ")]:
            self._compare(block, "\n".join(expected))

    def _execute(self, block: Block, command: Sequence[str]) -> None:
        """Output goes to a file, not a pipe: what the block leaves running may hold it open."""
        limit_s = GPU_BLOCK_LIMIT_S if "gpu" in block.marks else BLOCK_LIMIT_S
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._started.append(process.pid)
            try:
                code: int | str = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = f"none after {limit_s} s"
            output.seek(0)
            self._printed = output.read().decode(errors="replace")
        self.ran += 1
        if self._show:
            print(f"line {block.line}, exit code {code}:\n{self._printed}", flush=True)
        if code != block.exit_code:
            raise PageError(block.line, f"exit code {code}, expected {block.exit_code}\n{_indented(self._printed)}")

    def _compare(self, block: Block, expected: str) -> None:
        if self._printed is None:
            return  # of a block that was skipped
        pattern = _pattern(expected)
        found = pattern.search(_plain(self._printed))
        if found is None:
            line, printed = _first_missing(block, expected, self._printed), _indented(self._printed)
            raise PageError(line, f"this and what follows was not printed; printed was\n{printed}")
        numbers = [float(text.replace(",", "")) for text in found.groups()]
        for line, check in block.checks:
            _hold(line, check, numbers)


def _hold(line: int, check: str, numbers: list[float]) -> None:
    program = f"n = {numbers}\nassert {check}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PageError(line, f"does not hold: {check}, with n = {numbers}\n{_indented(done.stderr)}")


def _plain(text: str) -> str:
    """One blank for each run of blanks; no empty lines."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(["", *filter(None, lines), ""])


def _pattern(expected: str) -> re.Pattern[str]:
    """Matches output that looks like `expected`; its groups are the numbers."""
    parts = list[str]()
    for line in _plain(expected).strip("\n").split("\n"):
        parts.append(r"(?:.*\n)*?" if line == "..." else _line_pattern(line) + r" ?\n")
    return re.compile(r"(?<=\n)" + "".join(parts))


def _line_pattern(line: str) -> str:
    parts, at = list[str](), 0
    for found in _LOOSE.finditer(line):
        parts.append(re.escape(line[at : found.start()]))
        parts.append({"duration": f"(?:{_DURATION})", "number": f"({_NUMBER})", "any": ".*"}[str(found.lastgroup)])
        at = found.end()
    return "".join([*parts, re.escape(line[at:])])


def _first_missing(block: Block, expected: str, printed: str) -> int:
    """The line of the page with which the output stops being as expected."""
    lines, text = expected.splitlines(), _plain(printed)
    for count in range(1, len(lines) + 1):
        if _plain("\n".join(lines[:count])).strip() and not _pattern("\n".join(lines[:count])).search(text):
            shown = block.text.splitlines()
            return block.line + 1 + shown.index(lines[count - 1])
    return block.line


def _indented(text: str) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-60:])


def run_page(page: Path, folder: Path, *, gpu: bool, data: Path | None = None, show: bool) -> Runner:
    """Runs all blocks of a page. PageError says what went wrong, and where."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    if data is not None:
        (folder / "data").mkdir()  # its own, since pages make data beside these
        for one in data.resolve(strict=True).iterdir():
            (folder / "data" / one.name).symlink_to(one)
    runner = Runner(folder, gpu=gpu, show=show)
    try:
        for block in blocks(page.read_text()):
            runner.run(block)
    finally:
        runner.close()
    return runner


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the code blocks of a page, top to bottom.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--gpu", action="store_true", help="run the blocks that need a GPU too")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="what pages with GPU blocks read: gsm8k/ and math/")
    parser.add_argument("--show", action="store_true", help="print what every block prints")
    parser.add_argument("--keep", type=Path, help="new folder to run in, which is kept")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what a block has started ends too
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.keep or Path(temporary) / "page"
        folder.mkdir(parents=True)
        try:
            runner = run_page(options.page, folder.resolve(), gpu=options.gpu, data=options.data, show=options.show)
        except PageError as error:
            print(f"{options.page}:{error.line}: {error}", file=sys.stderr)
            return 1
    passed_s = time.monotonic() - started_s
    print(f"{options.page}: {runner.ran} blocks ran in {passed_s:.0f} s, {runner.skipped} were skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
