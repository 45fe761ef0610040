"""Rows by number: each once in a pass, in an order of its own in each; long ones are counted, and what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.chat_tokenizer import chat_tokenizer
from msgspec.structs import replace

from llamarl.config import Config, SftConfig
from llamarl.engine.row_share import NoRows, RowShareLog, ShareRule, TokenShare
from llamarl.engine.rows import DataRows, with_epochs
from llamarl.errors import ConfigError, InputError
from llamarl.types import GroupFacts, Sampling, bytes_to_tokens

TOKENIZER = chat_tokenizer()


def row(number: int, length: int = 1) -> dict[str, str]:
    return {"prompt": f"{number}=", "completion": "x" * length}


def rows(folder: Path, data: Sequence[dict[str, Any]], *, seed: int = 0, **settings: Any) -> DataRows:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in data))
    return DataRows(SftConfig(path=str(path), **settings), TOKENIZER, max_positions=64, seed=seed)


def questions(found: DataRows, numbers: Sequence[int]) -> list[str]:
    return [found.group(number, 100 + number, Sampling(samples=8)).problem.prompt for number in numbers]


def test_a_pass_has_every_row_once_and_each_pass_and_seed_an_order_of_its_own(tmp_path: Path) -> None:
    found, other = rows(tmp_path, [row(n) for n in range(20)]), rows(tmp_path, [row(n) for n in range(20)], seed=1)
    first, second = questions(found, range(20)), questions(found, range(20, 40))
    assert sorted(first) == sorted(second) and len(set(first)) == 20 and first != second
    assert questions(other, range(20)) != first
    assert questions(found, range(20)) == first  # also after other passes


def test_a_group_holds_prompt_and_answer_as_tokens(tmp_path: Path) -> None:
    group = rows(tmp_path, [row(7)]).group(0, 5, Sampling(samples=8))
    assert (group.ordinal, group.kind, group.sampling.samples) == (5, "train", 1)
    assert TOKENIZER.decode(bytes_to_tokens(group.prompt_tokens).tolist()) == "7="
    assert group.written is not None
    assert bytes_to_tokens(group.written.tokens).tolist() == [*TOKENIZER.encode("x"), TOKENIZER.eos_ids[0]]


@pytest.mark.parametrize(("fate", "left"), [("skip", 1), ("cut", 2)])
def test_long_rows_are_left_out_or_cut_and_counted(tmp_path: Path, fate: str, left: int) -> None:
    found = rows(tmp_path, [row(1), row(2, length=30)], max_tokens=10, too_long=fate)
    assert len(found) == left
    assert "1 rows of sft.path have more than 10 tokens (the longest 33)" in found.notes[1]
    longest = max(len(found.group(n, n, Sampling()).written.tokens) for n in range(left))  # type: ignore[union-attr]
    assert longest <= 4 * 10


def test_without_too_long_rows_there_is_no_note_about_them(tmp_path: Path) -> None:
    assert len(rows(tmp_path, [row(1)]).notes) == 1


@pytest.mark.parametrize(
    ("data", "settings", "told"),
    [
        ([row(1), row(2, length=30)], {"max_tokens": 10, "too_long": "refuse"}, r"rows.jsonl:2: has 33 tokens"),
        ([row(1, length=99)], {}, "all 1 rows have more than 64 tokens"),
        ([row(1), {"messages": [{"role": "user", "content": "x"}]}], {}, "rows.jsonl:2: .* no turn of the assistant"),
    ],
)
def test_what_cannot_be_learned_is_told_with_its_line(
    tmp_path: Path, data: list[dict[str, Any]], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        rows(tmp_path, data, **settings)


def test_missing_files_are_named_by_the_setting(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^sft\.path: no file"):
        DataRows(SftConfig(path=str(tmp_path / "none.jsonl")), TOKENIZER, max_positions=64, seed=0)


def test_epochs_make_the_number_of_updates_and_contradict_no_other(tmp_path: Path) -> None:
    found = rows(tmp_path, [row(n) for n in range(10)])
    settings = {"sft": {"path": "x", "epochs": 3}}

    def updates(usual: int, **schedule: int) -> int:
        config = msgspec.convert({**settings, "schedule": {"groups_per_update": 4, **schedule}}, Config)
        return with_epochs(config, found, usual).schedule.updates

    assert updates(180) == 8  # 30 rows by 4, rounded up
    assert updates(180, updates=8) == 8
    with pytest.raises(ConfigError, match=r"schedule\.updates: 5, but sft\.epochs=3 makes 8 updates"):
        updates(180, updates=5)


STAGE = 12


def share_of(share: float, guess: float = 50.0) -> TokenShare:
    return TokenShare(ShareRule(share, STAGE, guess, True), lambda number: 10 + number % 7)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.01])
def test_rows_have_their_share_of_the_tokens_and_no_row_or_problem_is_left_out(share: float) -> None:
    """Answers are longer than was guessed, and become longer still."""
    order, count, tokens = share_of(share), 1000, list[tuple[int, int]]()
    numbers = []
    for ordinal in range(count):
        numbers.append(row := order.row_of(ordinal))
        sampled = 100 + ordinal // 5
        order.hear(ordinal, sampled)
        tokens.append((0, sampled) if row is None else (10 + row % 7, 0))
    chosen = [number for number in numbers if number is not None]
    problems = [order.problem_of(ordinal) for ordinal in range(count) if numbers[ordinal] is None]
    assert chosen == list(range(len(chosen))) and problems == list(range(len(problems)))
    late = tokens[2 * STAGE :]
    of_rows, of_answers = (sum(one) for one in zip(*late, strict=True))
    assert of_rows / (of_rows + of_answers) == pytest.approx(share, rel=0.05)


def test_an_ordinal_is_a_row_whenever_its_stage_is_reached_and_whatever_came_late() -> None:
    early, late = share_of(0.4), share_of(0.4)
    early.row_of(3 * STAGE - 1)
    for ordinal in range(3 * STAGE):
        for one in (early, late) if ordinal < STAGE else (late,):
            one.hear(ordinal, 30)
    assert [early.row_of(n) for n in range(2 * STAGE)] == [late.row_of(n) for n in range(2 * STAGE)]


def test_after_a_kill_the_same_ordinals_are_rows(tmp_path: Path) -> None:
    rule, tokens_of = ShareRule(0.4, STAGE, 50.0, True), lambda number: 10
    log = RowShareLog(tmp_path / "record", rule, tokens_of)
    for ordinal in range(10 * STAGE):
        row = log.row_of(ordinal)
        if row is None and ordinal >= STAGE:
            facts = GroupFacts(num_tokens=20 + ordinal, same_rewards=ordinal % 5 == 0)
            log.hear(ordinal, None if ordinal % 11 == 0 else facts)
    wanted = [log.row_of(ordinal) for ordinal in range(10 * STAGE)]
    log.close()
    again = RowShareLog(tmp_path / "record", rule, tokens_of)
    assert [again.row_of(ordinal) for ordinal in range(10 * STAGE)] == wanted
    assert wanted != [TokenShare(rule, tokens_of).row_of(n) for n in range(10 * STAGE)], (
        "what was heard changed nothing"
    )
    again.close()
    with pytest.raises(InputError, match="--resume: sft: the rows or their settings are other ones"):
        RowShareLog(tmp_path / "record", replace(rule, share=0.5), tokens_of)


def test_without_rows_every_ordinal_is_its_own_problem() -> None:
    none = NoRows()
    assert [none.row_of(n) for n in range(5)] == [None] * 5 and [none.problem_of(n) for n in range(5)] == [*range(5)]
