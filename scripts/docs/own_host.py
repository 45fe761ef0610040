"""For mkdocs: nothing on a page of the site may be loaded from another host."""

from __future__ import annotations

import logging
import re
from typing import Any

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*?\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*?\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
)
_log = logging.getLogger("mkdocs.hooks.own_host")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    for address in loaded_from_others(output):
        _log.warning("%s: loads %s; keep what a page needs in docs/", page.file.src_uri, address)
    return output


def loaded_from_others(html: str) -> list[str]:
    """Addresses on other hosts that a browser fetches by itself when it shows the page."""
    return [one or other for one, other in _LOADED.findall(html)]
