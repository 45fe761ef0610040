"""The pages say what the code says: settings, YAML, metrics and other libraries' names, checked as `make docs` does.

Each check is held against a planted fault.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from llamarl.view.page_advice import _SIGNS

ROOT = Path(__file__).parents[2]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "scripts" / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check = script("check")
reference = script("reference")


def found(text: str, page: str = "docs/page.md") -> str:
    return "\n".join(check.problems(ROOT / page, text))


def test_all_pages_agree_with_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", reference.PAGES)
def test_the_reference_is_that_of_the_code(page: str) -> None:
    assert (ROOT / "docs" / page).read_text() == reference.PAGES[page](), "run: make reference"


@pytest.mark.parametrize(
    "text",
    [
        "Set `trainer.learning_rate` lower.",
        "Set `trainer.learning_rate=1e-5`.",
        "```console\n$ llamarl train trainer.learning_rate=1e-5\n```\n",
        "Text:\n\n    llamarl train job.yaml trainer.learning_rate=1e-5\n\n",
        "```yaml\ntrainer: {learning_rate: 1e-5}\n```\n",
        "Text:\n\n    trainer:\n      learning_rate: 1e-5\n\n",
    ],
)
def test_a_setting_that_does_not_exist_is_found_wherever_it_stands(text: str) -> None:
    assert "learning_rate" in found(text)
    assert not found(text.replace("learning_rate", "lr"))


def test_a_renamed_setting_breaks_the_pages_that_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named = [page for page in check.pages() if "`schedule.max_staleness`" in page.read_text()]
    renamed = check.known_settings() - {"schedule.max_staleness"}
    monkeypatch.setattr(check, "known_settings", lambda: renamed)
    assert len(named) >= 3
    for page in named:
        assert "`schedule.max_staleness` is no setting" in "\n".join(check.unknown_settings(page.read_text()))


def test_names_of_files_and_free_keys_are_no_settings() -> None:
    assert not found(
        "`trainer.py`, `engine.hosts`, `model.lora`, `reward.combine.math`, `torch.compile`, `trainer.lr=1e-4`"
    )


def test_yaml_is_checked_by_value() -> None:
    assert "expected float" in found("```yaml\ntrainer: {lr: fast}\n```\n")


def test_a_metric_that_does_not_exist_is_found() -> None:
    page = "docs/when-it-does-not-learn.md"
    assert not found("`zero_variance_share`, `kl_behavior_s0`, `groups_per_update`", page)
    assert "`zero_variance_part` is no metric" in found("`zero_variance_part`", page)


def test_names_of_other_libraries_are_those_of_error_messages() -> None:
    page = "docs/coming-from/trl.md"
    row = "| TRL | LlamaRL | |\n| `{}` | `{}` | |\n"
    assert not found(row.format("learning_rate", "trainer.lr") + row.format("actor.optim.lr", "trainer.lr"), page)
    assert "has trainer.lr for it" in found(row.format("learning_rate", "trainer.betas"), page)
    assert "has nothing for it" in found(row.format("no_such_name", "trainer.betas"), page)


@pytest.mark.parametrize("library", ["trl", "verl", "prime-rl", "openrlhf"])
def test_pages_for_those_who_come_from_elsewhere_translate_settings(library: str) -> None:
    text = (ROOT / "docs" / "coming-from" / f"{library}.md").read_text()
    assert len(list(check.translations(text))) >= 15


def test_an_error_that_the_source_does_not_have_is_found() -> None:
    row = "| error | what to do |\n|---|---|\n| `{}` | |\n"
    page = "docs/troubleshooting.md"
    assert not found(row.format("generator.slots: ... slots cannot hold one group of ..."), page)
    assert "the source has no message" in found(row.format("generator.slots: ... slots are too few"), page)


def test_the_page_on_learning_names_curves_and_limits_that_are_on_the_page_of_a_run() -> None:
    text = (ROOT / "docs" / "when-it-does-not-learn.md").read_text()
    curves = (ROOT / "src/llamarl/view/static/overview.js").read_text()
    titles = [title for cell in re.findall(r"Overview, ([^|]+)", text) for title in re.findall(r'"([^"]+)"', cell)]
    assert len(titles) > 6 and all(f'title: "{title}"' in curves for title in titles)
    for metric, limit, _, setting, *_ in _SIGNS:
        assert f"`{metric}`" in text and (f"`{setting}`" in text) and (not limit or f"{limit:g}" in text), metric


def test_dead_links_and_headings_are_found() -> None:
    assert "which is not there" in found("[a](nowhere.md)")
    assert "no such heading" in found("[a](trainer.md#nowhere)")
    assert not found("[a](trainer.md#algorithms), [b](https://example.org), `[c](nowhere.md)`")


def test_a_page_of_more_than_ten_minutes_is_found() -> None:
    long = "word " * (check.MAX_WORDS + 1)
    assert "split the page" in found(long)
    assert not found(f"```python\n{long}\n```\n| {long} |\n")


def test_what_browsers_would_fetch_elsewhere_is_found() -> None:
    elsewhere = script("own_host").loaded_from_others
    assert elsewhere(
        '<script src="https://cdn.example/x.js"></script><link rel="stylesheet" href=//fonts.example/a.css>'
    )
    assert not elsewhere('<a href="https://example.org">x</a><script src="assets/x.js"></script><img src="a.svg">')
