"""Rows of a run: damaged rows are skipped and reported, the end can be removed, and metrics have each update once."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.observe import rows as rows_module
from llamarl.observe.metrics_file import MetricsFile
from llamarl.observe.rows import Rows, cut_rows, read_rows


def lines(count: int) -> bytes:
    return b"".join(json.dumps({"update": n, "text": "x" * (7 * n % 50)}).encode() + b"\n" for n in range(count))


def test_damaged_rows_and_a_torn_end_are_left_out_and_told(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"update":0}\n{"upd\x00\xff\n\x00\x00\n[1]\n{"update":1}\n{"update":2')
    rows: Rows[dict[str, int]] = Rows(file, dict[str, int])
    assert list(rows) == [{"update": 0}, {"update": 1}]
    assert rows.warning == f"{file}: 3 damaged rows are left out (line 2, 3, 4)"
    assert read_rows(tmp_path / "nowhere") == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(-1, 45), st.integers(1, 200), st.booleans())
def test_cutting_takes_back_the_end_and_nothing_else(count: int, kept: int, block: int, torn: bool) -> None:
    with TemporaryDirectory() as folder:
        file, before = Path(folder) / "rows", rows_module._BLOCK_BYTES
        whole = lines(count)
        file.write_bytes(whole + (b'{"update":99' if torn else b""))
        rows_module._BLOCK_BYTES = block
        try:
            gone = cut_rows(file, lambda row: row["update"] < kept)
        finally:
            rows_module._BLOCK_BYTES = before
        assert file.read_bytes() == lines(max(0, min(kept, count)))
        assert [row["update"] for row in gone] == list(range(max(0, kept), count))


def test_metrics_of_updates_made_again_stand_once_and_in_order(tmp_path: Path) -> None:
    """Two training roles that die now and then write the same file as a run without deaths."""

    def metrics(update: int, role: str) -> dict[str, float]:
        return {"loss": update + len(role) / 10}

    roles = ("critic", "trainer")
    straight = MetricsFile(tmp_path / "straight", roles)
    for update in range(30):
        for role in roles:
            straight.add(update, role, metrics(update, role))
    straight.close()
    chance, file = Random(0), MetricsFile(tmp_path / "killed", roles)
    made = dict.fromkeys(roles, 0)
    while made["trainer"] < 30:
        role = chance.choice([r for r in roles if made[r] < 30 and (r == "critic" or made[r] < made["critic"])])
        if chance.random() < 0.1:  # back to a snapshot at most three updates ago
            made[role] = min(made[role], max(0, min(made.values()) - chance.randrange(3)))
            file.rewind(made[role], role)
            made["trainer"] = min(made["trainer"], 30)
        elif role == "critic" or made["trainer"] < made["critic"]:
            file.add(made[role], role, metrics(made[role], role))
            made[role] += 1
    file.close()
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "straight").read_bytes()


def test_metrics_go_on_behind_the_rows_that_count(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_bytes(
        b'{"update":0,"role":"trainer"}\ngarbage\n{"update":1,"role":"trainer"}\n{"upd\n{"update":2,"ro'
    )
    file = MetricsFile(tmp_path / "metrics", ("trainer",), 1)
    file.add(1, "trainer", {"loss": 1.0})
    file.close()
    assert read_rows(tmp_path / "metrics") == [
        {"update": 0, "role": "trainer"},
        {"update": 1, "role": "trainer", "loss": 1.0},
    ]
