"""Checks pages against the code, for `make docs`: settings, YAML, metrics, other libraries' names, links, length.

It needs `llamarl.config` alone, so msgspec, numpy and PyYAML are enough. Each finding is one line, and makes the exit code 1.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llamarl.config import Config
from llamarl.config.file import describe, load_config
from llamarl.config.other_names import OTHER_NAMES
from llamarl.errors import ConfigError

ROOT = Path(__file__).parents[2]
MAX_WORDS = 2000  # of prose: ten minutes
_UNHURRIED = {"CHANGELOG.md", "settings.md", "cli.md", "api.md"}  # are looked things up in, not read
_METRIC_PAGES = {"when-it-does-not-learn.md", "troubleshooting.md"}
_FILES = {
    "py",
    "md",
    "yaml",
    "yml",
    "json",
    "jsonl",
    "toml",
    "txt",
    "sh",
    "svg",
    "png",
    "csv",
    "log",
    "gz",
    "safetensors",
}
_FREE_KEYS = (
    "reward.combine.",
    "task.options.",
    "task.datasets.",
    "task.parts",
    "teacher.by_name.",
    "task.env_config.",
)

_FENCE = re.compile(r"^( *)(```+|~~~+)(\w*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}[^\n]*\n(?:\s*\n(?= {4}))?)+")
_SPAN = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")
_GIVEN = re.compile(r"(?:^|\s)'?([a-z_]+(?:\.[a-z_0-9]+)+)=")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    """Every page that people read: the site's, and those at the root."""
    root = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
    return [*root, *sorted((ROOT / "docs").rglob("*.md"))]


def problems(page: Path, text: str) -> Iterator[str]:
    """What is wrong with a page, one line each."""
    if page.name != "CHANGELOG.md":  # tells of settings that were renamed since
        ours = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE) if page.parent.name == "coming-from" else text
        yield from unknown_settings(ours)
        yield from wrong_yaml(text)
    yield from dead_links(page, text)
    if page.name in _METRIC_PAGES:
        yield from unknown_metrics(text)
        yield from unknown_errors(text)
    if page.parent.name == "coming-from":
        yield from wrong_translations(text)
    if page.name not in _UNHURRIED and (words := num_words(text)) > MAX_WORDS:
        yield f"{words} words of prose are more than ten minutes ({MAX_WORDS}): split the page"


def num_words(text: str) -> int:
    """Words of prose: without code blocks and tables."""
    lines = _FENCE.sub("", text).splitlines()
    return sum(len(line.split()) for line in lines if not line.lstrip().startswith("|"))


@functools.cache
def known_settings() -> frozenset[str]:
    """Names of all settings and of the sections that hold them."""
    keys = [key for key, _, _ in describe()]
    return frozenset([*keys, *(key.rpartition(".")[0] for key in keys)])


def is_setting(name: str) -> bool:
    """Whether this is a name that a job can set."""
    return name in known_settings() or name.startswith(_FREE_KEYS)


def unknown_settings(text: str) -> Iterator[str]:
    """`section.name` in backticks, and section.name=value in commands, that are no settings."""
    sections = {key.partition(".")[0] for key in known_settings() if "." in key}
    blocks = [found[4] for found in _FENCE.finditer(text) if found[3] in ("console", "bash", "")]
    spans = _SPAN.findall(_FENCE.sub("", text))
    named = [found[0] for span in spans if (found := re.match(rf"{_DOTTED.pattern}(?=$|[=:\s])", span))]
    given = [name for block in [*blocks, *spans, *_INDENTED.findall(text)] for name in _GIVEN.findall(block)]
    for name in sorted({*named, *given}):
        first, _, last = name.rpartition(".")
        if first.partition(".")[0] in sections and last not in _FILES and not is_setting(name):
            yield f"`{name}` is no setting; `llamarl config` lists them"


def yaml_blocks(text: str) -> Iterator[str]:
    """Settings in YAML: fenced as such, or indented under the name of a section."""
    yield from (
        re.sub(rf"^{found[1]}", "", found[4], flags=re.MULTILINE)
        for found in _FENCE.finditer(text)
        if found[3] == "yaml"
    )
    sections = "|".join(Config.__struct_fields__)
    for block in _INDENTED.findall(_FENCE.sub("", text)):
        for part in re.split(r"\n\s*\n", re.sub(r"^ {4}", "", block, flags=re.MULTILINE)):
            if re.match(rf"({sections}):(\s|$)", part):
                yield part


