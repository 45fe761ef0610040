"""Makes programming problems with tests: `python examples/data/make_programs.py data/programs`, for examples/code.yaml.

A problem asks for a function that does two to four steps in order, such as "keep only the even numbers, then replace the
list by its running sums"; the more steps, the harder. Expressions in Python do the steps: they give the expected values of
the tests, and the column `solution`, which neither prompts nor scorers get to see.

A problem is left out if its tests do not notice that steps are missing, if too many of them expect the same, or if the
program of an earlier problem passes all of them. So train.jsonl and test.jsonl share none. The same options give the same
files.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, groupby, islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

# What steps take and give; for each, an expression of the value v, and one or two ways to say it. {k} is one of the numbers
# behind the expression, or the second argument of the function. Code and words must agree for every value that can occur.
STEPS = """
numbers -> numbers
    [x for x in v if x % 2 == 0]
        keep only the even numbers | remove all odd numbers
    [x for x in v if x % {k} == 0]  # 3 4 5
        keep only the multiples of {k} (0 and negative ones count) | remove all numbers that {k} does not divide evenly
    [x for x in v if x > {k}]  # -3 0 2 5
        keep only the numbers greater than {k} | remove every number that is less than or equal to {k}
    [x for x in v if x * len(v) > sum(v)]
        keep only the numbers greater than the average of the list | remove all that are not greater than the average
    [x for x in v if v.count(x) == 1]
        keep only the numbers that occur exactly once | remove all numbers that occur more than once, at every place
    list(dict.fromkeys(v))
        remove repeats, keeping the first of each number | keep only the first occurrence of each number
    v[::2]
        keep the first, third, fifth number and so on | keep every other number, beginning with the first
    v[:{k}]  # 3 4 5
        keep only the first {k} numbers, or all if there are fewer | remove all that comes after the first {k} numbers
    [x + {k} for x in v]  # 2 5 7
        add {k} to every number | increase every number by {k}
    [x * {k} for x in v]  # 2 3 -2
        multiply every number by {k} | replace every number by its product with {k}
    [x % {k} for x in v]  # 3 4 7
        replace every number x by x % {k}, as Python computes it | take every number modulo {k}, with a result of 0 or more
    [min(x, {k}) for x in v]  # 4 6 9
        replace every number greater than {k} by {k} | cap every number at {k}
    [abs(x) for x in v]
        replace every number by its absolute value | drop the sign of every negative number
    [x - min(v) for x in v]
        subtract the smallest number of the list from every number | subtract the minimum of the list from all its numbers
    [sum(int(d) for d in str(abs(x))) for x in v]
        replace every number by the sum of its decimal digits, ignoring its sign
    [x * (i + 1) for i, x in enumerate(v)]
        multiply every number by its position, counting from 1 | multiply the first number by 1, the second by 2 and so on
    [sum(v[:i + 1]) for i in range(len(v))]
        replace the list by its running sums | replace each number by the sum of all numbers up to and including it
    [max(v[:i + 1]) for i in range(len(v))]
        replace each number by the largest one up to and including it
    [b - a for a, b in zip(v, v[1:])]
        replace the list by the differences of neighbors: second minus first, third minus second, ... (none for one number)
    [max(a, b) for a, b in zip(v, v[1:])]
        list the larger number of each two neighbors, from left to right (one number alone gives an empty list)
    [sum(v[i:i + {k}]) for i in range(0, len(v), {k})]  # 2 3
        cut the list from the left into blocks of {k} numbers (the last may be shorter) and replace each block by its sum
    [x for i in range(0, len(v), 2) for x in v[i:i + 2][::-1]]
        swap the first number with the second, the third with the fourth and so on; a last one without a partner stays
    v[{k} % len(v):] + v[:{k} % len(v)] if v else []  # 2 3
        rotate the list to the left by {k} places | move the first number to the end, {k} times in all
    v[::-1]
        reverse the list | put the numbers in the opposite order
    sorted(v, reverse=True)
        sort the numbers, largest first | put the numbers in descending order
    sorted(v, key=lambda x: (abs(x) % 10, x))
        sort by the last decimal digit (7 for 27 and -27), numbers with the same one by value, both with the smallest first
    sorted(v, key=lambda x: (abs(x), x))
        sort by absolute value, smallest first; of -3 and 3, the negative one comes first
    [len(list(run)) for _, run in groupby(v)]
        replace each run of equal neighbors by its length | list the lengths of the runs of equal neighbors, in order
    [sum(y < x for y in v) for x in v]
        replace each number by how many numbers of the list are smaller than it
