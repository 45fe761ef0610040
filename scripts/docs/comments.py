"""For mkdocstrings: the comment behind a field is its docstring, and so is the description of a setting."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

_COMMENT = re.compile(r"\s{2}# (.+)$")


class FieldComments(griffe.Extension):  # type: ignore[misc]  # griffe is not there where types are checked
    """Gives fields the words that stand behind them in the source."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and (text := _comment(attr) or _description(node)):
            attr.docstring = griffe.Docstring(text, parent=attr)


def _comment(attr: griffe.Attribute) -> str:
    """The comment at the end of the field's last line."""
    found = _COMMENT.search(attr.lines[-1]) if attr.lines else None
    return found[1] if found else ""


def _description(node: Any) -> str:
    """`description` of Annotated[..., Meta(description=...)]."""
    for call in ast.walk(node) if isinstance(node, ast.AST) else ():
        if isinstance(call, ast.keyword) and call.arg == "description" and isinstance(call.value, ast.Constant):
            return str(call.value.value)
    return ""
