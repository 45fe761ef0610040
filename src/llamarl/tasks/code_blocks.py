"""Where a completion holds its program. One block is chosen by its text alone, before anything is run, so writing several
programs gains nothing."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llamarl.tasks.thoughts import without_thought

_FENCE = re.compile(r"^([ \t]{0,40})(`{3,20}|~{3,20})[ \t]{0,4}([^\n`]{0,100})$", re.MULTILINE)
_LANGUAGE = re.compile(r"[{.\s]{0,4}([A-Za-z0-9_+-]{0,20})")
_PYTHON = ("python", "py", "python3")
_MAX_CHARS = 200_000
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CodeBlock(NamedTuple):
    """A fenced block; its language in lower case, empty where it says none."""

    language: str
    code: str


def program_in(completion: str) -> str:
    """The program that a completion answers with; the whole text, behind a thought, where nothing is fenced."""
    text = without_thought(completion[-_MAX_CHARS:])
    blocks = list(_blocks(text))
    if not blocks:
        return text
    marked = [block.code for block in blocks if block.language in _PYTHON]
    return _chosen(marked) if marked else _chosen([block.code for block in blocks if not block.language], strict=True)


def fenced_program(said: str) -> str | None:
    """The last fenced block that is Python, or of no language."""
    python = [block.code for block in _blocks(said[-_MAX_CHARS:]) if block.language in (*_PYTHON, "")]
    return python[-1] if python else None


def _blocks(text: str) -> Iterator[CodeBlock]:
    """A fence is closed by one of the same kind, at least as long, with nothing behind it; or it runs to the end."""
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
    """Code that is indented as its fence is, as below an item of a list, loses that much."""
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
    """The last block that is a program: not the use, the session or the output that often follows one. With `strict`, what
    is no Python at all is passed over as well."""
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
    """No statement that could define, compute or print anything: the output of a program, or words."""
    return all(
        isinstance(statement, ast.Expr)
        and not any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(statement))
        for statement in tree.body
    )


def _first_definitions(trees: Sequence[ast.Module | None]) -> dict[str, int]:
    """By name, the first block that defines a function or class of that name."""
    first: dict[str, int] = {}
    for number, tree in enumerate(trees):
        for node in tree.body if tree is not None else ():
            if isinstance(node, _DEFINITIONS):
                first.setdefault(node.name, number)
    return first


def _used(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _needs(tree: ast.Module, earlier: set[str]) -> bool:
    """Whether it gives no meaning of its own to some of these names, which it uses: then it cannot run by itself."""
    return bool(earlier) and bool(earlier - {name for node in ast.walk(tree) for name in _bound(node)})


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a node gives a meaning; those imported from a module that is not Python's own have none here."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names):
            yield from (alias.asname or alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names) if (module or "").split(".")[0] in sys.stdlib_module_names:
            yield from (alias.asname or alias.name for alias in names)
