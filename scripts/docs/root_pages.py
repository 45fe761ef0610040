"""For mkdocs: CHANGELOG.md and CONTRIBUTING.md become pages of the site, with their links as seen from docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[2]
_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for name, source in _PAGES.items():
        files.append(File.generated(config, name, content=from_docs((_ROOT / source).read_text())))
    return files


def from_docs(text: str) -> str:
    """The text with its links as a page of docs/ would have them."""
    return _LINK.sub(lambda found: f"]({_moved(found[1])})", text)


def _moved(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
