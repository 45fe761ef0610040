"""Ten thousand connections that say nothing: does the server still answer, and what do they cost it?

llamarl serve tiny --port 8000 &
python benchmarks/many_connections.py 8000 PID
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path

CONNECTIONS = 10_000


def memory_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def answer_s(port: int) -> float:
    """Time of one whole answer on a new connection."""
    start_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "12+34=", "max_tokens": 4}))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read()
    connection.close()
    return time.monotonic() - start_s


def main(port: int, pid: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * CONNECTIONS), hard))
    print(f"alone: an answer in {answer_s(port) * 1e3:.0f} ms, memory {memory_mib(pid):.0f} MiB")
    start_s = time.monotonic()
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(CONNECTIONS)]
    took_s = time.monotonic() - start_s
    slowest = max(answer_s(port) for _ in range(10))
    print(f"{len(crowd)} silent connections, opened in {took_s:.1f} s: slowest of 10 answers {slowest * 1e3:.0f} ms, "
          f"memory {memory_mib(pid):.0f} MiB")  # fmt: skip
    for one in crowd:
        one.settimeout(120)
        assert one.recv(1) == b"", "the server did not give it up"
        one.close()
    print(f"all given up by the server; an answer in {answer_s(port) * 1e3:.0f} ms, memory {memory_mib(pid):.0f} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
