"""Settings as one flat mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from llamarl.config.job import Config
from llamarl.config.paths import with_absolute_paths


def flat_settings(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name, with absolute paths."""
    return _flat(msgspec.to_builtins(with_absolute_paths(config)), "")


def _flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
