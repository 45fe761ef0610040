"""Finds the program in a completion. One block is chosen by its text alone, before anything is run, so several programs do
not give several chances."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llamarl.tasks.think_tags import without_thought

_FENCE = re.compile(r"^([ \t]{0,40})(`{3,20}|~{3,20})[ \t]{0,4}([^\n`]{0,100})$", re.MULTILINE)
_LANGUAGE = re.compile(r"[{.\s]{0,4}([A-Za-z0-9_+-]{0,20})")
_PYTHON = ("python", "py", "python3")
_MAX_CHARS = 200_000
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CodeBlock(NamedTuple):
    """A fenced block and its language, in lower case or empty."""

    language: str
    code: str


def program_in(completion: str) -> str:
    """Return the program of a completion. Without fences it is the whole text after the thought."""
    text = without_thought(completion[-_MAX_CHARS:])
    blocks = list(_blocks(text))
    if not blocks:
        return text
    marked = [block.code for block in blocks if block.language in _PYTHON]
    return _chosen(marked) if marked else _chosen([block.code for block in blocks if not block.language], strict=True)


def fenced_program(said: str) -> str | None:
    """Return the last fenced block in Python or without a language."""
    python = [block.code for block in _blocks(said[-_MAX_CHARS:]) if block.language in (*_PYTHON, "")]
    return python[-1] if python else None


def _blocks(text: str) -> Iterator[CodeBlock]:
    """Yield fenced blocks. A fence ends at one of the same kind, at least as long, alone on its line, or with the text."""
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence.group(2).startswith(opened.group(2)) and not fence.group(3).strip():
            yield _block(opened, text[opened.end() + 1 : fence.start()])
            opened = None
    if opened is not None:
        yield _block(opened, text[opened.end() + 1 :])


def _block(fence: re.Match[str], code: str) -> CodeBlock:
    """Remove the indentation of the fence from its code, as below a list item."""
    found = _LANGUAGE.match(fence.group(3))
    language = found.group(1).lower() if found else ""
    indent = fence.group(1).expandtabs(4)
    if indent:
        code = "".join(_dedented(line, len(indent)) for line in code.splitlines(keepends=True))
    return CodeBlock(language, code)


def _dedented(line: str, width: int) -> str:
    blank = len(line) - len(line.lstrip(" \t"))
    return line[:blank].expandtabs(4)[width:] + line[blank:]


def _chosen(codes: Sequence[str], *, strict: bool = False) -> str:
    """Return the last block that is a program, not the usage, session or output that often follows one. With `strict`, skip
    blocks that are not Python."""
    if len(codes) < 2:
        return codes[0] if codes else ""
    trees = [_parsed(code) for code in codes]
    defined = _first_definitions(trees)
    for last in reversed(range(len(codes))):
        tree = trees[last]
        if tree is None:
            beside = strict or codes[last].lstrip().startswith(">>>")
        else:
            beside = _does_nothing(tree) or _needs(
                tree, {name for name in _used(tree) if defined.get(name, last) < last}
            )
        if not beside:
            return codes[last]
    return codes[-1]


def _parsed(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _does_nothing(tree: ast.Module) -> bool:
    """Whether no statement defines, computes or prints anything, as in program output or plain words."""
    return all(
        isinstance(statement, ast.Expr)
        and not any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(statement))
        for statement in tree.body
    )


def _first_definitions(trees: Sequence[ast.Module | None]) -> dict[str, int]:
    """Maps each name of a function or class to the first block that defines it."""
    first: dict[str, int] = {}
    for number, tree in enumerate(trees):
        for node in tree.body if tree is not None else ():
            if isinstance(node, _DEFINITIONS):
                first.setdefault(node.name, number)
    return first


def _used(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _needs(tree: ast.Module, earlier: set[str]) -> bool:
    """Whether the code uses some of these names without defining them, so that it cannot run alone."""
    return bool(earlier) and bool(earlier - {name for node in ast.walk(tree) for name in _bound(node)})


def _bound(node: ast.AST) -> Iterator[str]:
    """Return the names that a node defines. Imports from outside the standard library do not count."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names):
            yield from (alias.asname or alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names) if (module or "").split(".")[0] in sys.stdlib_module_names:
            yield from (alias.asname or alias.name for alias in names)
