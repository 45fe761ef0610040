"""`llamarl config`: every setting with its default and meaning."""

from __future__ import annotations

from llamarl.config.file import describe


def config_command() -> None:
    """Print every setting with its default and meaning, as YAML to start from."""
    shown: list[str] = []
    for key, default, meaning in describe():
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if shown[: depth + 1] != sections[: depth + 1]:
                print("\n" * (depth == 0) + f"{'  ' * depth}{section}:")
                shown = sections[: depth + 1]
        print(f"{'  ' * len(sections)}{name}: {default}".ljust(36) + f"  # {meaning}")
