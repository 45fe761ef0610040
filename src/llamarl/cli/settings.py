"""`llamarl config`: every setting with its default and meaning."""

from __future__ import annotations

from llamarl.config.file import describe


def config_command() -> None:
    """Print every setting with its default and meaning, as YAML to start from."""
    section = ""
    for key, default, meaning in describe():
        prefix, _, name = key.rpartition(".")
        if prefix != section:
            print(f"\n{prefix}:")
            section = prefix
        indent = "  " if prefix else ""
        print(f"{indent}{name}: {default}".ljust(36) + f"  # {meaning}")
