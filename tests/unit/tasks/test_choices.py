"""Multiple choice: one letter that a completion commits to, and nothing half-read."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.tasks.choices import choice, chosen_letter

COMMITTED = [
    "B",
    "b",
    " (b) ",
    "B.",
    "B. I am sure.",
    "B) Paris",
    "**B**",
    "**B) Paris**",
    "B: Paris",
    "B - Paris",
    "B, since A is too small",
    "B. It is not A.",
    "b. paris",
    "- (B)",
    "The answer is B.",
    "the answer is b",
    "The answer is b.",
    "The correct answer is (B) because A is too small.",
    "The answer is definitely option B.",
    "Answer: **B**",
    "**Answer:** B",
    "**Answer: B** as A is odd",
    "Answer B",
    "Final answer: $\\boxed{\\text{B}}$",
    "The answer is $B$.",
    "\\boxed{B}",
    "\\boxed{b}",
    "\\boxed{(B)}",
    "\\boxed{\\text{(B)}}",
    "\\boxed{\\textbf{(B)}\\ 12}",
    "\\boxed{B. Paris}",
    "Say \\boxed{B}, so again \\boxed{B}.",
    "Suppose the answer is A. That fails. The answer is B.",
    "The answer is not A. The answer is B.",
    "It is not A so the answer is B.",
    "Option A is too small. Option C is too large. The correct option is B.",
    "A) London\nB) Paris\nThe answer is B",
    "I choose B",
    "B, i.e. Paris",
    "The answer is B I think",
    "The answer is B) Paris, not A) London",
    "The answer is **B. Paris**",
    "The best answer would be B: A is smaller and C is larger.",
    "All things considered the answer is B.",
    "Not A but B",
    "Therefore, B.",
    "I am sure that it must be (B).",
    "Reasoning about A and C.\n\nB",
    "<think>The answer is A. No.</think>B",
    "thinking about C</think>\nThe answer is B.",
    "\u201cB\u201d is it: the answer is B",
]

NOT_COMMITTED = [
    "",
    "not B",
    "Not B.",
    "Neither A nor B",
    "B or C",
    "A, B",
    "A/B",
    "B and C",
    "A. B. C. D.",
    "B. Or maybe C.",
    "(A) (B) (C)",
    "The answer is A B C D",
    "The answer is A B",
    "The answer is b, c.",
    "b, c",
    "(b) or (c)",
    "A\nB",
    "A) London\nB) Paris",
    "The answer is A or B.",
    "The answer is B or A.",
    "The answer is B, or perhaps C.",
    "The answer is B and C",
    "The answer is B/C",
    "The answer is not B.",
    "The answer isn't B",
    "The answer is B? No.",
    "I do not think the answer is B.",
    "I doubt that the answer is B",
    "If the answer is B then I do not know",
    "The answer B is wrong.",
    "The answer is A. No, the answer is B.",
    "The answer is probably B.",
    "Maybe B",
    "It might be B.",
    "Is it B?",
    "B?",
    "B is wrong",
    "It can't be B.",
    "All but B",
    "Anything except B",
    "\\boxed{A} \\boxed{B}",
    "\\boxed{A, B}",
    "\\boxed{A or B}",
    "\\boxed{not B}",
    "\\boxed{ABCD}",
    "\\boxed{B",
    "Bob",
    "be",
    "bad answer",
    "<think>The answer is B",
    "<think>B</think>",
    "Option A fits. Option B fits.",
]


@pytest.mark.parametrize("text", COMMITTED)
def test_a_letter_that_is_committed_to_is_read(text: str) -> None:
    assert choice(text, "B", "") == 1.0
    assert choice(text, "(b)", "") == 1.0
    assert choice(text, "A", "") == 0.0


@pytest.mark.parametrize("text", NOT_COMMITTED)
def test_denials_guesses_and_several_letters_are_no_answer(text: str) -> None:
    assert choice(text, "B", "") == 0.0
    assert chosen_letter(text) is None


@pytest.mark.parametrize(
    "text", ["I am sure.", "A banana is yellow.", "The answer is a banana.", "I think", "i.e. something", "A lot"]
)
def test_words_are_no_letters(text: str) -> None:
    assert chosen_letter(text) is None


def test_a_and_i_are_letters_where_they_are_meant_as_such() -> None:
    assert chosen_letter("The answer is A because it is large.") == "A"
    assert chosen_letter("I") == "I"
    assert chosen_letter("The answer is I.") == "I"
    assert chosen_letter("a") == "A"


@given(st.text(alphabet=st.characters(codec=None), max_size=200))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert choice(text, "B", "") in (0.0, 1.0)
    assert choice("B", text, "") in (0.0, 1.0)


@pytest.mark.parametrize(
    "part",
    ["answer is ", "\\boxed{", "(" * 50, "A, ", "not ", "A\n", " ", "**", "or maybe ", "B. ", "{}", "answer: ((("],
)
def test_long_texts_take_little_time(part: str) -> None:
    start_s = time.perf_counter()
    chosen_letter(part * (200_000 // len(part)))
    assert time.perf_counter() - start_s < 0.5
