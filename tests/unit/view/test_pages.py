"""The data of every view, from run folders that real writers made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.made_runs import Shape, make_live, make_run, make_tokenizer
from msgspec.structs import replace

from llamarl.controller.ledger import Rewound
from llamarl.errors import InputError
from llamarl.observe.rollout_log import RolloutLog
from llamarl.observe.run_folder import LEDGER
from llamarl.view.data import NotThere, ViewData

UPDATES, GROUPS, SAMPLES = 6, 4, 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(updates=UPDATES, groups=GROUPS, samples=SAMPLES, deaths=True, dropped=True)
    return make_run(tmp_path_factory.mktemp("made") / "run", shape)


def view_of(*paths: Path) -> ViewData:
    data = ViewData(paths)
    data.index()
    return data


def ask(data: ViewData, path: str, **query: object) -> Any:
    return data.answer(path, {name: str(value) for name, value in query.items()})


def test_the_overview_answers_its_three_questions(made: Path) -> None:
    found = ask(view_of(made), "run/0/overview")
    assert [answer.verdict for answer in found["answers"]] == ["yes", "mostly", "the trainer"]
    assert found["updates"] == UPDATES and found["state"] == "finished"
    kinds = {mark["kind"] for mark in found["marks"]}
    assert {"death", "restart", "snapshot", "evaluation"} <= kinds
    assert found["evaluations"][0]["low"] < 0.25 < found["evaluations"][0]["high"]


def test_the_interval_of_an_evaluation_is_that_of_the_problems_that_were_asked(made: Path, tmp_path: Path) -> None:
    """A small task holds out fewer than evaluate.prompts."""
    shutil.copytree(made, tmp_path / "run")
    (tmp_path / "run" / "evaluations.jsonl").write_text('{"version": 0, "accuracy": 0.5, "problems": 6}\n')
    (row,) = ask(view_of(tmp_path / "run"), "run/0/overview")["evaluations"]
    assert row["low"] < 0.2 and row["high"] > 0.8


def test_advice_names_its_figure_and_its_setting(tmp_path: Path) -> None:
    """Planted: a quarter of the answers is cut off, and a group of one answer has no variance."""
    run = make_run(tmp_path / "run", Shape(samples=4))
    advice = {one.metric: one for one in ask(view_of(run), "run/0/overview")["advice"]}
    cut = advice["truncated_share"]
    assert cut.value == 0.25 and cut.setting == "generator.max_new_tokens" and cut.now == "48" and "25%" in cut.text


def test_series_are_binned_and_cut_to_the_window(made: Path) -> None:
    data = view_of(made)
    found = ask(data, "run/0/series", names="reward,waiting.trainer,nothing", first=2, last=5, points=10)
    assert found["updates"] == [2, 3, 4]
    assert all(0.1 < share < 0.3 for share in found["series"]["waiting.trainer"]["mean"])
    assert found["series"]["nothing"]["mean"] == [None] * 3
    assert len(ask(data, "run/0/series", points=2)["updates"]) == 2


def test_the_timeline_has_a_lane_for_each_executor_and_says_who_died(made: Path) -> None:
    found = ask(view_of(made), "run/0/timeline")
    assert [lane["executor"] for lane in found["lanes"]] == ["generator/0", "reward/0", "trainer/0"]
    assert any(mark["kind"] == "death" and mark["executor"] == "generator/0" for mark in found["marks"])
    part = ask(view_of(made), "run/0/timeline", **{"from": 2.0, "to": 4.0})
    assert all(span[3] > 2.0 and span[2] < 4.0 for lane in part["lanes"] for span in lane["spans"])


def test_a_prediction_stands_beside_the_measurement_or_says_why_not(made: Path) -> None:
    assert "--gpu" in ask(view_of(made), "run/0/predicted")["missing"]
    data = ViewData([made], "h100")
    data.index()
    found = ask(data, "run/0/predicted", **{"from": 0, "to": 4})
    assert found["update_s"] > 0 and {lane["executor"] for lane in found["lanes"]} >= {"generator/0", "trainer/0"}


def test_the_audit_is_that_of_the_command_and_lists_every_life(made: Path) -> None:
    data = view_of(made)
    found = ask(data, "run/0/audit")
    assert found["clean"] and found["trained"] == UPDATES * (GROUPS - 1) and sum(found["dropped"].values()) == UPDATES
    lives = ask(data, "run/0/groups", state="dropped")
    assert lives["total"] == UPDATES
    assert [step["kind"] for step in lives["groups"][0]["steps"]] == ["issued", "generated", "dropped"]
    assert ask(data, "run/0/groups", around=3)["total"] == 4


def test_an_update_that_a_rewind_took_back_is_said_to_be(made: Path, tmp_path: Path) -> None:
    from llamarl.controller.ledger_file import LedgerFile

    shutil.copytree(made, tmp_path / "run")
    ledger = LedgerFile(tmp_path / "run" / LEDGER)
    ledger.append(Rewound(UPDATES - 1, "trainer/0"))
    ledger.close()
    data = view_of(tmp_path / "run")
    assert ask(data, "run/0/audit")["rewinds"] == 1
    steps = ask(data, "run/0/groups", around=UPDATES * GROUPS - 2)["groups"][0]["steps"]
    assert steps[-1]["kind"] == "trained" and steps[-1]["taken_back"]


def test_rollouts_are_filtered_by_everything_that_is_known(made: Path) -> None:
    data = view_of(made)

    def rows(**query: object) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask(data, "run/0/rollouts", limit=200, **query)["rows"]
        return found

    everything = rows()
    assert len(everything) == UPDATES * GROUPS * SAMPLES
    tests: dict[str, tuple[list[dict[str, Any]], Callable[[dict[str, Any]], bool]]] = {
        "update=2": (rows(update=2), lambda row: row["update"] == 2),
        "reward": (rows(reward_from=0.5), lambda row: row["reward"] >= 0.5),
        "length": (rows(tokens_to=9), lambda row: row["tokens"] <= 9),
        "version": (rows(version=3), lambda row: row["version"] <= 3 <= row["last_version"]),
        "cut": (rows(cut=1), lambda row: row["cut"] == 1),
        "dropped": (rows(status=2), lambda row: row["status"] == "dropped"),
        "flat": (rows(flat=1), lambda row: row["flat"] == 1),
    }
    for name, (found, holds) in tests.items():
        assert [row for row in everything if holds(row)] == found and found, name
    by_reward = rows(sort="reward", way="up")
    assert [row["reward"] for row in by_reward] == sorted(row["reward"] for row in everything)
    assert rows(reward_from="1 OR 1=1") == everything, "what is no number is no filter"


def test_text_is_searched_in_steps(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = view_of(made)
    wanted = ask(data, "run/0/group", ordinal=5)["prompt"]["text"]
    monkeypatch.setattr("llamarl.view.rollouts._SEARCH_S", -1.0)  # one group at a time
    found: list[int] = []
    query: dict[str, object] = {}
    for _ in range(UPDATES * GROUPS + 1):
        step = ask(data, "run/0/rollouts", text=wanted, **query)
        found += [row["ordinal"] for row in step["rows"]]
        if step["next_before"] is None:
            break
        query = {"before": step["next_before"]}
    assert found.count(5) == SAMPLES and step["next_before"] is None


def test_a_rollout_has_everything_for_each_token(made: Path) -> None:
    data = view_of(made)
    found = ask(data, "run/0/rollout", ordinal=9, sample=2)
    tokens = found["tokens"]
    assert found["has_policy"] and found["update"] == 2 and len(tokens) == found["all_tokens"]
    assert all(token["lp"] <= 0 and token["pl"] <= 0 and token["v"] in (1, 2) for token in tokens)
    assert "".join(token["t"] for token in tokens) == found["brief"]["text"]["text"]
    judged = found["brief"]["judged"]
    assert judged["parts"] == [{"scorer": "exact", "weight": 1.0, "value": found["brief"]["reward"]}]
    assert judged["extracted"] == found["brief"]["text"]["text"]


def test_what_is_not_kept_is_said(made: Path) -> None:
    with pytest.raises(NotThere, match=r"group 99999 is not in the run folder.*observe\.rollouts_mb"):
        ask(view_of(made), "run/0/group", ordinal=99999)


def test_an_update_made_again_replaces_the_first_and_a_rewind_removes(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "run")
    data = view_of(tmp_path / "run")
    assert ask(data, "run/0/rollouts", update=UPDATES - 1)["total"] == GROUPS * SAMPLES
    log = RolloutLog(tmp_path / "run" / "rollouts", -1, UPDATES, next_update=UPDATES - 1)
    data.index()
    assert ask(data, "run/0/rollouts", update=UPDATES - 1)["total"] == 0
    kept = data.runs[0].kept.group(3)
    assert kept is not None
    log.add(UPDATES - 1, 1, [replace(kept, update=UPDATES - 1)])
    log.close()
    data.index()
    assert ask(data, "run/0/rollouts", update=UPDATES - 1)["total"] == SAMPLES


def test_a_group_is_found_before_the_table_is_built(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "run")
    data = ViewData([tmp_path / "run"])
    assert ask(data, "live")[0]["indexed"] < 1.0
    assert ask(data, "run/0/rollout", ordinal=17, sample=1)["ordinal"] == 17


def test_several_runs_are_compared(made: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", Shape(updates=3, settings={"trainer": {"lr": 0.003}}))
    data = view_of(made, other)
    found = ask(data, "compare/curves", metric="reward")
    assert [len(run["values"]) for run in found["runs"]] == [UPDATES, 3]
    assert found["runs"][0]["axes"]["minutes"][-1] == UPDATES * 2.0 / 60
    differing = {row["setting"]: row["values"] for row in ask(data, "compare/settings")["settings"]}
    assert differing["trainer.lr"][1] == 0.003 and "seed" not in differing
    problems = ask(data, "compare/problems")
    assert problems and all(len(problem["answers"]) == 2 for problem in problems), "the seed is the same"


def test_nothing_in_the_run_folder_changes(made: Path) -> None:
    def contents() -> dict[Path, tuple[int, bytes]]:
        files = [path for path in made.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = contents()
    data = view_of(made)
    for name in ("overview", "series", "timeline", "predicted", "audit", "groups", "rollouts", "histograms"):
        ask(data, f"run/0/{name}")
    ask(data, "run/0/rollout", ordinal=0)
    assert contents() == before


def test_a_place_that_cannot_be_written_is_no_obstacle(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table then lies in the user's cache."""
    shutil.copytree(made, tmp_path / "shared" / "run")
    (tmp_path / "shared" / ".run.llamarl-view.db").mkdir()  # root may write everywhere, but not over a folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = view_of(tmp_path / "shared" / "run")
    assert ask(data, "run/0/rollouts")["total"] and list((tmp_path / "cache").rglob("*.db"))


