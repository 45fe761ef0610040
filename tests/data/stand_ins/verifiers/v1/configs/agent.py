"""Settings of one agent of an environment."""

from __future__ import annotations


class AgentConfig:
    harness = None
