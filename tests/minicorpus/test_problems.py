"""Word problems: solved again from their text, in range, and a split to themselves."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from oasis_eval.errors import SpecError
from oasis_eval.harness.answers import flexible_number, strict_number
from oasis_eval.minicorpus.chance import SPLITS, Chance, Split, split_of
from oasis_eval.minicorpus.problems import DEFAULT, Difficulty, Kind, Problem, problem

GAINS, LOSSES = ("buys", "finds", "gets", "wins"), ("gives", "loses", "sells", "uses")


def solve(question: str) -> int:
    """Work a question out by keeping everybody's count, sentence by sentence."""
    counts: dict[str, int] = {}
    who = ""
    for sentence in question.split(". "):
        first, verb, *rest = re.sub(r"^(First|Then|Next|After that) ", "", sentence).split()
        numbers = [int(text) for text in re.findall(r"\d+", sentence)]
        who = who if first in ("he", "she") else first
        if first == "How":
            asked = re.search(r"does (\w+) have now\?", sentence)
            assert asked is not None
            return counts[asked[1]]
        if verb == "has" and "than" in rest:
            sign = 1 if "more" in rest else -1
            counts[who] = counts[rest[-1]] + sign * numbers[0]
        elif verb == "has":
            counts[who] = numbers[0] * (numbers[1] if "each" in rest else 1)
        elif verb == "gives" and "to" in rest:
            counts[who] -= numbers[0]
            counts[rest[-1]] += numbers[0]
        else:
            assert verb in GAINS + LOSSES
            counts[who] += numbers[0] if verb in GAINS else -numbers[0]
        assert counts[who] >= 0
    raise AssertionError("nothing is asked")


def _problems(count: int, *, split: Split = "train", **changes: object) -> list[Problem]:
    difficulty = Difficulty(**changes)  # type: ignore[arg-type]
    return [problem(Chance(f"{split} {n}"), split, difficulty) for n in range(count)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_answer_is_what_the_question_comes_to(kind: Kind, split: Split) -> None:
    """By a solver that shares no code with the generator; every working line is true."""
    for question, answer in _problems(100, split=split, kinds=(kind,)):
        expected = solve(question)

        assert int(answer.rpartition("#### ")[2]) == expected
        assert strict_number(answer) == flexible_number(answer) == expected
        for said, left, sign, right, total in re.findall(
            r"(\d+)[^\d\n]*: (\d+) ([-+*]) (\d+) = (\d+)\.", answer
        ):
            assert said == right
            assert {"+": int(left) + int(right), "-": int(left) - int(right)}.get(
                sign, int(left) * int(right)
            ) == int(total)
        start, *working, _ = answer.split("\n")
        assert re.search(r"^\w+ has \d+(\.$| \w+ with \d+: )", start)
        assert start.partition(":")[0].rstrip(".") in question
        assert all(re.search(r": \d+ [-+*] \d+ = \d+\.$", line) for line in working)
        for line in working:
            said = re.sub(r"(?= (?:more|fewer):)", r" \\w+", line).partition(":")[0]
            assert re.search(said, question)
        verbs = re.findall(r" (?:he|she) (\w+) \d", question)
        assert len(set(verbs)) == len(verbs)
        events = re.findall(r"(First|Then|Next|After that) ", question)
        assert events == ["First", "Then", "Next", "After that"][: len(events)]


def test_difficulty_bounds_steps_and_numbers() -> None:
    """From the least to the most, and both are reached."""
    limits = {"fewest_steps": 2, "most_steps": 3, "largest_start": 9, "largest_result": 12}
    found = _problems(400, largest_change=5, kinds=("chain", "groups"), **limits)

    assert {answer.count(" = ") for _, answer in found} == {2, 3}
    numbers = {int(n) for _, answer in found for n in re.findall(r"\d+", answer)}
    assert max(numbers) == 12
    assert {int(n) for q, _ in found for n in re.findall(r"\d+", q)} == set(range(2, 10))


def test_the_default_has_one_to_four_steps_of_every_kind() -> None:
    """The task's own difficulty, and no result beyond what the tokenizer has as one token."""
    found = _problems(600)

    assert {answer.count(" = ") for _, answer in found} == {1, 2, 3, 4}
    assert any(" each." in question for question, _ in found)
    assert any(" than " in question for question, _ in found)
    assert any(re.search(r"gives \d+ \w+ to ", question) for question, _ in found)
    assert Difficulty() == DEFAULT
    assert DEFAULT.largest_result <= 99


@pytest.mark.parametrize("split", SPLITS)
def test_every_sentence_with_a_number_belongs_to_the_split(split: Split) -> None:
    """So no other split can have it."""
    for question, _ in _problems(200, split=split):
        *facts, asked = re.split(r"(?<=\.) ", question)
        assert not re.search(r"\d", asked)

        assert {split_of(fact) for fact in facts} == {split}


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_smallest_difficulty_has_problems(kind: Kind) -> None:
    """Every kind can be made of the least that is accepted."""
    limits = {"largest_start": 2, "largest_change": 2, "largest_result": 4}

    for question, answer in _problems(10, kinds=(kind,), **limits):
        assert int(answer.rpartition("#### ")[2]) == solve(question) <= 4


def test_a_split_without_such_problems_is_told() -> None:
    """Instead of a search without end."""
    limits = {"largest_start": 2, "largest_change": 2, "largest_result": 4}

    with pytest.raises(SpecError, match="found no validation problem"):
        _problems(1, split="validation", kinds=("trade",), most_steps=1, **limits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ()}, "no kind"),
        ({"fewest_steps": 0}, "0 to 4 steps"),
        ({"fewest_steps": 5}, "5 to 4 steps"),
        ({"largest_start": DEFAULT.largest_result + 1}, "expected 2 to"),
        ({"largest_start": 1}, "starts up to 1"),
        ({"largest_result": 100}, "results up to 100"),
        ({"largest_change": 1}, "changes up to 1"),
        ({"largest_change": DEFAULT.largest_result + 1}, "changes up to"),
        ({"largest_result": 3, "largest_start": 2, "largest_change": 2}, "expected 4 to 99"),
    ],
)
def test_impossible_difficulties_are_refused(changes: dict[str, int], message: str) -> None:
    """Before anything is made."""
    with pytest.raises(SpecError, match=message):
        Difficulty(**changes)  # type: ignore[arg-type]
