"""Counters of a server, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter, defaultdict

from llamarl.serve.backend import Backend


class Metrics:
    """What one server has done so far; used on the event loop only."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # answered requests by path and status
        self.prompt_tokens = self.sampled_tokens = self.answers = 0
        self.cancelled = 0  # requests whose client went away
        self.in_flight = 0  # requests being answered
        self.seconds: defaultdict[str, float] = defaultdict(float)  # time to the last byte, summed by path

    def to_text(self, backend: Backend) -> str:
        stats = backend.stats
        plain = [
            ("prompt_tokens_total", "counter", "Tokens of prompts that were asked.", self.prompt_tokens),
            ("sampled_tokens_total", "counter", "Tokens sampled for clients.", self.sampled_tokens),
            ("answers_total", "counter", "Answers that were finished.", self.answers),
            ("cancelled_requests_total", "counter", "Requests whose client went away.", self.cancelled),
            ("requests_in_flight", "gauge", "Requests being answered.", self.in_flight),
            ("answers_running", "gauge", "Answers being sampled.", stats.running),
            ("answers_waiting", "gauge", "Answers that wait for a slot.", stats.waiting),
            ("kv_cache_share", "gauge", "Share of the KV cache in use.", stats.cache_share),
            ("weight_version", "gauge", "Newest version of the policy.", backend.version),
        ]
        lines = [line for row in plain for line in _metric(*row)]
        lines += _head("requests_total", "counter", "Requests answered, by path and status.")
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'llamarl_requests_total{{path="{path}",status="{status}"}} {count}')
        lines += _head("request_seconds_total", "counter", "Time from a request's headers to its last byte, by path.")
        for path, seconds in sorted(self.seconds.items()):
            lines.append(f'llamarl_request_seconds_total{{path="{path}"}} {seconds:.6f}')
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP llamarl_{name} {about}", f"# TYPE llamarl_{name} {kind}"]


def _metric(name: str, kind: str, about: str, value: float) -> list[str]:
    return [*_head(name, kind, about), f"llamarl_{name} {value}"]
