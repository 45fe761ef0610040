"""The tables of docs/models.md, made from the tables of the families: `python scripts/docs/families.py --write`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from llamarl.families.dense import DENSE, GEMMA2
from llamarl.families.experts import EXPERTS
from llamarl.families.family import Family
from llamarl.model.hf_keys import ONLY

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_FIXED: dict[str, str | dict[str, str]] = {
    "qkv_bias": "biases on q, k and v",
    "qk_norm": "a norm of each head of q and k",
    "wide_qk_norm": "norms of q and k over all heads",
    "norms": {"post": "norms behind attention and MLP", "sandwich": "norms before and behind attention and MLP"},
    "norm_plus_one": "norms times 1 + weight",
    "activation": {"gelu_tanh": "gelu by tanh"},
    "normalize_routes": "weights of a token's experts sum to 1",
}
_IN_FILES = {"_one_by_one": "one by one, or stacked", "_granite_layer": "stacked"}


def families() -> str:
    """One row for each family: what its models have in common, and what config.json may choose."""
    head = [
        "| family | `model_type` | always | chosen by config.json | windows | `rope_type` |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_row, (*DENSE, *EXPERTS))])


def _row(family: Family) -> str:
    cells = [
        family.title,
        f"`{family.name}`",
        "; ".join(_always(family)) or "-",
        ", ".join(_chosen(family)) or "-",
        _windows(family),
        ", ".join(f"`{one}`" for one in family.ropes),
    ]
    return f"| {' | '.join(cells)} |"


def _always(family: Family) -> Iterator[str]:
    for field, value in family.fixed.items():
        words = _FIXED[field]
        yield words[str(value)] if isinstance(words, dict) else words
    if family.sized is GEMMA2.sized:
        yield "embedding times sqrt(hidden size)"
    if family.layer.__name__ == "_fused_layer":
        yield "q, k, v and gate, up joined in files"
    if family in EXPERTS:
        yield f"experts {_IN_FILES[family.layer.__name__]} in files"
    if family.local_rope != "none":
        yield "layers with a window rotate apart"


def _chosen(family: Family) -> Iterator[str]:
    yield from (f"`{key}`" for key in (*(one.key for one in family.keys), *family.more_keys))
    if family.partial_rotary:
        yield "`partial_rotary_factor`"


def _windows(family: Family) -> str:
    if family.windowed is None:
        return "none"
    layers = "`layer_types`, or as its models have them" if family.layer_types else "all layers"
    return f"{layers}, if `{family.window_switch}`" if family.window_switch else layers


def refused() -> str:
    """Keys with the only values that are accepted, in all families that do not list the key above."""
    rows = [f"| `{key}` | {_values(values)} |" for key, values in sorted(ONLY.items())]
    return "\n".join(["| key | accepted |", "|---|---|", *rows])


def _values(values: tuple[object, ...]) -> str:
    return " or ".join(f"`{str(value).lower()}`" for value in values) or "null or empty"


def page(text: str) -> str:
    """The page with its tables made anew, each between two comments."""
    for name, table in (("families", families()), ("refused", refused())):
        first, last = f"<!-- {name}: made by scripts/docs/families.py -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(first)
        _, _, after = rest.partition(last)
        text = before + first + table + last + after
    return text


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    PAGE.write_text(page(PAGE.read_text()))
