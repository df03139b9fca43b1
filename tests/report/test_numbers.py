"""How values are printed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasis_eval.report.footnotes import letters
from oasis_eval.report.numbers import (
    format_change,
    format_number,
    format_value,
    format_with_error,
    is_floor,
)
from oasis_eval.report.order import natural_key


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5.474, "5.47"),
        (999.994, "999.99"),
        (999.996, "1000"),
        (1234.5, "1234"),
        (9999.4, "9999"),
        (9999.6, "1.000e4"),
        (12345.6, "1.235e4"),
        (3.2e104, "3.200e104"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_perplexity(value: float, expected: str) -> None:
    """Two decimals, from 1000 on four significant digits."""
    assert expected == format_value(value, "token_perplexity")


def test_share_is_printed_in_percent() -> None:
    """A share of 0.1254 is 12.5 %."""
    assert format_value(0.1254, "pass@1") == "12.5"


@pytest.mark.parametrize(
    ("value", "error", "metric", "expected"),
    [
        (2.79, 0.31, "token_perplexity", "2.79 ± 0.31"),
        (2.79, 0.01, "token_perplexity", "2.79 ± 0.01"),
        (2.7904, 0.0041, "token_perplexity", "2.790 ± 0.004"),
        (2.7904, 0.0096, "token_perplexity", "2.790 ± 0.010"),
        (2.79, 0.00031, "token_perplexity", "2.7900 ± 0.0003"),
        (2.79, 3e-12, "token_perplexity", "2.79 ± 3e-12"),
        (2.79, 0.0, "token_perplexity", "2.79 ± 0.00"),
        (2.79, math.inf, "token_perplexity", "2.79 ± inf"),
        (math.nan, 0.001, "token_perplexity", "NaN ± 1e-03"),
        (1234.5, 0.001, "token_perplexity", "1234 ± 1e-03"),
        (0.5, 0.0004, "pass@1", "50.00 ± 0.04"),
        (0.5, 0.04, "pass@1", "50.0 ± 4.0"),
        (3.14159, 0.00012, "nll_nats", "3.142 ± 1.200e-4"),
    ],
)
def test_an_error_shows_a_digit(value: float, error: float, metric: str, expected: str) -> None:
    """An uncertainty is never printed as zero unless it is; the value gets as many decimals."""
    assert expected == format_with_error(value, error, metric)


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(3.2, "+3.20"), (-84.14, "-84.14"), (0.0, "0.00"), (-0.001, "0.00"), (math.inf, "inf")],
)
def test_change(percent: float, expected: str) -> None:
    """Changes have a sign, zero and infinity have none."""
    assert expected == format_change(percent)


@given(st.floats(min_value=-1e300, max_value=1e300), st.sampled_from([None, 0, 1, 2, 3]))
def test_printed_number_is_near_the_number(value: float, decimals: int | None) -> None:
    """Every form reads back to within its last digit."""
    allowed = max(abs(value) * 5.1e-4, 0.0 if decimals is None else 0.51 * 10.0**-decimals)

    assert abs(float(format_number(value, decimals)) - value) <= allowed


@pytest.mark.parametrize(
    ("value", "stderr", "count", "expected"),
    [
        (0.0, 0.0, 100, True),
        (0.01, 0.00995, 100, True),
        (0.2, 0.04, 100, False),
        (0.01, None, 100, True),
        (0.0, None, None, False),
        (math.nan, None, 100, False),
    ],
)
def test_floor(value: float, stderr: float | None, count: int | None, expected: bool) -> None:
    """At the floor is what lies within 1.96 standard errors of 0, if the count is known."""
    assert expected == is_floor("pass@1", value, stderr=stderr, count=count)


def test_letters() -> None:
    """Letters go on after z and leave out l and o."""
    assert [letters(index) for index in (0, 10, 11, 23, 24, 25)] == ["a", "k", "m", "z", "aa", "ab"]


def test_natural_order() -> None:
    """Numbers inside names compare as numbers."""
    names = ["m-13b", "m-7b", "M-7b", "m", "7b"]

    assert sorted(names, key=natural_key) == ["7b", "m", "M-7b", "m-7b", "m-13b"]
