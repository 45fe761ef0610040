"""Calls of the user's code: plain functions and coroutines alike, with one exception for what it did wrong."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any


class AgentFailed(Exception):
    """The agent itself failed; its answers are not to blame."""


async def awaited(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The result of a function. Plain ones run in a thread, so that several can work at the same time."""
    called = function(*args, **named) if _is_async(function) else await asyncio.to_thread(function, *args, **named)
    return await called if inspect.isawaitable(called) else called


def _is_async(function: Callable[..., Any]) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, getattr(type(function), "__call__", None))))  # noqa: B004


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