def test_another_run_in_the_same_place_is_not_taken_for_the_first(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Shape(updates=5))
    assert ask(view_of(tmp_path / "run"), "run/0/rollouts")["total"] == 5 * 16
    shutil.rmtree(tmp_path / "run")
    make_run(tmp_path / "run", Shape(updates=2))
    assert ask(view_of(tmp_path / "run"), "run/0/rollouts")["total"] == 2 * 16


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\x00" + bytes(4000)])
def test_a_damaged_table_is_made_anew(made: Path, tmp_path: Path, content: bytes) -> None:
    shutil.copytree(made, tmp_path / "run")
    (tmp_path / ".run.llamarl-view.db").write_bytes(content)
    assert ask(view_of(tmp_path / "run"), "run/0/rollouts")["total"] == UPDATES * GROUPS * SAMPLES


def test_a_table_of_another_format_is_made_anew(made: Path, tmp_path: Path) -> None:
    import sqlite3

    shutil.copytree(made, tmp_path / "run")
    with sqlite3.connect(tmp_path / ".run.llamarl-view.db") as db:
        db.execute("CREATE TABLE rollouts(one INTEGER)")
    db.close()
    assert ask(view_of(tmp_path / "run"), "run/0/rollouts")["total"] == UPDATES * GROUPS * SAMPLES


