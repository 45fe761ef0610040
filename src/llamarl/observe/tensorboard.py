"""Metrics for TensorBoard, when the config asks for it and the package is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from llamarl.config import ObserveConfig
from llamarl.errors import ConfigError


class Board(Protocol):
    def add(self, update: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class NoBoard:
    def add(self, update: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def add(self, update: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, update)

    def close(self) -> None:
        self._writer.close()


def make_board(settings: ObserveConfig, run_folder: Path) -> Board:
    return TensorBoard(run_folder / "tensorboard") if settings.tensorboard else NoBoard()


def check_board(settings: ObserveConfig) -> None:
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("observe.tensorboard: the package is missing; pip install 'llamarl[tensorboard]'")