numbers -> number
    sum(v)
        add up all numbers (0 for an empty list) | take the sum of the list, which is 0 if it is empty
    max(v) - min(v) if v else 0
        take the largest number minus the smallest (0 for an empty list)
    sum(v[::2]) - sum(v[1::2])
        take the first number minus the second plus the third minus the fourth and so on (0 for an empty list)
    min(v, key=lambda x: (-v.count(x), x), default=0)
        take the number that occurs most often, the smallest of them if there are several (0 for an empty list)
    sorted(set(v))[-2] if len(set(v)) > 1 else 0
        take the second largest of the different values (0 if there are fewer than two)
    sum(b > a for a, b in zip(v, v[1:]))
        count the numbers that are greater than the one right before them (0 for an empty list)
    v.index(max(v)) if v else -1
        take the index of the largest number, counting from 0, the first if there are several (-1 for an empty list)
numbers -> text
    ",".join(str(x) for x in v)
        join the numbers into a string, with a comma and no blank between two
    "".join(chr(97 + x % 26) for x in v)
        turn each number x into the lower-case letter at index x % 26, where 0 is a and 25 is z, and join them into a string
text -> text
    v[::-1]
        reverse the string | put the characters in the opposite order
    v.swapcase()
        swap the case of every letter | turn lower-case letters into upper case, and upper-case letters into lower case
    v[{k}:]  # 2 3
        remove the first {k} characters, or all if there are fewer
    "".join(dict.fromkeys(v))
        keep only the first occurrence of each character (a and A differ)
    "".join(c for c in v if c not in "aeiouAEIOU")
        remove all vowels (a, e, i, o, u in either case) | delete the letters a, e, i, o and u, both lower and upper case
    "".join(c for c in v if c.isalpha())
        keep only the letters | remove every character that is not a letter
    "".join(c + str(len(list(run))) for c, run in groupby(v))
        replace each run of equal characters by the character and the length of the run, also if that is 1 (aab becomes a2b1)
    "".join(chr((ord(c) - b + {k}) % 26 + b) if c.isalpha() else c for c in v for b in [97 if c.islower() else 65])  # 1 3 13
        shift every letter forward by {k} in the alphabet, with a after z, keeping its case; other characters stay as they are
text -> words
    v.split()
        split the string at blanks into a list of words; several blanks count as one, and those at the ends do not matter
text -> numbers
    [ord(c) - 96 for c in v.lower() if c.isalpha()]
        list the position in the alphabet of each letter (1 for a and A, 26 for z and Z), skipping other characters
    [i for i, c in enumerate(v) if c in "aeiouAEIOU"]
        list the indices of all vowels (a, e, i, o, u in either case), counting characters from 0
text -> number
    sum(c in "aeiouAEIOU" for c in v)
        count the vowels, which are a, e, i, o, u in either case (0 for an empty string)
    len(set(v))
        count the different characters, where a and A differ (0 for an empty string)
    max((len(list(run)) for _, run in groupby(v)), default=0)
        take the length of the longest run of equal characters (0 for an empty string)
words -> words
    v[::-1]
        reverse the order of the words | put the words in the opposite order
    [w[1:] + w[0] for w in v]
        move the first character of each word to the end of that word
    [w for w in v if len(w) > {k}]  # 2 3 4
        keep only the words with more than {k} characters | remove every word of {k} characters or fewer
    sorted(v, key=lambda w: (len(w), w))
        sort the words by length, shortest first, and words of equal length as Python compares strings
words -> text
    " ".join(v)
        join the words with one blank between two | make one string of the words, separated by single blanks
    "".join(w[0] for w in v)
        join the first characters of the words into a string
words -> numbers
    [len(w) for w in v]
        replace each word by its length | list the lengths of the words
    [sum(c in "aeiouAEIOU" for c in w) for w in v]
        replace each word by how many vowels it has (a, e, i, o, u in either case)
