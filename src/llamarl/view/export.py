"""`--out`: the page as one file that needs no server. It holds curves, timeline, audit and a bounded sample of rollouts."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import msgspec

from llamarl.view.data import NotThere, ViewData, ViewedRun
from llamarl.view.server import STATIC

POINTS = 1000
MAX_GROUPS = 60  # groups of each run whose answers are in the page
MAX_ANSWERS = 8  # answers of a group with all their tokens
MAX_ANSWER_BYTES = 6 << 20  # of all answers of a run, encoded
MAX_LIVES = 400
_COMPARED = 24  # metrics that are in the comparison
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async function |function |const )", re.MULTILINE)


def written_page(data: ViewData) -> bytes:
    """One HTML file. Its script and style are named by their hashes in its content policy, and the data is no script."""
    stored: dict[str, Any] = {
        "live": [{**run, "state": _ended(run["state"])} for run in data.answer("live", {})],
        "runs": [_stored(run) for run in data.runs],
        "compare": _compared(data),
    }
    stored["notes"] = [
        "Written by `llamarl view --out`.",
        *(_left_out(run, kept) for run, kept in zip(data.runs, stored["runs"], strict=True)),
    ]
    script = f'{(STATIC / "uplot.js").read_text()}\n(async () => {{\n"use strict";\n{bundled("app.js")}\n}})();'
    style = (STATIC / "uplot.css").read_text() + (STATIC / "style.css").read_text()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = (STATIC / "index.html").read_text()
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    page = page.replace(
        '<link rel="stylesheet" href="uplot.css">\n<link rel="stylesheet" href="style.css">', f"<style>{style}</style>"
    )
    tags = '<script src="uplot.js"></script>\n<script type="module" src="app.js"></script>'
    data_tag = f'<script type="application/json" id="data">{inert_json(stored)}</script>'
    return page.replace(tags, f"{data_tag}\n<script>{script}</script>").encode("utf-8", "backslashreplace")


def inert_json(value: Any) -> str:
    """JSON that cannot end the element it stands in, nor be read as markup."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def bundled(name: str, done: set[str] | None = None) -> str:
    """A module of the page and those that it imports as one script. Their top-level names differ; a test holds it."""
    done = set() if done is None else done
    if name in done:
        return ""
    done.add(name)
    text = (STATIC / name).read_text()
    before = "".join(bundled(other, done) for other in _IMPORT.findall(text))
    return before + _EXPORT.sub("", _IMPORT.sub("", text)) + "\n"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _ended(state: str) -> str:
    return "live when written" if state == "live" else state


def _stored(run: ViewedRun) -> dict[str, Any]:
    found = run.answer("overview", {})
    ordinals = _sample(run)
    groups, rollouts, rows = _answers(run, ordinals)
    return {
        "overview": found,
        "series": run.answer("series", {"names": ",".join(found["metrics"]), "points": str(POINTS)}),
        "timeline": run.answer("timeline", {"bins": "600"}),
        "predicted": run.answer("predicted", {"from": "0", "to": "1e9"}),
        "audit": run.answer("audit", {}),
        "groups": run.answer("groups", {"limit": "200"}),
        "rollouts": {"rows": rows, **run.book.state()},
        "group": groups,
        "rollout": rollouts,
    }


def _sample(run: ViewedRun) -> list[int]:
    """Groups spread over what is kept: the newest, and others at even distances."""
    every = [row[0] for row in run.kept.select("sample = 0", [], "ordinal DESC", 1_000_000)]
    newest, older = every[: MAX_GROUPS // 3], every[MAX_GROUPS // 3 :]
    step = max(1, -(-len(older) // (MAX_GROUPS - len(newest) or 1)))
    return newest + older[::step]


def _answers(run: ViewedRun, ordinals: list[int]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    groups: dict[str, Any] = {}
    rollouts: dict[str, Any] = {}
    rows: list[Any] = []
    spent = 0
    for ordinal in ordinals:
        try:
            groups[str(ordinal)] = run.answer("group", {"ordinal": str(ordinal)})
        except NotThere:
            continue
        rows += run.answer("rollouts", {"ordinal": str(ordinal), "limit": "200"})["rows"]
        for sample in range(min(MAX_ANSWERS, len(groups[str(ordinal)]["rollouts"]))):
            one = run.answer("rollout", {"ordinal": str(ordinal), "sample": str(sample)})
            rollouts[f"{ordinal}.{sample}"] = one
            spent += len(msgspec.json.encode(one))
        if spent > MAX_ANSWER_BYTES:
            break
    return groups, rollouts, rows


def _compared(data: ViewData) -> dict[str, Any]:
    names = data.runs[0].answer("overview", {})["metrics"]
    chosen = ["reward", *(name for name in names if name != "reward")][:_COMPARED]
    return {
        "curves": {name: data.answer("compare/curves", {"metric": name}) for name in chosen},
        "settings": data.answer("compare/settings", {}),
        "problems": data.answer("compare/problems", {}),
    }


def _left_out(run: ViewedRun, kept: dict[str, Any]) -> str:
    total, shown = run.kept.count()[0], len(kept["group"])
    lives = len(kept["groups"]["groups"])
    listed = kept["audit"]["listed"]
    return (
        f"{run.reader.name}: {shown:,} of {total:,} kept groups are in this page, answers with at most 4,000 tokens each; "
        f"{lives:,} of {listed:,} lives of groups; curves with at most {POINTS:,} points."
    )
