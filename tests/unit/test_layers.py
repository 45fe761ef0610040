"""Imports point down only: the layers are read from docs/architecture.md, the imports from the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import llamarl

ROOT = Path(llamarl.__file__).parent
DOCS = ROOT.parents[1] / "docs"


def tables_of_layers() -> tuple[list[list[str]], list[list[str]]]:
    """The rows of both tables of architecture.md, section 5: the layers, and where to change what."""
    section = (DOCS / "architecture.md").read_text().partition("\n## 5. Layers")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in section.splitlines() if line.startswith("| ")]
    split = next(number for number, row in enumerate(rows) if row[0] == "| to change")
    return rows[1:split], rows[split + 1 :]


def names_in(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


LAYERS, WHERE = tables_of_layers()
ROOMS = [name for row in LAYERS for name in names_in(row[0])]  # from top to bottom
BOTTOM = names_in(LAYERS[-1][0])
# What each room may import besides itself.
ALLOWED: dict[str, set[str]] = {
    **{name: {*names_in(row[2]), *BOTTOM} for row in LAYERS for name in names_in(row[0])},
    "__main__": {"cli"},
}


def test_the_documented_layers_point_down_only() -> None:
    assert ROOMS and not {*names_in(LAYERS[-1][2])}
    for row in LAYERS[:-1]:
        (name,) = names_in(row[0])
        assert {*names_in(row[2])} <= {*ROOMS[ROOMS.index(name) + 1 :]} - {*BOTTOM}, name


def test_what_the_page_says_is_there_is_there() -> None:
    """Every room has a layer, and every path of the second table exists."""
    assert {room(module) for module in modules()} == ALLOWED.keys()
    for row in WHERE:
        for path in (name for name in names_in(row[1]) if re.fullmatch(r"[a-z_/]+(\.py|\.md|/)", name)):
            assert any((place / path).exists() for place in (ROOT, DOCS, DOCS.parent)), path


def modules() -> list[str]:
    """Dotted names below llamarl: "types", "controller.line" ..."""
    found = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")]
    return sorted(name.removesuffix(".__init__") for name in found if name != "__init__")


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def room(module: str) -> str:
    return module.partition(".")[0]


def imports(module: str) -> Iterator[str]:
    """Every module that is imported anywhere in the file, inside functions too, by its absolute name."""
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module: str) -> list[str]:
    """Those of our own modules, below llamarl."""
    found = [name.removeprefix("llamarl.") for name in imports(module) if name.startswith("llamarl.")]
    return [name for name in found if name != "__version__"]


@pytest.mark.parametrize("module", modules())
def test_imports_point_down_only(module: str) -> None:
    assert room(module) in ALLOWED, f"{module} belongs to no layer"
    for name in own_imports(module):
        assert room(name) == room(module) or room(name) in ALLOWED[room(module)], f"{module} imports llamarl.{name}"


def test_the_bottom_has_no_circles() -> None:
    depends: dict[str, set[str]] = {name: set() for name in BOTTOM}
    for module in modules():
        if room(module) in depends:
            depends[room(module)] |= {room(name) for name in own_imports(module)} - {room(module)}
    placed: set[str] = set()
    while ready := {name for name, needs in depends.items() if name not in placed and needs <= placed}:
        placed |= ready
    assert placed == set(BOTTOM)


def test_no_public_class_name_is_used_twice() -> None:
    """A name that is looked up leads to one class, and no import needs `as` to tell two apart."""
    homes: dict[str, list[str]] = {}
    for module in modules():
        for node in ast.parse(path_of(module).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_executors_never_import_each_other() -> None:
    for module in modules():
        if room(module) == "executors":
            others = {name.split(".")[1] for name in own_imports(module) if room(name) == "executors"}
            assert others <= {"executor"}, f"{module} imports {others}"


def test_executors_know_no_engine_and_no_controller() -> None:
    for module in modules():
        if room(module) in {"executors", "generate", "train", "weights", "algo", "tasks", "model"}:
            assert not {room(name) for name in own_imports(module)} & {
                "engine",
                "controller",
                "builders",
                "jobs",
                "cli",
            }


def test_the_controller_needs_the_standard_library_msgspec_and_the_bottom_only() -> None:
    known = {*sys.stdlib_module_names, "msgspec", "llamarl"}
    for module in modules():
        if room(module) == "controller":
            assert {name.partition(".")[0] for name in imports(module)} <= known, module


def test_the_controller_has_no_clock_no_socket_no_chance_and_no_files_but_the_ledgers() -> None:
    impure = {"time", "datetime", "random", "secrets", "socket", "select", "threading", "subprocess", "os", "asyncio"}
    for module in modules():
        if room(module) == "controller":
            assert not {name.partition(".")[0] for name in imports(module)} & impure, module


@pytest.mark.parametrize("first", ["bottom", "controller", "plan", "simulate", "runs", "view", "cli"])
def test_what_starts_at_once_imports_no_torch(first: str) -> None:
    rooms = BOTTOM if first == "bottom" else (first,)
    names = [f"llamarl.{module}" for module in modules() if room(module) in rooms]
    code = f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
DANGEROUS_CALLS = {"eval", "exec", "compile", "__import__"}
DANGEROUS_ATTRIBUTES = {
    "load": {"torch", "pickle", "marshal", "np", "numpy"},  # np.load unpickles object arrays
    "save": {"torch"},
    "system": {"os"},
    "popen": {"os"},
    "unsafe_load": {"yaml"},
    "full_load": {"yaml"},
    "load_all": {"yaml"},
}


@pytest.mark.parametrize("module", modules())
def test_nothing_is_unpickled_and_no_text_is_executed(module: str) -> None:
    assert not {name.partition(".")[0] for name in imports(module)} & UNPICKLERS
    assert not any("multiprocessing" in name for name in imports(module)), "its pipes and queues pickle"
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            assert node.func.id not in DANGEROUS_CALLS, f"{module}:{node.lineno}"
        elif isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            assert owner not in DANGEROUS_ATTRIBUTES.get(node.func.attr, set()), f"{module}:{node.lineno}"
            assert not node.func.attr.endswith("_object_list"), f"{module}:{node.lineno}: it pickles"
            assert node.func.attr not in {"all_gather_object", "gather_object", "scatter_object"}, module
            shell = [keyword for keyword in node.keywords if keyword.arg == "shell"]
            assert not shell, f"{module}:{node.lineno}"
