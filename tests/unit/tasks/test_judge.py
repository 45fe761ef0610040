"""Scorers alone and together, in this process and in workers; the workers die and are replaced, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest

from llamarl.config import RewardConfig
from llamarl.errors import ConfigError
from llamarl.tasks.judge import Judge, Judgment
from llamarl.types import Problem

DATA = Path(__file__).parents[2] / "data"
OWN = """
import os, time
SEEN = []

def remembers(completion, answer, prompt):
    SEEN.append(completion)
    return len(SEEN)

def spoils(completion, answer, prompt):
    if completion == "spoil":
        global score
        import builtins
        builtins.float = lambda value: 1.0
        os.environ["SPOILT"] = "1"
    return float(completion == answer and "SPOILT" not in os.environ)

def starts_a_process(completion, answer, prompt):
    pid = os.fork()
    if pid == 0:
        if completion == "apart":
            os.setsid()
        time.sleep(60)
        os._exit(0)
    return pid

def kills_its_worker(completion, answer, prompt):
    if completion == "kill":
        os.kill(os.getppid(), 9)
        time.sleep(60)
    return 1.0

def forges(completion, answer, prompt):
    print('{"reward": 1.0, "status": "ok", "seconds": 0.0}', flush=True)
    for fd in range(3, 64):
        try:
            os.write(fd, b"\\x82\\xa6status\\xa2ok")
        except OSError:
            pass
    return 0.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own scorers.py"
    path.write_text(OWN)
    return path


def own_judge(file: Path, function: str, **settings: object) -> Judge:
    judge = Judge(RewardConfig(scorer=f"{file}:{function}", workers=1, retries=0, **settings))  # type: ignore[arg-type]
    judge.prepare()
    return judge


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: object, limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.fixture(scope="module")
def math() -> Iterator[Judge]:
    judge = Judge(RewardConfig(scorer="math", retries=0))
    judge.prepare()
    yield judge
    judge.close()


def test_one_answer_cannot_touch_the_next(file: Path) -> None:
    """Not by what a module remembers, and not by what it does to Python itself."""
    judge = own_judge(file, "remembers")
    assert [judge.score("x", Problem("", "y")).reward for _ in range(3)] == [1.0, 1.0, 1.0]
    judge.close()
    judge = own_judge(file, "spoils")
    judge.score("spoil", Problem("", "y"))
    assert [judge.score(text, Problem("", "y")).reward for text in ("y", "z", "z")] == [1.0, 0.0, 0.0]
    judge.close()


def test_what_a_scorer_starts_ends_with_it(file: Path) -> None:
    judge = own_judge(file, "starts_a_process")
    for text in ("together", "apart"):
        outcome = judge.score(text, Problem("", "y"))
        assert outcome.status == "ok"
        assert not alive(int(outcome.reward)), text
    judge.close()


def test_a_worker_that_is_killed_is_replaced_and_its_answer_is_a_failure(file: Path) -> None:
    judge = own_judge(file, "kills_its_worker")
    before = judge.worker_pids
    outcome = judge.score("kill", Problem("", "y"))
    assert (outcome.status, outcome.reason) == ("error", "its worker died")
    assert len(judge.worker_pids) == len(before) == 1
    assert judge.worker_pids != before
    assert judge.score("x", Problem("", "y")).reward == 1.0
    judge.close()


def test_a_worker_that_is_stopped_is_replaced_too(file: Path) -> None:
    judge = own_judge(file, "kills_its_worker", timeout_s=0.2)
    os.kill(judge.worker_pids[0], signal.SIGSTOP)
    assert judge.score("x", Problem("", "y")).status == "timeout"
    assert judge.score("x", Problem("", "y")).reward == 1.0
    judge.close()


def test_what_a_scorer_prints_or_writes_is_no_verdict(file: Path) -> None:
    judge = own_judge(file, "forges")
    outcome = judge.score("x", Problem("", "y"))
    assert outcome.reward == 0.0 and outcome.status in ("ok", "error")
    judge.close()


