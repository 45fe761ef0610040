"""The engine for tests with real processes: `local`, or the one in $LLAMARL_TEST_ENGINE (`make test-monarch-long`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llamarl.engine.local.engine import LocalEngine

if TYPE_CHECKING:
    from llamarl.engine.monarch.engine import MonarchEngine

ENGINE = os.environ.get("LLAMARL_TEST_ENGINE", "local")


def engine_class() -> type[LocalEngine] | type[MonarchEngine]:
    if ENGINE == "local":
        return LocalEngine
    from llamarl.engine.monarch.engine import MonarchEngine

    return MonarchEngine
