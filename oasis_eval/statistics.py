"""Is a difference real? Paired tests and intervals as pure functions on arrays.

Two runs on the same windows or questions are compared pair by pair: what the text contributes to
both cancels, and far smaller differences can be seen than two standard errors side by side suggest.

Dimensions: W windows, Q questions, S seeds, H hypotheses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.95
"""Confidence of every interval of the suite."""

_NUM_RESAMPLES = 4000
Array = NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate and where the truth is in `LEVEL` of all comparisons."""

    estimate: float
    low: float
    high: float

    @property
    def stderr(self) -> float:
        """Return the standard error of a normal estimate with an interval of this width."""
        return (self.high - self.low) / 2.0 / float(stats.norm.ppf(0.5 + LEVEL / 2.0))


class McNemar(NamedTuple):
    """Exact McNemar test of two sets of right and wrong answers to the same questions."""

    only_first: int
    """Questions that only the first run answered right."""
    only_second: int
    p_value: float


def log_perplexity_difference(
    first_W: Sequence[float],
    second_W: Sequence[float],
    tokens_W: Sequence[int],
    *,
    block: int | None = None,
    seed: int = 0,
) -> Interval:
    """Return ln ppl(second) - ln ppl(first) with a paired block-bootstrap interval.

    Neighbouring windows of one text are alike, so blocks of neighbours are drawn, not windows
    (circular block bootstrap, Politis and Romano 1992). The bootstrap's standard error is scaled
    by sqrt(B / (B - 1)) and by Student's t of B - 1 degrees of freedom for the B blocks of a
    sample: a handful of blocks understates its own spread.

    Args:
        first_W: Summed loss of each window under the first run, nats.
        second_W: The same windows under the second run.
        tokens_W: Scored tokens of each window.
        block: Windows of a block; default: 1.5 times the cube root of W, rounded.
        seed: Seed of the resampling.

    Raises:
        ValueError: The arrays differ in length, hold fewer than two windows, or a non-finite loss.
    """
    difference_W = _paired(first_W, second_W)
    weight_W = np.asarray(tokens_W, dtype=np.float64)
    if weight_W.shape != difference_W.shape:
        raise ValueError(f"paired losses of {len(difference_W)} windows, {len(weight_W)} counts")
    n = len(difference_W)
    estimate = float(difference_W.sum() / weight_W.sum())
    size = max(1, min(n // 2, block or round(1.5 * n ** (1 / 3))))
    blocks = math.ceil(n / size)
    # Sums over every block of neighbours (circular, so that no window is drawn less often).
    offsets = (np.arange(n)[:, None] + np.arange(size)) % n
    loss_blocks = difference_W[offsets].sum(axis=1)
    weight_blocks = weight_W[offsets].sum(axis=1)
    drawn = np.random.default_rng(seed).integers(0, n, size=(_NUM_RESAMPLES, blocks))
    samples = loss_blocks[drawn].sum(axis=1) / weight_blocks[drawn].sum(axis=1)
    error = float(samples.std(ddof=1)) * math.sqrt(blocks / (blocks - 1))
    reach = error * float(stats.t.ppf(0.5 + LEVEL / 2.0, blocks - 1))
    return Interval(estimate, estimate - reach, estimate + reach)


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value of a paired t-test of per-window losses.

    Raises:
        ValueError: The arrays differ in length, hold fewer than two values, or a non-finite one.
    """
    difference = _paired(first, second)
    spread = float(difference.std(ddof=1))
    if spread == 0.0:
        return 1.0 if float(difference.mean()) == 0.0 else 0.0
    return float(stats.ttest_1samp(difference, 0.0).pvalue)


def mcnemar(first_Q: Sequence[bool], second_Q: Sequence[bool]) -> McNemar:
    """Return the exact two-sided McNemar test.

    Raises:
        ValueError: The runs answered different numbers of questions, or none.
    """
    first, second = np.asarray(first_Q, dtype=bool), np.asarray(second_Q, dtype=bool)
    if first.shape != second.shape or first.size == 0:
        raise ValueError(f"{first.size} answers against {second.size}")
    only_first = int((first & ~second).sum())
    only_second = int((~first & second).sum())
    changed = only_first + only_second
    p_value = 1.0
    if changed:
        p_value = float(stats.binomtest(min(only_first, only_second), changed, 0.5).pvalue)
    return McNemar(only_first, only_second, p_value)


def share_difference(first_Q: Sequence[bool], second_Q: Sequence[bool]) -> Interval:
    """Return the share right under the second run minus that under the first, with an interval.

    The interval is the paired one of Agresti and Min (2005): half an answer is added to each cell
    of the 2 x 2 table, so that it keeps its level for few questions and for shares near 0 and 1.

    Raises:
        ValueError: The runs answered different numbers of questions, or none.
    """
    test = mcnemar(first_Q, second_Q)
    n = len(first_Q)
    gained, lost, size = test.only_second + 0.5, test.only_first + 0.5, n + 2.0
    center = (gained - lost) / size
    error = math.sqrt(gained + lost - (gained - lost) ** 2 / size) / size
    reach = error * float(stats.norm.ppf(0.5 + LEVEL / 2.0))
    estimate = (test.only_second - test.only_first) / n
    return Interval(estimate, max(-1.0, center - reach), min(1.0, center + reach))


def wilson(right: int, count: int) -> Interval:
    """Return a share of right answers with Wilson's score interval (Wilson 1927).

    It keeps its level for few questions and for shares of 0 and 1, where a standard error is 0.

    Raises:
        ValueError: There are no questions, or more right answers than questions.
    """
    if not 0 <= right <= count or count == 0:
        raise ValueError(f"{right} right answers of {count}")
    interval = stats.binomtest(right, count).proportion_ci(LEVEL, method="wilson")
    return Interval(right / count, float(interval.low), float(interval.high))


def mean_over_seeds(values_S: Sequence[float]) -> Interval:
    """Return the mean over training seeds with Student's t interval.

    Raises:
        ValueError: Fewer than two seeds, or a non-finite value.
    """
    values = np.asarray(values_S, dtype=np.float64)
    if values.size < 2 or not np.isfinite(values).all():
        raise ValueError(f"an interval over seeds needs two finite values, found {values.tolist()}")
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    reach = error * float(stats.t.ppf(0.5 + LEVEL / 2.0, values.size - 1))
    return Interval(mean, mean - reach, mean + reach)


def holm(p_values_H: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given (Holm 1979).

    Raises:
        ValueError: A p-value is not between 0 and 1.
    """
    values = np.asarray(p_values_H, dtype=np.float64)
    if not ((values >= 0.0) & (values <= 1.0)).all():
        raise ValueError(f"p-values must lie between 0 and 1, found {values.tolist()}")
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, float(values[index]) * (values.size - rank)))
        adjusted[index] = largest
    return [float(value) for value in adjusted]


def smallest_detectable_difference(stderr: float, *, power: float = 0.8) -> float:
    """Return the difference that a two-sided z-test finds with the given power.

    Args:
        stderr: Standard error of the (paired) difference.
        power: Probability of finding a difference of the returned size.
    """
    return stderr * float(stats.norm.ppf(0.5 + LEVEL / 2.0) + stats.norm.ppf(power))


def _paired(first: Sequence[float], second: Sequence[float]) -> Array:
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != two.shape or one.ndim != 1:
        raise ValueError(f"paired values must have one length, found {one.shape} and {two.shape}")
    if one.size < 2:
        raise ValueError(f"a paired comparison needs at least two values, found {one.size}")
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        raise ValueError("a paired comparison needs finite values")
    difference: Array = two - one
    return difference
