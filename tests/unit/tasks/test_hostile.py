"""Whatever a policy writes, a scorer answers with a number or a counted failure, in time, in bounds, and unmoved.

`make soak` does the same with $LLAMARL_HOSTILE = 100,000 strings instead of 5,000.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from helpers.hostile_answers import ANSWER, MARK, Case, named_cases, random_cases

from llamarl.config import RewardConfig
from llamarl.tasks.judge import Judge, Judgment
from llamarl.types import Problem

NUM_RANDOM = int(os.environ.get("LLAMARL_HOSTILE", "5000"))
SAFE = ("exact", "numeric", "choice", "format", "length")
TIME_LIMIT_S = 2.0
SLACK_S = 1.0  # a machine that is busy with other tests may be late to wake the worker
PROBLEM = Problem("What is 6 times 7?", ANSWER)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """Its workers stand in an empty folder, which shows whatever is executed in them."""
    folder = tmp_path_factory.mktemp("empty")
    before = Path.cwd()
    os.chdir(folder)
    judge = Judge(RewardConfig(scorer="math", workers=4, retries=0, timeout_s=TIME_LIMIT_S))
    judge.prepare()
    yield judge
    judge.close()
    os.chdir(before)
    assert not list(folder.iterdir()), "something was executed"


def outcomes(judge: Judge, cases: Iterable[Case]) -> dict[str, Judgment]:
    found: dict[str, Judgment] = {}
    for case in cases:
        judge.ask(case.name, case.text, PROBLEM)
        while judge.num_pending > 16:  # so that few of the large ones lie in memory
            found |= {str(key): outcome for key, outcome in judge.collect(1.0)}
    while judge.num_pending:
        found |= {str(key): outcome for key, outcome in judge.collect(1.0)}
    return found


def check(found: dict[str, Judgment]) -> None:
    wrong = {name: outcome for name, outcome in found.items() if outcome.status == "ok" and outcome.reward != 0.0}
    assert not wrong
    late = {name: outcome for name, outcome in found.items() if outcome.seconds > TIME_LIMIT_S + SLACK_S}
    assert not late
    assert all(outcome.reason for outcome in found.values() if outcome.status != "ok")


def test_there_are_enough_named_cases() -> None:
    names = [case.name for case in named_cases()]
    assert len(names) == len(set(names)) >= 300


@pytest.mark.timeout(600)
def test_no_named_case_scores_hangs_or_grows_and_the_workers_stay(judge: Judge) -> None:
    pids = judge.worker_pids
    cases = list(named_cases())
    found = outcomes(judge, cases)
    assert len(found) == len(cases)
    check(found)
    late = [name for name, outcome in found.items() if outcome.status == "timeout"]
    assert len(late) <= 5, "reading and comparing are bounded; a busy machine may still be late with a few"
    assert judge.worker_pids == pids, "a worker had to be replaced"
    assert judge.peak_mb < 512


@pytest.mark.timeout(7200)
def test_no_random_string_scores_hangs_or_grows_and_the_workers_stay(judge: Judge) -> None:
    pids = judge.worker_pids
    check(outcomes(judge, random_cases(NUM_RANDOM)))
    assert judge.worker_pids == pids, "a worker had to be replaced"
    assert judge.peak_mb < 512


def test_right_and_wrong_are_still_told_apart_after_all_that(judge: Judge) -> None:
    right = [
        r"\boxed{42}",
        r"\boxed{\frac{84}{2}}",
        r"\boxed{6 \cdot 7}",
        r"\boxed{\sqrt{1764}}",
        "#### 42",
        "so $40+2$",
    ]
    wrong = [
        r"\boxed{43}",
        r"\boxed{\frac{84}{3}}",
        r"\boxed{6 \cdot 8}",
        r"\boxed{\sqrt{1765}}",
        "#### 24",
        "so $40-2$",
    ]
    assert [judge.score(text, PROBLEM).reward for text in right] == [1.0] * len(right)
    assert [judge.score(text, PROBLEM) for text in wrong if judge.score(text, PROBLEM).reward] == []


@pytest.mark.parametrize("scorer", SAFE)
def test_scorers_that_run_in_this_process_are_quick_about_every_case(scorer: str) -> None:
    judge = Judge(RewardConfig(scorer=scorer))
    for case in named_cases():
        started_s = time.perf_counter()
        outcome = judge.score(case.text, PROBLEM)
        assert time.perf_counter() - started_s < 1.0, case.name
        assert outcome.status == "ok" and 0.0 <= outcome.reward <= 1.0, case.name
        assert outcome.reward == 0.0 or scorer in ("format", "length"), case.name
    for case in random_cases(NUM_RANDOM):
        outcome = judge.score(case.text, PROBLEM)
        assert outcome.reward == 0.0 or scorer in ("format", "length"), case.text


EXPLOSIVE = [
    ("a" * 60 + "!", r"^(a+)+$"),
    ("a" * 60 + "!", r"(a|aa)+$"),
    ("x" * 40, r"(x+x+)+y"),
    ("1" * 50, r"(\d+)*z"),
]


def test_a_pattern_that_explodes_is_a_counted_failure() -> None:
    for text, pattern in EXPLOSIVE[:2]:
        judge = Judge(RewardConfig(scorer="regex", pattern=pattern, workers=1, retries=0, timeout_s=0.5))
        assert judge.score(text, PROBLEM).status == "timeout"
        assert judge.score("aaa", PROBLEM).status == "ok"
        assert judge.counts.timeouts == 1
        judge.close()


def test_what_is_injected_would_leave_a_mark() -> None:
    """The named cases would be worth nothing if their commands could not work."""
    assert sum(MARK in case.text for case in named_cases()) >= 20
