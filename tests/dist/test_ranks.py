"""Test programs of several ranks: a crash of native code is told and tried once more, all else fails at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import run_ranks


def test_ranks_that_crash_once_are_run_again_and_told(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with pytest.warns(UserWarning, match=r"crashed \(\[-6, 0\]\) and were run again"):
        run_ranks("helpers.crashing_rank", 2, str(tmp_path / "work"), "1", str(tmp_path / "mark"))
    with pytest.warns(UserWarning), pytest.raises(AssertionError, match=r"ranks ended with \[-6, 0\]"):
        run_ranks("helpers.crashing_rank", 2, str(tmp_path / "work"), "3", str(tmp_path / "mark"))


def test_ranks_that_fail_are_not(tmp_path: Path) -> None:
    (tmp_path / "left").touch()
    with pytest.raises(AssertionError, match=r"ranks ended with \[1, 0\]"):
        run_ranks("helpers.crashing_rank", 2, str(tmp_path), "0", str(tmp_path / "mark"))