def wrong_yaml(text: str) -> Iterator[str]:
    """YAML that a job would refuse."""
    for block in yaml_blocks(text):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(block)
            file.flush()
            yield from (f"a YAML block is refused: {line}" for line in refused(Path(file.name)))


def refused(path: Path) -> Iterator[str]:
    """Why a job would refuse this file, if it would."""
    try:
        load_config(path)
    except ConfigError as error:
        yield str(error).removeprefix(f"{path}: ")


@functools.cache
def _literals() -> frozenset[str]:
    """Every plain word that the source has in quotes."""
    sources = ((ROOT / "src" / "llamarl").rglob(suffix) for suffix in ("*.py", "*.js"))
    return frozenset(
        word for found in sources for path in found for word in re.findall(r"[\"']([a-z_0-9]+)[\"']", path.read_text())
    )


@functools.cache
def _names() -> frozenset[str]:
    """Names of settings without their sections, and the words that settings take."""
    return frozenset(key.rpartition(".")[2] for key in known_settings())


def unknown_metrics(text: str) -> Iterator[str]:
    """`words_with_underscores` that are neither metrics of the source nor names of settings."""
    for span in sorted(set(_SPAN.findall(_FENCE.sub("", text)))):
        word = re.sub(r"_s?\d+$", "", span)
        if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", span) and not {word, span} & (_literals() | _names()):
            yield f"`{span}` is no metric: the source has no such name"


@functools.cache
def _sources() -> str:
    """All source, with the parts of a text that goes over several lines joined, and its values as "..."."""
    joined = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "llamarl").rglob("*.py")))
    return re.sub(r"\"\s*\n\s*f?\"", "", joined)


def unknown_errors(text: str) -> Iterator[str]:
    """Messages in the first cell of a row under `error` that the source does not have; "..." stands for anything."""
    under = False
    for line in text.splitlines():
        under = line.startswith("| error |") or (under and line.startswith("|"))
        for message in _SPAN.findall(line.split(" | ")[0]) if under else ():
            parts = [part for part in message.split("...") if len(part.strip()) > 2]
            if missing := [part for part in parts if part not in _sources()]:
                yield f"`{message}`: the source has no message with '{missing[0]}'"


def translations(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(their name, our settings) of each row under a head whose second cell is LlamaRL."""
    under = False
    for line in _FENCE.sub("", text).splitlines():
        under = bool(re.match(r"\|[^|]*\| LlamaRL \|", line)) or (under and line.startswith("|"))
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not under or len(cells) < 2:
            continue
        spans = [span.partition("=")[0] for span in _SPAN.findall(cells[1])]
        ours = tuple(span for span in spans if is_setting(span) or span in _top_level())
        if ours:
            yield from ((theirs, ours) for theirs in _SPAN.findall(cells[0]))


def _top_level() -> frozenset[str]:
    return frozenset(key for key in known_settings() if key and "." not in key)


def wrong_translations(text: str) -> Iterator[str]:
    """Rows that name another setting of ours than the error messages of a job do."""
    for theirs, ours in translations(text):
        last = re.split(r"[.]", theirs.partition("=")[0].lstrip("-").replace("-", "_"))[-1].lower()
        if last not in [key.rpartition(".")[2] for key in ours] and OTHER_NAMES.get(last) not in ours:
            yield f"`{theirs}`: config/other_names.py has {OTHER_NAMES.get(last, 'nothing')} for it, not {', '.join(ours)}"


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Links to files or headings of the repository that are not there; mkdocs itself looks at those inside docs/."""
    for target in _LINK.findall(_SPAN.sub("", _FENCE.sub("", text))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = (page.parent / path).resolve() if path else page
        if not found.exists() and found.name not in ("changelog.md", "contributing.md"):
            yield f"links to {target}, which is not there"
        elif anchor and found.suffix == ".md" and found.exists() and anchor not in _anchors(found):
            yield f"links to {target}, but {found.name} has no such heading"


@functools.cache
def _anchors(page: Path) -> frozenset[str]:
    heads = re.findall(r"^#+ (.+?)(?: \{#[\w-]+\})?$", _FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return frozenset(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip()) for head in plain)


def main() -> int:
    found = [f"{page.relative_to(ROOT)}: {line}" for page in pages() for line in problems(page, page.read_text())]
    for path in (*sorted((ROOT / "examples").rglob("*.yaml")), *sorted((ROOT / "docs").rglob("*.yaml"))):
        found += [f"{path.relative_to(ROOT)}: {line}" for line in refused(path)]
    print("\n".join(found) or f"{len(pages())} pages agree with the code")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
