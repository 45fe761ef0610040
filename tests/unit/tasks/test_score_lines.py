"""`llamarl score` reads what it judges with the same care as a data file."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from llamarl.config import RewardConfig
from llamarl.tasks.judge import Judge
from llamarl.tasks.score_lines import read_line, score_lines


@pytest.mark.parametrize("tests", [[{}], [], "[{}]", {}, [{"call": "f"}], [{"output": None}], None])
def test_tests_that_ask_nothing_are_bad_input_and_no_reward(tests: Any) -> None:
    line = json.dumps({"completion": "print(1)", "tests": tests}).encode()
    with pytest.raises(ValueError, match="tests"):
        read_line(line, "code")
    out, notes = io.StringIO(), io.StringIO()
    score_lines(io.BytesIO(line), out, notes, Judge(RewardConfig(scorer="exact")), "exact")
    assert json.loads(out.getvalue()) == {"reward": None, "status": "bad input", "seconds": 0.0}
    assert "line 1: 'tests'" in notes.getvalue()


def test_tests_are_the_answer() -> None:
    tests = [{"input": "1", "output": "2"}]
    _, problem = read_line(json.dumps({"completion": "x", "tests": tests}).encode(), "code")
    assert json.loads(problem.answer) == tests
