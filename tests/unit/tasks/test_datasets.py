"""Data files become problems: every row is right or refused by its number, and what is tested on is never trained on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llamarl.config import MixturePart, TaskConfig
from llamarl.errors import ConfigError, InputError
from llamarl.tasks.custom_scorers import ScorerRequirements
from llamarl.tasks.mixture import Mixture, shares
from llamarl.tasks.registry import make_single_task, make_task, own_scorers
from llamarl.tasks.statistics import bootstrap, pass_at_k, wilson
from llamarl.tasks.task import Task
from llamarl.types import Problem, Turn

DATA = Path(__file__).parents[2] / "data"
KINDS = [("gsm8k", 60), ("svamp", 40), ("math", 20)]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def jsonl(path: Path, **settings: Any) -> Task:
    return make_single_task(TaskConfig(kind="jsonl", path=str(path), held_out=1e-9, **settings), 0)


@pytest.mark.parametrize(("kind", "count"), KINDS)
def test_every_row_is_trained_on_or_held_out(kind: str, count: int) -> None:
    task = make_single_task(TaskConfig(kind=kind, path=str(DATA / kind), held_out=0.3), 0)  # type: ignore[arg-type]
    assert len(task.train) + len(task.held_out) == count
    assert task.train and task.held_out
    assert not {problem.prompt for problem in task.train} & {problem.prompt for problem in task.held_out}


def test_gsm8k_asks_the_question_and_wants_the_number_after_the_hashes() -> None:
    task = make_single_task(TaskConfig(kind="gsm8k", path=str(DATA / "gsm8k")), 0)
    row = json.loads((DATA / "gsm8k" / "train.jsonl").read_text().splitlines()[0])
    (problem,) = [problem for problem in [*task.train, *task.held_out] if row["question"] in problem.prompt]
    assert problem.answer == row["answer"].rpartition("#### ")[2]
    assert problem.scorer == "numeric"
    assert len(task.test) == 20


def test_thousands_of_gsm8k_are_read_without_commas(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {"question": "q", "answer": "so <<1=1>>it\n#### 1,234"})
    task = make_single_task(TaskConfig(kind="gsm8k", path=str(path), held_out=1e-9), 0)
    assert task.problem(0).answer == "1234"


def test_a_math_problem_without_an_answer_is_left_out(tmp_path: Path) -> None:
    rows = [{"problem": f"p{i}", "answer": answer, "solution": "s"} for i, answer in enumerate(("1", "", "2"))]
    path = write(tmp_path / "train.jsonl", *rows)
    task = make_single_task(TaskConfig(kind="math", path=str(path), held_out=1e-9), 0)
    assert sorted(problem.answer for problem in task.train) == ["1", "2"]


def test_what_is_tested_on_is_not_trained_on_even_if_both_files_hold_it(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(10)]
    write(tmp_path / "train.jsonl", *rows)
    write(tmp_path / "test.jsonl", *rows[:4])
    task = jsonl(tmp_path)
    assert {problem.prompt for problem in task.train} == {f"p{i}" for i in range(4, 10)}
    assert {problem.prompt for problem in task.evaluation(9, "test")} == {f"p{i}" for i in range(4)}


def test_a_folder_of_test_problems_can_be_evaluated_but_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", {"prompt": "p", "answer": 1})
    task = jsonl(tmp_path)
    assert len(task.evaluation(5, "test")) == 1
    with pytest.raises(InputError, match="holds only test problems"):
        task.problem(0)


def test_fields_are_named_by_settings(tmp_path: Path) -> None:
    path = write(
        tmp_path / "my.jsonl", {"q": "one", "a": 1.0, "w": "one is one"}, "\n", {"q": "half", "a": 0.5, "w": "x"}
    )
    task = jsonl(path, prompt_field="q", answer_field="a", solution_field="w", few_shot=1)
    problem = task.problem(0)
    assert problem.answer in ("1", "0.5")
    assert problem.prompt in ("one one is one\n\nhalf", "half x\n\none")


def test_a_column_that_a_setting_names_must_be_there_even_where_no_scorer_needs_it(tmp_path: Path) -> None:
    path, unneeded = write(tmp_path / "my.jsonl", {"prompt": "p", "target": "t"}), ScorerRequirements(answer=False)
    settings = TaskConfig(kind="dataset", path=str(path), held_out=1e-9)
    assert make_single_task(settings, 0, unneeded).problem(0).answer == ""
    with pytest.raises(InputError, match=r"no field 'taget'; there are: 'prompt', 'target'; task\.answer_field names"):
        make_single_task(replace(settings, answer_field="taget"), 0, unneeded)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken\n", "not JSON"),
        ("[1]\n", "not a JSON object"),
        ('{"prompt": NaN, "answer": 1}\n', "not JSON"),
        ({"prompt": "p"}, "no field 'answer'; there are: 'prompt'; task.answer_field names"),
        ({"answer": 1}, "no field 'prompt'; there are: 'answer'; task.prompt_field names"),
        ({"prompt": "", "answer": 1}, "'prompt' is empty"),
        ({"prompt": "p", "answer": "  "}, "'answer' is empty"),
        ({"prompt": "p", "answer": None}, "'answer' must be text or a number, is NoneType"),
        ({"prompt": "p", "answer": True}, "'answer' must be text or a number, is bool"),
        ({"prompt": {"a": 1}, "answer": 1}, "'prompt' must be text or a number, is dict"),
        ({"prompt": [], "answer": 1}, "'prompt' must end with a message of the user"),
        ({"prompt": ["hello"], "answer": 1}, "'prompt' must be text or a list of {role, content}"),
        ({"prompt": [{"role": "wizard", "content": "x"}], "answer": 1}, "'prompt' must be text or a list"),
        ({"prompt": [{"role": "user"}], "answer": 1}, "'prompt.content' must be text"),
        ('{"prompt": "\\ud800", "answer": 1}\n', ""),
        ("[" * 100_000 + "\n", "not JSON"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_number(tmp_path: Path, row: Any, reason: str) -> None:
    path = write(tmp_path / "my.jsonl", {"prompt": "p", "answer": 1}, "\n", row)
    with pytest.raises(InputError) as refused:
        jsonl(path)
    assert str(refused.value).startswith(f"{path}:3: {reason}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "gsm8k"}, r"task\.path: name the file, or the folder with train\.jsonl, that gsm8k is read from"),
        ({"kind": "jsonl", "path": "nowhere"}, r"task\.path: no file or folder nowhere"),
        ({"kind": "jsonl", "path": str(Path(__file__).parent)}, r"has no files that end with \.jsonl"),
        ({"kind": "gsm8k", "path": str(DATA / "gsm8k"), "test_path": "none"}, r"task\.test_path: no file none"),
        ({"kind": "gsm8k", "path": str(DATA / "svamp")}, r"train\.jsonl:1: 'answer' has no final answer after ####"),
        ({"kind": "math", "path": str(DATA / "math"), "few_shot": 60}, r"task\.few_shot: only \d+ problems"),
        ({"template": "no mark"}, r"task\.template: must hold \{prompt\}"),
    ],
)
def test_what_cannot_work_is_one_line_that_instructs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_task(TaskConfig(**settings), 0)


def test_a_test_file_that_is_trained_on_is_told() -> None:
    every, train = str(DATA / "gsm8k" / "*.jsonl"), str(DATA / "gsm8k" / "train.jsonl")
    task = make_task(TaskConfig(kind="gsm8k", path=every, test_path=train), 0)
    told = f"NOTE: {train} of task.test_path is read by task.path too: it is trained on"
    assert list(getattr(task, "notes", [])) == [told]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rows"):
        jsonl(write(tmp_path / "my.jsonl", "\n\n"))


def test_few_shot_examples_are_solved_always_the_same_and_never_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", *[{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(6)])
    task = jsonl(path, few_shot=2, template="Q: {prompt} A:")
    shown = {problem.prompt.rsplit("\n\n", 1)[0] for problem in task.train}
    assert len(shown) == 1 and len(task.train) == 4
    (shots,) = shown
    for problem in task.train:
        asked = problem.prompt.rsplit("\n\n", 1)[1]
        assert asked not in shots and asked.startswith("Q: p") and asked.endswith(" A:")
    assert all(line.endswith(f"A: a{line[4]}") for line in shots.split("\n\n"))


def test_a_chat_has_system_shots_and_question_in_turn(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", {"prompt": "p0", "answer": "a0"}, {"prompt": "p1", "answer": "a1"})
    settings = TaskConfig(kind="jsonl", path=str(path), held_out=1e-9, few_shot=1, chat=True, system="Be brief.")
    problem = make_task(settings, 0).problem(0)
    shot = "0" if problem.answer == "a1" else "1"
    assert problem.turns == (
        Turn("system", "Be brief."),
        Turn("user", f"p{shot}"),
        Turn("assistant", f"a{shot}"),
        Turn("user", problem.prompt),
    )


def test_messages_of_a_row_stay_as_they_are(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    problem = jsonl(write(tmp_path / "my.jsonl", {"prompt": messages, "answer": 1})).problem(0)
    assert problem.turns == (Turn("system", "s"), Turn("user", "u"))
    assert problem.prompt == "u"


def test_a_template_may_hold_any_braces(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", {"prompt": r"\frac{1}{2} {prompt}", "answer": 1})
    assert jsonl(path, template="{x} {prompt} {}").problem(0).prompt == r"{x} \frac{1}{2} {prompt} {}"


MIXTURE = TaskConfig(
    kind="mixture",
    parts=(
        MixturePart(kind="gsm8k", path=str(DATA / "gsm8k"), weight=3.0),
        MixturePart(kind="math", path=str(DATA / "math"), weight=1.0),
    ),
)


def test_a_mixture_keeps_its_weights_exactly_and_every_problem_its_own_scorer() -> None:
    task = make_task(MIXTURE, 0)
    counts = Counter(task.problem(ordinal).scorer for ordinal in range(2000))
    assert counts == {"numeric": 1500, "math": 500}
    assert own_scorers(MIXTURE) == ("numeric", "math")
    assert {problem.scorer for problem in task.evaluation(2)} == {"numeric", "math"}


@given(st.integers(0, 2**40), st.integers(0, 10**6))
def test_a_mixture_can_be_entered_anywhere(seed: int, ordinal: int) -> None:
    parts = [(Task([Problem(f"{name}{i}", "") for i in range(size)], [], seed=seed), w) for name, size, w in SIZES]
    fresh, used = Mixture(parts, seed=seed), Mixture(parts, seed=seed)
    before = [used.problem(o) for o in range(ordinal, ordinal + 40)]
    assert fresh.problem(ordinal + 39) == before[39]


SIZES = [("a", 7, 1.0), ("b", 3, 2.0), ("c", 11, 0.5)]


def test_each_part_of_a_mixture_goes_through_its_own_problems_in_turn() -> None:
    parts = [(Task([Problem(f"{name}{i}", "") for i in range(size)], [], seed=1), w) for name, size, w in SIZES]
    task = Mixture(parts, seed=1)
    seen = [task.problem(ordinal).prompt for ordinal in range(3000)]
    for name, size, _ in SIZES:
        own = [prompt for prompt in seen if prompt.startswith(name)]
        for start in range(0, len(own) - size, size):
            assert len(set(own[start : start + size])) == size, "a pass asks every problem once"


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_shares_sum_to_a_block(weights: list[float]) -> None:
    try:
        counts = shares(weights)
    except ConfigError:
        assert min(weights) / sum(weights) < 0.001
        return
    assert sum(counts) == 1000
    assert all(abs(count - 1000 * w / sum(weights)) <= 1 for count, w in zip(counts, weights, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "mixture"}, r"task\.parts: a mixture needs parts"),
        ({"parts": (MixturePart(),)}, r"task\.parts: a mixture needs parts"),
        ({"kind": "mixture", "parts": (MixturePart(),), "path": "x"}, r"task\.path: a mixture's parts"),
        ({"system": "x"}, r"task\.system: cannot take effect"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskConfig(**settings)


def test_pass_at_k_is_the_chance_that_one_of_k_is_right() -> None:
    assert pass_at_k(10, 0, 5) == 0.0
    assert pass_at_k(10, 10, 1) == 1.0
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - (2 / 4) * (1 / 3))
    assert pass_at_k(4, 3, 2) == 1.0


def test_intervals_hold_the_share_and_shrink() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 20)[0] == 0.0 and 0 < wilson(0, 20)[1] < 0.2
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = bootstrap([0.0, 1.0] * 200)
    assert 0.44 < low < 0.5 < high < 0.56
    assert bootstrap([0.0, 1.0] * 200) == (low, high), "the same every time"