def test_a_live_run_grows(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.view.run_reader._REFRESH_S", 0.0)
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    (folder / "summary.json").unlink()
    make_live(folder)
    whole = (folder / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])
    data = view_of(folder)
    (live,) = ask(data, "live")
    assert live["state"] == "live" and live["updates"] == 2
    (folder / "metrics.jsonl").write_bytes(whole)
    (after,) = ask(data, "live")
    assert after["updates"] == UPDATES and after["stamp"] != live["stamp"]


def test_a_killed_run_and_an_empty_one_open(tmp_path: Path) -> None:
    killed = make_run(tmp_path / "killed", Shape(updates=3, planned=9, finished=False))
    empty = make_run(tmp_path / "empty", Shape(updates=0, planned=5, finished=False))
    data = view_of(killed, empty)
    assert ask(data, "run/0/overview")["state"] == "killed"
    assert ask(data, "run/0/audit")["only_unfinished"]
    found = ask(data, "run/1/overview")
    assert found["updates"] == 0 and found["notes"]
    for name in ("series", "timeline", "predicted", "audit", "groups", "rollouts", "histograms"):
        ask(data, f"run/1/{name}")


@pytest.mark.parametrize(
    "gone", ["spans.jsonl", "timings.jsonl", "metrics.jsonl", "config.yaml", "rollouts", "evaluations.jsonl"]
)
def test_a_run_without_one_of_its_files_still_opens(made: Path, tmp_path: Path, gone: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    path = folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    data = view_of(folder)
    for name in ("overview", "series", "timeline", "predicted", "audit", "groups", "rollouts", "histograms"):
        ask(data, f"run/0/{name}")


def test_text_without_a_tokenizer_is_token_numbers_and_says_so(tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "model", ["<unk>", "one", "two"])
    run = make_run(tmp_path / "run", Shape(updates=1), model=model, texts=lambda ordinal, sample: [1, 2, 1])
    assert ask(view_of(run), "run/0/rollouts")["rows"][0]["text"] == "one two one"
    shutil.rmtree(model)
    os.unlink(run / "rollouts" / "tokenizer.json")
    found = ask(view_of(run), "run/0/rollouts")
    assert found["rows"][0]["text"] == "1 2 1" and "no tokenizer" in found["notes"][0]


def test_folders_that_are_no_runs_are_refused_in_one_line(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such run folder"):
        ViewData([tmp_path / "nothing"])
    with pytest.raises(InputError, match=r"holds runs: name one, such as .*/run"):
        ViewData([made.parent])
    with pytest.raises(InputError, match="named twice"):
        ViewData([made, made])
