"""What several tests of the local engine's processes ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llamarl.engine import supervision


@pytest.fixture(scope="module")
def restarts_without_delay() -> Iterator[None]:
    """Executors die here many times in a row; how long they would have to wait is a test of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "_MAX_BACKOFF_S", 0.0)
        yield
