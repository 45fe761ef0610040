"""For mkdocs: links from a page of docs/ to other files of the repository, if the file is there.

Pages are read in the repository, where such links work. On the site, images come along and other files are plain names.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[2]
_OUTWARD = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
_FIGURES = "figures"
_log = logging.getLogger("mkdocs.hooks.links")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for image in sorted((_ROOT / "benchmarks" / "claims" / "results").glob("*.svg")):
        files.append(File.generated(config, f"{_FIGURES}/{image.name}", abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = (_ROOT / "docs" / page.file.src_uri).parent

    def named(found: re.Match[str]) -> str:
        target = (folder / found[3]).resolve()
        if not target.exists() and not _generated(target):
            _log.warning("%s: links to %s, which is not there", page.file.src_uri, found[3])
        if target.is_relative_to(_ROOT / "docs"):
            return found[0]
        path = target.relative_to(_ROOT)
        if found[1]:
            figure = _ROOT / "docs" / _FIGURES / path.name
            return f"![{found[2]}]({os.path.relpath(figure, folder)})"
        return f"{found[2]} (`{path}`)" if found[2].strip("`") != str(path) else f"`{path}`"

    return _OUTWARD.sub(named, markdown)


def _generated(target: Path) -> bool:
    return target.parent == _ROOT / "docs" and target.name in ("changelog.md", "contributing.md")