"""
ARGUMENTS = {
    "numbers": ("xs", "a list of integers"),
    "text": ("s", "a string of English letters, digits and single blanks"),
    "words": ("words", "a list of strings, none of them empty, of English letters and digits"),
}
FRAMES = (
    "Write a Python function {head}, where {arguments}. It does these steps in order:\n{list}\n",
    "Implement the Python function {head}, where {arguments}. {prose} ",
    "In Python, define {head}. Here, {arguments}.\n\n{prose}\n\n",
)
RULES = (
    "Each step works on the result of the one before, and the function returns the result of the last. "
    "From an empty list or string, a step makes an empty one, unless it says otherwise."
)
WORDS = (
    "apple Anna balloon bookkeeper cat coffee 42 1001 Otto radio sky tree Xylophone zoo 2024 b7 committee eel Moon up a"
)
EDGES: tuple[list[int], ...] = ([], [-17], [3, 3, -12, 3, 0, 0])  # every problem is tested on these, or on those below
TEXT_EDGES = ("", "a", "Bookkeeper 1001 bb bb B")
SIZES = (2, 2, 3, 3, 4)  # numbers of steps, in turn
NUM_TESTS = 8
MAX_SAME = 3  # tests that may expect the same value, since a program that always returns it would pass them
TRIES = 5_000

Input = tuple[Any, int]  # the value that the first step takes, and the second argument


class Step(NamedTuple):
    """Once it is drawn, a step has one wording and one k, which both texts name: a number, `k`, or none."""

    takes: str
    gives: str
    code: str
    wordings: list[str]
    ks: list[str]

    @property
    def weight(self) -> int:
        """Steps from one type to another are few, so they are drawn more often."""
        return 1 if self.gives == self.takes else 3

    def drawn(self, random: Random) -> Step:
        k = "k" if self.ks and random.random() < 0.25 else random.choice(self.ks or [""])
        wording = random.choice(self.wordings).replace("{k}", k)
        return self._replace(code=self.code.replace("{k}", k), wordings=[wording], ks=[k])


def read_steps() -> Iterator[Step]:
    lines, takes, gives = iter(STEPS.strip().splitlines()), "", ""
    for line in lines:
        if line.startswith(" "):
            code, _, ks = line.strip().partition("  # ")
            yield Step(takes, gives, code, next(lines).strip().split(" | "), ks.split())
        else:
            takes, _, gives = line.partition(" -> ")


class Maker:
    """Makes problems that differ from all that it made before."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._steps, self._inputs = list(read_steps()), make_inputs(self._random)
        self._made = defaultdict[str, list[list[str]]](
            list
        )  # results for all inputs, by the first line of the function

    def problem(self, size: int) -> dict[str, Any]:
        """A row of a data file. Raises ValueError if there seems to be no other problem of this many steps."""
        for _ in range(TRIES):
            steps = self._composition(size)
            if tests := self._tests(steps):
                prompt = make_prompt(self._random, steps)
                return {"prompt": prompt, "tests": tests, "solution": solution(steps), "steps": size}
        raise ValueError(f"no more problems of {size} steps were found; ask for fewer")

    def _composition(self, size: int) -> list[Step]:
        """Steps that fit together, each at most once."""
        used, takes = list[Step](), self._random.choice(("numbers", "numbers", "text", "words"))
        while len(used) < size:
            gives = ("numbers", "text", "words", "number")[: 4 if len(used) == size - 1 else 3]
            fitting = [step for step in self._steps if step.takes == takes and step.gives in gives and step not in used]
            used += self._random.choices(fitting, [step.weight for step in fitting])
            takes = used[-1].gives
        return [step.drawn(self._random) for step in used]

    def _tests(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        """Empty if the problem would teach nothing, or an earlier one is equal to it."""
        inputs, made = self._inputs[steps[0].takes], self._made[head_of(steps)]
        results = [result(steps, value) for value in inputs]
        others = range(len(EDGES), len(inputs))
        chosen = [*range(len(EDGES)), *self._random.sample(others, NUM_TESTS - len(EDGES))]
        shorter = [less for size in range(len(steps)) for less in combinations(steps, size) if fits(less, steps)]
        if (
            max(Counter(results[index] for index in chosen).values()) > MAX_SAME
            or any(all(result(less, inputs[index]) == results[index] for index in chosen) for less in shorter)
            or any(all(earlier[index] == results[index] for index in chosen) for earlier in made)
        ):
            return []
        made.append(results)
        num_args = head_of(steps).count(",") + 1
        return [
            {"call": "solve", "args": list(inputs[index][:num_args]), "expected": json.loads(results[index])}
            for index in chosen
        ]


def fits(less: Sequence[Step], steps: Sequence[Step]) -> bool:
    """Whether some of the steps, without the others, fit together, and take and give what all of them do."""
    takes = steps[0].takes
    for step in less:
        if step.takes != takes:
            return False
        takes = step.gives
    return takes == steps[-1].gives


def result(steps: Sequence[Step], given: Input) -> str:
    """What the steps make of a value, as JSON."""
    value, k = given
    for step in steps:
        value = compiled(step.code)(value, k)
    return json.dumps(value)


@functools.cache
def compiled(code: str) -> Callable[[Any, int], Any]:
    function: Callable[[Any, int], Any] = eval(f"lambda v, k: {code}", {"groupby": groupby})  # noqa: S307, of the table
    return function


def head_of(steps: Sequence[Step]) -> str:
    return f"solve({ARGUMENTS[steps[0].takes][0]}{', k' if any(step.ks == ['k'] for step in steps) else ''})"


def solution(steps: Sequence[Step]) -> str:
    """A program that does the steps."""
    body = "\n    v = ".join([ARGUMENTS[steps[0].takes][0], *(step.code for step in steps)])
    needed = "from itertools import groupby\n\n\n" if "groupby" in body else ""
    return f"{needed}def {head_of(steps)}:\n    v = {body}\n    return v\n"


def make_prompt(random: Random, steps: Sequence[Step]) -> str:
    head, (name, kind), said = head_of(steps), ARGUMENTS[steps[0].takes], [step.wordings[0] for step in steps]
    between = random.choice((["Then", "After that,"], ["Next,", "Then"], ["Second,", "Third,"]))
    starts = ["First,", *between[: len(said) - 2], random.choice(("Finally,", "In the last step,"))]
    frame = random.choice(FRAMES).format(
        head=head,
        arguments=f"{name} is {kind}{', and k is an integer of at least 1' if ', k' in head else ''}",
        list="\n".join(f"{number}. {text[0].upper()}{text[1:]}." for number, text in enumerate(said, 1)),
        prose=" ".join(f"{start} {text}." for start, text in zip(starts, said, strict=True)),
    )
    return frame + RULES


def make_inputs(random: Random) -> dict[str, list[Input]]:
    """Values for tests, by type. Those at the edge come first."""
    numbers, texts = list(EDGES), list(TEXT_EDGES)
    for _ in range(40):
        few = [random.randint(-30, 60) for _ in range(5)]  # some of them occur again
        numbers.append([random.choice((*few, random.randint(-9, 12))) for _ in range(random.randint(3, 10))])
        words = [random.choice((str, str.upper, str.title))(word) for word in random.choices(WORDS.split(), k=5)]
        texts.append(" ".join(words[: random.randint(1, 5)]))
    values: dict[str, list[Any]] = {"numbers": numbers, "text": texts, "words": [text.split() for text in texts]}
    return {kind: [(value, random.randint(1, 6)) for value in values[kind]] for kind in values}


def make_problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a data file, in random order. Raises ValueError if there are not as many."""
    maker = Maker(seed)
    rows = [maker.problem(size) for size in sorted(islice(SIZES * count, count))]  # so none is equal to a shorter one
    Random(seed).shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Make programming problems with tests, for training and evaluation.")
    parser.add_argument("folder", type=Path, help="where train.jsonl and test.jsonl are written")
    parser.add_argument("--train", type=int, default=2000, help="problems to train on")
    parser.add_argument("--test", type=int, default=200, help="problems to evaluate on")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other problems")
    options = parser.parse_args()
    counts = {options.folder / "train.jsonl": options.train, options.folder / "test.jsonl": options.test}
    if min(counts.values()) < 1:
        parser.error("--train and --test must be at least 1")
    if there := [str(path) for path in counts if path.exists()]:
        parser.error(f"{', '.join(there)}: already there; choose another folder, or remove what is there")
    try:
        rows = iter(make_problems(sum(counts.values()), options.seed))
    except ValueError as error:
        parser.error(str(error))
    options.folder.mkdir(parents=True, exist_ok=True)
    for path, count in counts.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in islice(rows, count)))
        print(f"{path}: {count} problems")


if __name__ == "__main__":
    main()
