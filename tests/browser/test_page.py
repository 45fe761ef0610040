"""Every view in a real browser: it opens without errors, filters and links work, a live run grows, hostile text is inert."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from helpers.made_runs import Shape, make_live, make_run, make_tokenizer

from llamarl.view.data import ViewData
from llamarl.view.export import written_page

pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-view")
from playwright.sync_api import Page, expect

Serve = Callable[..., str]
VIEWS = {
    "#/0/overview": "Is it learning?",
    "#/0/timeline": "Measured and predicted",
    "#/0/rollouts": "Tokens of an answer",
    "#/0/group/5": "Life in the ledger",
    "#/0/rollout/5/1": "Why this reward",
    "#/compare": "Settings that differ",
    "#/0/audit": "Is every group accounted for?",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(updates=12, groups=8, samples=4, deaths=True, dropped=True)
    return make_run(tmp_path_factory.mktemp("small") / "first", shape)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(updates=8, groups=8, planned=20, finished=False, settings={"trainer": {"lr": 0.0003}})
    return make_run(tmp_path_factory.mktemp("other") / "second", shape)


def go(page: Page, address: str) -> None:
    page.evaluate("address => { location.hash = address; }", address)
    page.wait_for_selector(f'#page[data-ready="{address}"]')


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_opens(page: Page, serve: Serve, run: Path, other: Path, theme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=theme)
    page.goto(serve(run, other, gpu="h100"))
    expect(page.locator("html")).to_have_attribute("data-theme", theme)
    for address, text in VIEWS.items():
        go(page, address)
        expect(page.locator("#page")).to_contain_text(text)
        if folder := os.environ.get("LLAMARL_SCREENSHOTS"):
            name = re.sub(r"\W+", "-", address).strip("-")
            page.screenshot(path=f"{folder}/{theme}-{name}.png", full_page=True)
    assert "key=" not in page.url


def test_curves_are_drawn_and_lead_to_rollouts(page: Page, serve: Serve, run: Path) -> None:
    page.goto(serve(run))
    plot = page.get_by_label("Reward", exact=True).locator(".u-over")
    plot.click(position={"x": 150, "y": 60})
    page.wait_for_url(re.compile(r"#/0/rollouts\?update=\d+"))
    expect(page.locator("tbody tr").first).to_be_visible()


def test_a_stretch_of_a_curve_is_zoomed_into(page: Page, serve: Serve, run: Path) -> None:
    page.goto(serve(run))
    box = page.get_by_label("Reward", exact=True).locator(".u-over").bounding_box()
    assert box
    page.mouse.move(box["x"] + 60, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 30, steps=5)
    page.mouse.up()
    page.wait_for_url(re.compile(r"first=\d+&last=\d+"))
    page.get_by_role("button", name="whole run").click()
    expect(page.locator("#page")).to_contain_text("updates 0 to 11 of 12")


def test_rollouts_are_filtered_searched_sorted_and_opened(page: Page, serve: Serve, run: Path) -> None:
    page.goto(serve(run))
    go(page, "#/0/rollouts?update=3")
    rows = page.locator("tbody tr")
    expect(page.locator(".pager")).to_contain_text("32 rollouts")
    page.locator("select[name=status]").select_option("dropped")
    expect(page.locator(".pager")).to_contain_text("4 rollouts")
    page.get_by_role("button", name="clear").click()
    expect(page.locator(".pager")).to_contain_text("384 rollouts")
    page.locator("th", has_text="reward").click()
    expect(rows.first.locator("td").nth(4)).to_have_text("1")
    page.locator(".bars button").first.click()
    page.wait_for_url(re.compile("reward_from=0&reward_to=0"))
    expect(rows.first.locator("td").nth(4)).to_have_text("0")
    go(page, "#/0/rollouts")
    prompt = rows.first.locator("td").nth(2).inner_text()
    page.locator("input[name=text]").fill(prompt)
    page.keyboard.press("Enter")
    expect(page.locator(".pager")).to_contain_text("found")
    expect(rows.first.locator("td").nth(2)).to_have_text(prompt)
    rows.first.click()
    page.wait_for_url(re.compile(r"#/0/rollout/\d+/0"))


def test_a_link_leads_back_to_what_was_seen(page: Page, serve: Serve, run: Path) -> None:
    url = serve(run)
    page.goto(f"{url}#/0/rollout/5/1?color=version")
    expect(page.locator('button[aria-pressed="true"]')).to_have_text("weight version")
    expect(page.locator(".scale")).to_contain_text("version 0")
    assert page.url.endswith("/#/0/rollout/5/1?color=version"), "the key is gone, the rest is there"
    page.reload()
    expect(page.locator('button[aria-pressed="true"]')).to_have_text("weight version")


def test_tokens_are_colored_by_what_is_known(page: Page, serve: Serve, run: Path) -> None:
    page.goto(serve(run))
    go(page, "#/0/rollout/17/1")
    tokens = page.locator(".tok")
    expect(tokens.first).to_be_visible()
    colors = {}
    for name in ("probability", "difference to the trainer", "weight version", "advantage", "none"):
        page.get_by_role("button", name=name, exact=True).click()
        colors[name] = tokens.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor).join()")
    assert len(set(colors.values())) == len(colors)
    tokens.first.hover()
    expect(page.locator("#tip")).to_contain_text("probability")
    expect(page.locator("#tip")).to_contain_text("trainer: log")


def test_the_keyboard_reaches_everything(page: Page, serve: Serve, run: Path) -> None:
    page.goto(serve(run))
    page.wait_for_selector("#page[data-ready]")
    for key, view in {"2": "timeline", "5": "audit", "4": "compare", "3": "rollouts"}.items():
        page.keyboard.press(key)
        page.wait_for_url(re.compile(view))
    page.wait_for_selector('#page[data-ready="#/0/rollouts"] tbody tr')
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector('#page[data-ready^="#/0/rollout/"]')
    page.keyboard.press("u")
    page.wait_for_selector('#page[data-ready^="#/0/group/"]')
    before = page.url
    page.keyboard.press("[")
    page.wait_for_url(lambda url: url != before)
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_contain_text("next and previous row")


def test_a_live_run_grows_without_a_reload(page: Page, serve: Serve, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    shutil.copytree(run, folder)
    (folder / "summary.json").unlink()
    make_live(folder)
    whole = (folder / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:30])
    page.goto(serve(folder))
    expect(page.locator("#state")).to_have_text("live · 5 of 12")
    page.evaluate("window.same = true")
    (folder / "metrics.jsonl").write_bytes(whole)
    expect(page.locator("#state")).to_have_text("live · 12 of 12")
    expect(page.locator("#page")).to_contain_text("updates 0 to 11 of 12")
    assert page.evaluate("window.same")


def test_a_timeline_is_zoomed_and_says_who_died(page: Page, serve: Serve, run: Path) -> None:
    page.goto(serve(run))
    go(page, "#/0/timeline?from=11&to=15")
    box = page.locator("canvas").first.bounding_box()
    assert box
    at = (14.0 - 0.3 - 11) / (15 - 11)  # the death of generator/0, on the first lane
    page.mouse.move(box["x"] + at * box["width"], box["y"] + 12)
    expect(page.locator("#tip")).to_contain_text("generator/0 died: killed by signal 9")
    page.get_by_role("button", name="all").click()
    expect(page.locator("h1 + span")).to_have_text(re.compile(r"^23\.\d+ s from 0 s$"))


HOSTILE = [
    "<img src=x onerror=\"window.hurt='img'\">",
    "<script>window.hurt='script'</script>",
    "</pre></body><svg onload=\"window.hurt='svg'\">",
    "javascript:window.hurt='link'",
    "\u202egnp.exe\u2066",
    "nul\x00in",
    "\x1b[31mred",
    "\ud7ff\ufdd0",
    "x" * 1_000_000,
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    model = make_tokenizer(folder / "model", ["<unk>", *HOSTILE])
    count = len(HOSTILE)
    return make_run(
        folder / "<b>run",
        Shape(updates=2, samples=count),
        model=model,
        texts=lambda ordinal, sample: [1 + sample, *range(1, count), 1 + sample],
        prompt="".join(HOSTILE),
    )


def look_at_all(page: Page) -> None:
    for address in [*VIEWS, *(f"#/0/rollout/0/{sample}" for sample in range(len(HOSTILE)))]:
        go(page, address)
    assert page.evaluate("window.hurt") is None
    assert page.locator("main img, main svg, main script, main iframe").count() == 0


def test_hostile_text_is_inert(page: Page, serve: Serve, hostile: Path) -> None:
    page.goto(serve(hostile))
    look_at_all(page)
    text = page.locator("pre.said").last
    expect(text).to_contain_text("<script>window.hurt='script'</script>")
    expect(text).to_contain_text("<U+202E>gnp.exe<U+2066>")
    expect(text).to_contain_text("nul\u2400in")


def test_hostile_text_is_inert_in_a_written_page(page: Page, hostile: Path, tmp_path: Path) -> None:
    data = ViewData([hostile])
    data.index()
    (tmp_path / "page.html").write_bytes(written_page(data))
    page.goto(f"file://{tmp_path / 'page.html'}")
    look_at_all(page)


def test_a_written_page_shows_every_view_without_a_server(page: Page, run: Path, other: Path, tmp_path: Path) -> None:
    data = ViewData([run, other], "h100")
    data.index()
    (tmp_path / "page.html").write_bytes(written_page(data))
    page.goto(f"file://{tmp_path / 'page.html'}")
    for address, text in VIEWS.items():
        go(page, address)
        expect(page.locator("#page")).to_contain_text(text)
    expect(page.locator(".note").first).to_contain_text("kept groups are in this page")
    go(page, "#/0/rollouts?reward_from=1")
    rewards = page.locator("tbody tr td:nth-child(5)")
    assert rewards.count() and set(rewards.all_inner_texts()) == {"1"}
    go(page, "#/0/overview?first=3&last=6")
    expect(page.locator("#page")).to_contain_text("updates 3 to 5 of 12")
