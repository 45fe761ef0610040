"""For mkdocs: links from a page of docs/ to other files of the repository become plain names, if the file is there.

Pages are read in the repository, where such links work; on the built site there are no such files.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_OUTWARD = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks.links")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def named(found: re.Match[str]) -> str:
        target = (_ROOT / "docs" / page.file.src_uri).parent / found[3]
        if not target.exists():
            _log.warning("%s: links to %s, which is not there", page.file.src_uri, found[3])
        path = target.resolve().relative_to(_ROOT)
        return f"{found[2]} (`{path}`)" if found[2].strip("`") != str(path) else f"`{path}`"

    return _OUTWARD.sub(named, markdown)