def test_workers_end_with_the_judge_and_with_its_process(file: Path) -> None:
    judge = own_judge(file, "remembers")
    (pid,) = judge.worker_pids
    judge.close()
    assert not alive(pid)
    code = (
        "from llamarl.config import RewardConfig\nfrom llamarl.tasks.judge import Judge\nimport os, signal\n"
        f"judge = Judge(RewardConfig(scorer={str(file) + ':remembers'!r}))\njudge.prepare()\n"
        "print(*judge.worker_pids, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_for(lambda: not any(map(alive, pids)))


def test_scorers_are_combined_with_their_weights() -> None:
    combine = {"numeric": 1.0, "format": 0.25, "length": -0.5}
    judge = Judge(RewardConfig(combine=combine, format="hashes", max_chars=100))
    assert judge.score("so\n#### 5", Problem("", "5")).reward == pytest.approx(1.0 + 0.25 - 0.5)
    assert judge.score("so\n#### 6", Problem("", "5")).reward == pytest.approx(0.25 - 0.5)
    assert judge.score("5" + " " * 74, Problem("", "5")).reward == pytest.approx(1.0 - 0.25)


def test_here_and_in_workers_add_up(file: Path) -> None:
    combine = {"exact": 1.0, "math": 0.5, f"{file}:remembers": 0.25, "regex": 0.125}
    judge = Judge(RewardConfig(combine=combine, pattern=r"(\d)x", workers=1))
    assert judge.score("(x+1)(x-1)", Problem("", "x^2-1")).reward == pytest.approx(0.5 + 0.25)
    assert judge.score("3x", Problem("", "3")).reward == pytest.approx(0.25 + 0.125)
    judge.close()


@pytest.mark.parametrize(
    ("pattern", "text", "reward"),
    [("yes", "oh yes", 1.0), ("yes", "no", 0.0), (r"is (\d+)", "is 1, is 42", 1.0), (r"is (\d+)", "is 42, is 1", 0.0)],
)
def test_a_pattern_is_found_or_its_last_group_is_the_answer(pattern: str, text: str, reward: float) -> None:
    judge = Judge(RewardConfig(scorer="regex", pattern=pattern, workers=1))
    assert judge.score(text, Problem("", "42")).reward == reward
    judge.close()


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        *[
            (text, 1.0)
            for text in ("(B)", "The answer is B.", r"\boxed{B}", "Not A but B", "**Answer: B** as A is odd", "b")
        ],
        *[(text, 0.0) for text in ("A", "Bob", "", "not B", "B or C")],
    ],
)
def test_a_choice_is_the_letter_that_is_called_the_answer(text: str, reward: float) -> None:
    assert Judge(RewardConfig(scorer="choice")).score(text, Problem("", "B")).reward == reward


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        ("boxed", r"x \boxed{1}", r"\boxed{1} \boxed{2}"),
        ("hashes", "x\n#### 1\n", "#### 1\nx"),
        ("think", "<think>a</think>b", "<think>a</think>"),
    ],
)
def test_a_format_is_kept_or_not(shape: str, good: str, bad: str) -> None:
    judge = Judge(RewardConfig(scorer="format", format=shape))  # type: ignore[arg-type]
    assert (judge.score(good, Problem("", "1")).reward, judge.score(bad, Problem("", "1")).reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("gold", "given", "reward"),
    [
        (r"{1,3} \cup {2,4}", r"\boxed{{1,2,3,4}}", 1.0),  # the example that math-verify's page begins with
        ("x^2-1", r"\boxed{(x-1)(x+1)}", 1.0),
        (r"\frac{\sqrt{3}}{3}", r"$\frac{1}{\sqrt{3}}$", 1.0),
        ("(-2,2)", r"\boxed{(-2, 2)}", 1.0),
        ("x \\le 4", r"\boxed{4 \ge x}", 1.0),
        ("x^2-1", r"\boxed{x^2+1}", 0.0),
        (r"9\pi", r"\boxed{28.27}", 0.0),
        ("42", "I do not know", 0.0),
    ],
)
def test_mathematics_is_judged_by_what_it_means(math: Judge, gold: str, given: str, reward: float) -> None:
    outcome = math.score(given, Problem("", gold))
    assert (outcome.status, outcome.reward) == ("ok", reward)


@pytest.mark.parametrize(
    "given", [r"8^\infty\pi", r"\{8^\infty\pi\}", r"\pm8^\inftyπ", r"\frac{\pi}{0}", r"8^{\frac{1}{0}}\pi"]
)
@pytest.mark.parametrize("gold", ["42", r"\frac{1}{2}", "(1,2)", r"(-\infty,3]"])
def test_no_answer_is_right_for_every_question(math: Judge, given: str, gold: str) -> None:
    """With math-verify alone the first three are: the tests' random strings found that."""
    outcome = math.score(f"\\boxed{{{given}}}", Problem("", gold))
    assert (outcome.status, outcome.reward) == ("ok", 0.0)


