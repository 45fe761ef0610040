"""What `import llamarl` offers is documented: every name is in the API reference, with docstrings for all that is public."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import llamarl

ROOT = Path(__file__).parents[2]
REFERENCE = re.findall(r"^::: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)


def documented(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return import_module(path) if path == "llamarl.errors" else getattr(import_module(module), name)


def public_members(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, member in vars(owner).items():
        plain = inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
        if not name.startswith("_") and (plain or hasattr(member, "func")):
            yield name, getattr(member, "__func__", member)


def test_every_public_name_is_in_the_reference() -> None:
    offered = {getattr(llamarl, name) for name in llamarl.__all__ if name != "__version__"}
    assert offered <= {documented(path) for path in REFERENCE}
    assert set(dir(llamarl)) >= set(llamarl.__all__)


@pytest.mark.parametrize("path", REFERENCE)
def test_everything_in_the_reference_has_a_docstring(path: str) -> None:
    found = documented(path)
    assert inspect.getdoc(found)
    if inspect.isclass(found):
        for name, member in public_members(found):
            assert inspect.getdoc(member), f"{path}.{name}"


def test_every_page_is_on_the_site() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(pages_in(nav)) == written | {"changelog.md", "contributing.md"}  # made from the files of the root


def pages_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for inside in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from pages_in(inside)
