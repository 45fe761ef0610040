"""Keys and values renamed since the last release. The old spelling is read for one more release, with a notice."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

KEYS = {"generator.quantise": "generator.quantize"}
VALUES = {("algo.overlong", "penalise"): "penalize"}


def new_name(key: str) -> str:
    """Today's name of a key; prints a notice if the key was renamed."""
    if key in KEYS:
        _tell(f"{key} is now {KEYS[key]}; the old name is read for one more release")
    return KEYS.get(key, key)


def with_new_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings in today's spelling. A setting given under both names keeps both; the old one is then unknown."""
    renamed = {section: dict(found) if isinstance(found, dict) else found for section, found in raw.items()}
    for old, new in KEYS.items():
        (section, old_key), (_, new_key) = old.split("."), new.split(".")
        found = renamed.get(section)
        if isinstance(found, dict) and old_key in found and new_key not in found:
            new_name(old)
            found[new_key] = found.pop(old_key)
    for (key, old), new in VALUES.items():
        section, name = key.split(".")
        found = renamed.get(section)
        if isinstance(found, dict) and found.get(name) == old:
            found[name] = new
            _tell(f"{key}={old} is now {key}={new}; the old spelling is read for one more release")
    return renamed


@functools.cache  # prints each line once, however often the settings are read
def _tell(line: str) -> None:
    print(line, file=sys.stderr)
