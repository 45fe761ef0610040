"""Builds the role that passes rows of data on."""

from __future__ import annotations

from llamarl.builders.context import BuildContext
from llamarl.executors.executor import Executor
from llamarl.executors.rows import RowReader


def build_rows(context: BuildContext) -> Executor:
    return RowReader(context.config.schedule.groups_per_update)