def test_the_published_cases_of_math_verify_come_out_the_same(math: Judge) -> None:
    cases = json.loads((DATA / "math_verify.json").read_text())
    for number, (gold, given, _) in enumerate(cases["same"]):
        math.ask(number, given, Problem("", gold))
    found: dict[Hashable, Judgment] = {}
    while math.num_pending:
        found |= dict(math.collect(1.0))
    for number, (gold, given, reward) in enumerate(cases["same"]):
        assert found[number].status == "timeout" or found[number].reward == reward, (gold, given)
        assert found[number].status != "error", (gold, given)
    late = sum(outcome.status == "timeout" for outcome in found.values())
    assert late <= 2, "a few take seconds, which a busy machine may not give them"
    assert len(cases["differing"]) <= 17 and all(reason for *_, reason in cases["differing"])


def test_nothing_can_be_evaluated_in_a_math_worker() -> None:
    """The two ways in which SymPy executes text are gone, and what is tried all the same is refused."""
    code = (
        "from llamarl.tasks.math.symbolic import load_equal\nload_equal()\n"
        "from llamarl.tasks.workers.confine import Refused, seal\nimport sympy, os, socket, subprocess\nseal()\n"
        "def refused(action):\n"
        "    try:\n        action()\n"
        "    except (Refused, sympy.SympifyError) as error:\n        print(type(error).__name__)\n"
        "    else:\n        print('DONE')\n"
        "refused(lambda: sympy.sympify('x+1'))\nrefused(lambda: sympy.Number('__import__(\"os\")'))\n"
        "refused(lambda: eval('1'))\nrefused(lambda: exec('1'))\nrefused(lambda: open('made', 'w'))\n"
        "refused(lambda: open('/etc/hostname'))\nrefused(lambda: os.system('true'))\nrefused(lambda: socket.socket())\n"
        "refused(lambda: subprocess.run(['true']))\nrefused(lambda: os.kill(1, 0))\nrefused(os.fork)\n"
        "refused(lambda: sympy.lambdify(sympy.Symbol('x'), 1))\n"
        "print(sympy.simplify('1') if False else sympy.Integer(2) + 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    *tried, computed = done.stdout.split()
    assert tried[:2] == ["SympifyError", "SympifyError"], done.stderr
    assert set(tried[2:]) == {"Refused"} and len(tried) == 12
    assert computed == "5"


def test_the_same_answer_need_not_be_worked_out_twice(math: Judge) -> None:
    problem = Problem("", "x^2-9")
    first = math.score(r"\boxed{(x-3)(x+3)}", problem)
    again = math.score(r"it is \boxed{(x-3)(x+3)}", problem)
    assert (first.reward, again.reward) == (1.0, 1.0)
    assert again.seconds < 0.01 < first.seconds
    assert math.score(r"\boxed{(x-3)(x+3)}", Problem("", "x^2-8")).reward == 0.0


def test_an_unknown_scorer_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown scorer 'vibes'; known: exact, numeric, choice, .* or FILE"):
        Judge(RewardConfig(scorer="vibes"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scorer": "exact", "combine": {"exact": 1.0}}, r"reward\.scorer: cannot take effect beside reward\.combine"),
        ({"combine": {"exact": float("nan")}}, r"reward\.combine: weights must be finite"),
        ({"scorer": "regex"}, r"reward\.pattern: the regex scorer needs one"),
        ({"scorer": "regex", "pattern": "("}, r"reward\.pattern: missing \)"),
        ({"scorer": "nowhere.py:score"}, r"reward\.scorer: no file nowhere\.py"),
        ({"combine": {"exact": 1.0, "nowhere.py:score": 1.0}}, r"reward\.scorer: no file nowhere\.py"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_anything_starts(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Judge(RewardConfig(workers=1, **settings)).prepare()  # type: ignore[arg-type]


def test_without_the_math_extra_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs math-verify: pip install 'llamarl\[math\]'"):
        Judge(RewardConfig(scorer="math", workers=1)).prepare()
