"""Paired statistics against scipy, statsmodels, closed forms and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.multitest import multipletests

from oasis_eval import statistics

TOKENS = 511


def windows(seed: int, *, n: int, shift: float, neighbours: float = 0.0) -> tuple[list, list]:
    """Losses of two runs on n windows of one text; the second is worse by `shift` nats a token."""
    generator = np.random.default_rng(seed)
    text = generator.normal(3.0, 0.5, n)
    noise = generator.normal(0.0, 0.05, n)
    for index in range(1, n):
        noise[index] = neighbours * noise[index - 1] + math.sqrt(1 - neighbours**2) * noise[index]
    return list(TOKENS * text), list(TOKENS * (text + shift + noise))


@pytest.mark.parametrize(("n", "neighbours"), [(12, 0.0), (40, 0.0), (120, 0.0), (120, 0.5)])
def test_interval_covers_the_truth(n: int, neighbours: float) -> None:
    """A 95 % interval holds the true difference in 88 to 99 % of simulated comparisons."""
    covered = 0
    for seed in range(200):
        first, second = windows(seed, n=n, shift=0.02, neighbours=neighbours)
        interval = statistics.log_perplexity_difference(first, second, [TOKENS] * n, seed=seed)
        covered += interval.low <= 0.02 <= interval.high

    assert 0.88 <= covered / 200 <= 0.99


def test_difference_is_that_of_log_perplexities() -> None:
    """The estimate is ln ppl of the second minus ln ppl of the first, windows of any length."""
    first, second, tokens = [30.0, 10.0, 7.0], [33.0, 12.0, 8.0], [10, 4, 3]

    interval = statistics.log_perplexity_difference(first, second, tokens)

    assert interval.estimate == pytest.approx(53 / 17 - 47 / 17)
    assert interval.low <= interval.estimate <= interval.high


def test_equal_runs_differ_by_nothing() -> None:
    """Two identical runs have the interval [0, 0] and p = 1."""
    losses = [30.0, 10.0, 7.0]

    interval = statistics.log_perplexity_difference(losses, losses, [10, 4, 3])

    assert (interval.low, interval.estimate, interval.high) == (0.0, 0.0, 0.0)
    assert statistics.paired_t_test(losses, losses) == 1.0


def test_pairing_sees_what_separate_errors_cannot() -> None:
    """A shift far below the spread over windows is found, and its sign is right."""
    first, second = windows(0, n=60, shift=0.03)

    interval = statistics.log_perplexity_difference(first, second, [TOKENS] * 60)
    separate = 2 * np.std(np.array(first) / TOKENS) / math.sqrt(60)

    assert interval.low > 0
    assert separate > 0.03
    assert statistics.paired_t_test(first, second) < 0.01


def test_paired_t_test_is_scipys() -> None:
    """The p-value is that of scipy's test of two related samples."""
    first, second = windows(3, n=25, shift=0.01)

    assert statistics.paired_t_test(first, second) == pytest.approx(
        stats.ttest_rel(second, first).pvalue
    )


@pytest.mark.parametrize("seed", range(6))
def test_mcnemar_is_statsmodels_exact_test(seed: int) -> None:
    """Counts are those of the 2 x 2 table and p is statsmodels' exact value."""
    generator = np.random.default_rng(seed)
    first, second = generator.random(80) < 0.5, generator.random(80) < 0.3 + 0.1 * seed
    table = [
        [int((first & second).sum()), int((first & ~second).sum())],
        [int((~first & second).sum()), int((~first & ~second).sum())],
    ]

    result = statistics.mcnemar(first.tolist(), second.tolist())

    assert (result.only_first, result.only_second) == (table[0][1], table[1][0])
    assert result.p_value == pytest.approx(statsmodels_mcnemar(table, exact=True).pvalue)


def test_mcnemar_without_a_change() -> None:
    """Runs that agree on every question are not different."""
    assert statistics.mcnemar([True, False], [True, False]).p_value == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_holm_is_statsmodels(seed: int) -> None:
    """Adjusted p-values equal statsmodels' Holm method, ties and order included."""
    values = np.random.default_rng(seed).random(7).round(1 + seed % 2).tolist()

    assert statistics.holm(values) == pytest.approx(multipletests(values, method="holm")[1])


def test_mean_over_seeds_is_students_interval() -> None:
    """The interval is scipy's t interval around the mean."""
    values = [20.1, 20.9, 21.4]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))

    assert statistics.mean_over_seeds(values) == pytest.approx((np.mean(values), low, high))


def test_smallest_detectable_difference_has_its_power() -> None:
    """A difference of that size is found in 80 % of simulated z-tests."""
    size = statistics.smallest_detectable_difference(0.5)
    found = np.random.default_rng(0).normal(size, 0.5, 20_000) > 1.96 * 0.5

    assert found.mean() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("first", "second"), [([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([1.0, math.nan], [1.0, 2.0])]
)
def test_what_cannot_be_paired_is_refused(first: list[float], second: list[float]) -> None:
    """One window, different lengths and non-finite losses have no interval."""
    with pytest.raises(ValueError, match="paired"):
        statistics.paired_t_test(first, second)


@pytest.mark.parametrize(("n", "share", "shift"), [(20, 0.5, 0.1), (100, 0.05, 0.0), (400, 0.9, 0)])
def test_interval_of_a_share_covers_the_truth(n: int, share: float, shift: float) -> None:
    """A 95 % interval holds the true difference in at least 92 % of simulated comparisons."""
    generator = np.random.default_rng(n)
    covered = 0
    for _ in range(400):
        first = generator.random(n) < share
        changed = generator.random(n) < 0.3
        second = np.where(changed, generator.random(n) < share + shift, first)
        interval = statistics.share_difference(first.tolist(), second.tolist())
        covered += interval.low <= 0.3 * shift <= interval.high

    assert covered / 400 >= 0.92


def test_estimate_of_a_share_difference_is_the_difference() -> None:
    """Only the interval around it is adjusted; its standard error is its width in normal terms."""
    interval = statistics.share_difference([True, True, False, False], [True, False, False, False])

    assert interval.estimate == -0.25
    assert interval.stderr == pytest.approx((interval.high - interval.low) / 2 / 1.959964)
