"""Numbers are compared as numbers, whatever they are dressed in."""

from __future__ import annotations

import itertools
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasis_eval.errors import DataError
from oasis_eval.harness.answers import flexible_number, pass_at_k, strict_number
from oasis_eval.harness.tasks import score_answer

DRESSED = [
    ("29", "$29.00.", True),
    ("1000", "1,000", True),
    ("72", "**72**", True),
    ("72", "72 dollars", True),
    ("72", "72.0", True),
    ("29", "$29.50", False),
    ("1,000", "1000", True),
    ("-3", "-3", True),
    ("-3", "\u22123", True),
    ("3", "-3", False),
    ("-3", "-$3", True),
    ("-3", "$-3.00", True),
    ("0.5", ".5", True),
    ("0.5", "0.50", True),
    ("0.5", "$.50", True),
    ("-0.5", "-.5", True),
    ("42", "...42", True),
    ("42", "so...42", True),
    ("5", "No.5", True),
    ("5", "No. 5", True),
    ("1234567", "1,234,567", True),
    ("1234567.5", "1,234,567.50.", True),
    ("72", "72%", True),
    ("72", "£72", True),
    ("72", "€ 72", True),
    ("72", "\\boxed{72}", True),
    ("72", "$72$", True),
    ("72", "(72)", True),
    ("72", "72, as asked", True),
    ("72", "172", False),
    ("72", "7 2", False),
    ("1000", "1,00", False),
    ("70000", "70,000 dollars.", True),
    ("18", "18th", True),
    ("10", "10km", True),
    ("20", "x = 20", True),
    ("20", "=20", True),
    ("10000000000000000000001", "10000000000000000000001", True),
    ("10000000000000000000001", "10000000000000000000002", False),
]


@pytest.mark.parametrize(("reference", "dressed", "right"), DRESSED)
def test_a_number_is_read_through_its_dress(reference: str, dressed: str, right: bool) -> None:
    """Both readings compare values, so currency, commas, stars and full stops do not matter."""
    completion = f" First 48 and 24.\n#### {dressed}"

    score = score_answer({"answer": f"So.\n#### {reference}"}, [completion])

    assert (score["pass@1"], score["pass@1_flexible"]) == (float(right), float(right))


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("", None, None),
        ("no number at all", None, None),
        ("####", None, None),
        ("#### none", None, None),
        ("The answer is 12.", None, 12),
        ("#### 5 apples and 7 pears", 5, 7),
        ("#### 5\nThen 9 more", 5, 9),
        ("### 5", None, 5),
        ("####5", 5, 5),
        ("3-4", None, -4),
        ("It costs 3.50.", None, 3.5),
        ("The answer is...42", None, 42),
        ("Version 1.2", None, 1.2),
        ("1.2.3", None, 3),
        ("1/2", None, 2),
    ],
)
def test_strict_reads_after_the_mark_and_flexible_the_last_number(
    text: str, strict: float | None, flexible: float | None
) -> None:
    """Strict: the first number of the line after `####`; flexible: the last of the text."""
    found = strict_number(text)

    assert found == (None if strict is None else Decimal(str(strict)))
    if text not in ("3-4", "1.2.3", "1/2"):  # no reading of these is the right one
        assert flexible_number(text) == (None if flexible is None else Decimal(str(flexible)))


@given(
    value=st.decimals(-10_000_000, 10_000_000, places=2, allow_nan=False),
    before=st.sampled_from(["", "$", "€", "**", "= "]),
    after=st.sampled_from(["", ".", " dollars", "**", "!", ",", ")"]),
    commas=st.booleans(),
)
def test_any_value_comes_back(value: Decimal, before: str, after: str, commas: bool) -> None:
    """Formatting a number and reading it again is the identity, in both readings."""
    text = f"#### {before}{value:,.2f}{after}" if commas else f"#### {before}{value:.2f}{after}"

    assert strict_number(text) == value
    assert flexible_number(text) == value


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Any completion gives a number or None."""
    assert isinstance(strict_number(f"#### {text}"), Decimal | None)
    assert isinstance(flexible_number(text), Decimal | None)


def test_an_unread_answer_is_wrong_and_counted() -> None:
    """A completion without a number is no match for anything, and `unread` says so."""
    score = score_answer({"answer": "#### 3"}, ["I do not know"])

    assert (score["pass@1"], score["pass@1_flexible"], score["unread"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("answer", ["12", "", "#### twelve"])
def test_a_reference_without_a_number_is_an_error(answer: str) -> None:
    """A data file that is not GSM8K is refused, not scored as all wrong."""
    with pytest.raises(DataError, match="reference answer has no number after '####'"):
        score_answer({"answer": answer}, ["#### 12"])


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(num_samples: int) -> None:
    """Equal to counting every choice of k completions among n."""
    for num_correct in range(num_samples + 1):
        samples = [True] * num_correct + [False] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            draws = list(itertools.combinations(samples, k))
            expected = sum(any(draw) for draw in draws) / len(draws)

            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-12)
