"""Honest programs can do what programs do, behind every kind of walls; limits end those that exceed them."""

from __future__ import annotations

import json

import pytest
from helpers.sandboxes import score_under, works

from llamarl.tasks.sandbox.walls import Walls

LARGE = "\n".join(str(number) for number in range(50_000))
ANYWHERE = {
    "computes": ("print(sum(int(line) for line in open(0)))", LARGE, "1249975000"),
    "imports": (
        "import re, math, json, heapq, itertools, decimal, datetime, random, ctypes\nprint(math.comb(5, 2))",
        "",
        "10",
    ),
    "says as much as it may": ("print('x' * 16_383)", "", "x" * 16_383),
    "says unicode": ("print(input().upper())", "größe ✓", "GRÖSSE ✓"),
    "runs an event loop": ("import asyncio\nasync def f(): return 7\nprint(asyncio.run(f()))", "", "7"),
    "has a main": ("def main():\n    print('x')\nif __name__ == '__main__':\n    main()", "", "x"),
    "has dataclasses": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(3))",
        "",
        "A(x=3)",
    ),
    "exits with exit": ("print(3)\nexit()", "", "3"),
    "exits with quit": ("print(3)\nquit(0)\nprint(4)", "", "3"),
    "has late annotations": (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(3))",
        "",
        "A(x=3)",
    ),
    "exits early": ("import sys\nprint(3)\nsys.exit(0)\nprint(4)", "", "3"),
    "knows the time": ("import time\ntime.sleep(0.01)\nprint(time.time() > 1e9)", "", "True"),
    "signals itself": (
        "import os, signal\nsignal.signal(10, lambda *a: print('caught'))\nos.kill(os.getpid(), 10)",
        "",
        "caught",
    ),
}
THREADS = """
import threading
out = []
threads = [threading.Thread(target=out.append, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(out))
"""
FILES = """
import os
open("a", "w").write("hi")
os.rename("a", "b")
print(open("b").read())
"""
WITH_NAMESPACES = {
    "starts a process": ("import os\nif os.fork() == 0: os._exit(3)\nprint(os.wait()[1] >> 8)", "", "3"),
    "starts threads": (THREADS, "", "[0, 1, 2, 3]"),
    "writes and reads a file": (FILES, "", "hi"),
    "uses a temporary file": (
        "import tempfile\nwith tempfile.TemporaryFile() as f:\n    print(f.write(b'abc'))",
        "",
        "3",
    ),
}
BEYOND = {
    "sleep": ("import time\ntime.sleep(30)", "", ""),
    "memory": ("x = bytearray(1 << 27)\nprint(1)", "", "1"),
    "output": ("print('x' * 16_384)", "", "x" * 16_384),  # and the end of the line
    "exits badly": ("print(1)\nexit(1)", "", "1"),
    "errors": ("print(1)\nraise ValueError", "", "1"),
    "files": ("open('a', 'wb').write(bytes(5 << 20))\nprint(1)", "", "1"),
}


def cases(programs: dict[str, tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [
        (name, text, json.dumps([{"input": given, "output": wanted}]))
        for name, (text, given, wanted) in programs.items()
    ]


@pytest.mark.parametrize("walls", list(Walls))
def test_programs_do_what_they_are_for_and_no_more(walls: Walls) -> None:
    if not works(walls):
        pytest.skip(f"this machine does not allow: {walls.value}")
    found = score_under(walls, cases(ANYWHERE | WITH_NAMESPACES | BEYOND))
    wanted = dict.fromkeys(ANYWHERE, 1.0) | dict.fromkeys(WITH_NAMESPACES, float(walls.has_namespaces))
    assert found == wanted | dict.fromkeys(BEYOND, 0.0)


def test_a_program_becomes_nobody() -> None:
    """Without rights, without a name, in an empty folder."""
    walls = next((walls for walls in Walls if works(walls)), None)
    if walls is None:
        pytest.skip("no sandbox here")
    look = """
import os, ctypes
data, head = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 2)(0x20080522, 0)
ctypes.CDLL(None).capget(head, data)
print(list(data), os.getuid() > 0, os.getgroups() in ([], [65534]), os.environ.get("USER"))
"""
    assert score_under(walls, cases({"look": (look, "", "[0, 0, 0, 0, 0, 0] True True None")})) == {"look": 1.0}


def test_functions_are_called_and_what_they_return_is_held_against_what_is_expected() -> None:
    walls = next((walls for walls in Walls if works(walls)), None)
    if walls is None:
        pytest.skip("no sandbox here")
    source = "def f(a, b=1): return {'sum': a + b, 'pair': (a, b)}\ndef g(): raise ValueError\ndef h(): print('noise')"
    calls = {
        "right": [{"call": "f", "args": [1], "expected": {"sum": 2, "pair": [1, 1]}}],
        "by name": [{"call": "f", "args": [1], "kwargs": {"b": 2}, "expected": {"sum": 3, "pair": [1, 2]}}],
        "one of two wrong": [
            {"call": "f", "args": [1], "expected": {"sum": 2, "pair": [1, 1]}},
            {"call": "f", "args": [1], "expected": {"sum": 2, "pair": [1, 2]}},
        ],
        "raises": [{"call": "g", "expected": None}],
        "absent": [{"call": "nothing", "expected": None}],
        "none": [{"call": "h", "expected": None}],
    }
    found = score_under(walls, [(name, source, json.dumps(tests)) for name, tests in calls.items()])
    assert found == {"right": 1.0, "by name": 1.0, "one of two wrong": 0.0, "raises": 0.0, "absent": 0.0, "none": 1.0}


DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Point:
    x: int

def f(x):
    return Point(x).x + 1
"""
ENDS = {
    "late annotations": (DATACLASS, 1.0),
    "sys.exit": ("import sys\ndef f(x): return x + 1\nsys.exit(0)", 1.0),
    "exit": ("def f(x): return x + 1\nexit()", 1.0),
    "quit": ("def f(x): return x + 1\nquit()", 1.0),
    "before": ("exit()\ndef f(x): return x + 1", 0.0),
    "with an error": ("def f(x): return x + 1\nexit(1)", 0.0),
    "with words": ("def f(x): return x + 1\nexit('no')", 0.0),
    "in the call": ("def f(x): exit()", 0.0),
}


def test_a_program_may_end_itself_and_look_itself_up() -> None:
    walls = next((walls for walls in Walls if works(walls)), None)
    if walls is None:
        pytest.skip("no sandbox here")
    tests = json.dumps([{"call": "f", "args": [1], "expected": 2}])
    found = score_under(walls, [(name, source, tests) for name, (source, _) in ENDS.items()])
    assert found == {name: reward for name, (_, reward) in ENDS.items()}
