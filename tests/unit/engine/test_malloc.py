"""An executor does not fault its memory in anew for every product."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, sys
import numpy as np
if sys.argv[1] == "kept":
    from llamarl.engine.malloc import keep_freed_memory
    keep_freed_memory()
def work():
    parts = [np.ones(1 << 20, dtype=np.float32) for _ in range(4)]  # 4 MiB each
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def test_memory_that_was_freed_is_used_again() -> None:
    assert faults("kept") < 500, "50 times 16 MiB are 200,000 pages"
