"""Is B different from A? Paired differences of every cell that both sides have.

Each number is compared on the same windows or questions, so that what the text contributes to both
cancels. The methods are those of `statistics`; the p-values of one comparison are adjusted
together (Holm), since a long table always holds some small one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from oasis_eval import statistics
from oasis_eval.errors import RecordError
from oasis_eval.record import MAX_LOG
from oasis_eval.report.comparable import check_pair
from oasis_eval.report.observations import Observation
from oasis_eval.report.pairs import (
    Cell,
    Pair,
    PairedSamples,
    numbers,
    pair_cells,
    paired_samples,
    read_side,
)
from oasis_eval.statistics import Interval

Test = Literal["paired t", "exact McNemar"]
TEXT_METRICS = ("word_perplexity", "token_perplexity")
"""The first that both sides have is compared."""
ANSWERS = {"pass@1": "strict", "pass@1_flexible": "flexible", "exact_match": "strict"}
"""Metrics of answers, and the column of the samples that they are the mean of."""
ANSWER_LOSS = "answer_nll_per_token"
FEW_WINDOWS = 6
"""With fewer, an interval rests on so little that a note says so."""
_DIFFERS = ("checkpoint_sha256", "scheme_sha256", "dtype", "device", "batch_size")


class Change(NamedTuple):
    """A relative change in percent; its interval where there is one."""

    percent: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of one pair: B minus A."""

    metric: str
    first: Observation
    second: Observation
    count: int | None = None
    """Windows or questions; None where a side has no number."""
    difference: float | None = None
    """Of perplexities that of their logarithms, of shares and mean losses their own."""
    interval: Interval | None = None
    """None where nothing is estimated: one window, a loss that is not finite, no number."""
    change: Change | None = None
    test: Test | None = None
    p_value: float | None = None
    adjusted: float | None = None
    """The p-value adjusted over all tests of the comparison."""
    only_first: int | None = None
    """Questions that only A answers right."""
    only_second: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def detectable(self) -> float | None:
        """Return the smallest difference that this comparison finds four times out of five."""
        if self.interval is None:
            return None
        return statistics.smallest_detectable_difference(self.interval.stderr)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that two sides have in common."""

    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    """Which cells of one side have no partner."""


def compare(
    first: Path,
    second: Path,
    *,
    where_first: Mapping[str, tuple[str, ...]],
    where_second: Mapping[str, tuple[str, ...]],
) -> Comparison:
    """Compare the records of two folders or files, or two choices from one.

    Args:
        first: A, what B is compared with.
        second: B.
        where_first: Filters of A: field to patterns, as in a table specification.
        where_second: Filters of B.

    Raises:
        RecordError: The sides have nothing to pair, were not measured alike, or their samples are
            missing or do not line up.
        SpecError: A filter is on no field.
    """
    pairing = pair_cells(
        read_side(first, where_first, name="A"), read_side(second, where_second, name="B")
    )
    found = [item for pair in pairing.pairs for item in differences_of(pair)]
    tested = [item.p_value for item in found if item.p_value is not None]
    adjusted = iter(statistics.holm(tested) if tested else [])
    return Comparison(
        tuple(
            item if item.p_value is None else dataclasses.replace(item, adjusted=next(adjusted))
            for item in found
        ),
        tuple(pairing.alone),
    )


def differences_of(pair: Pair) -> list[Difference]:
    """Return the differences of one pair, one a metric; p-values are not adjusted.

    Raises:
        RecordError: They were not measured alike, or their samples are missing or do not line up.
    """
    if any(cell.record.status != "ok" for cell in pair):
        return [_without_numbers(pair)]
    metrics = _common_metrics(pair)
    if not metrics:
        raise RecordError(
            f"{pair.first.name} and {pair.second.name} have no metric in common that is compared "
            f"({', '.join((*TEXT_METRICS, *ANSWERS, ANSWER_LOSS))})"
        )
    for metric in metrics:
        check_pair(_number(pair.first, metric), _number(pair.second, metric))
    samples = paired_samples(pair)
    notes = _also_differ(pair)
    if samples.kind == "questions":
        return [
            _loss(pair, metric, samples, notes)
            if metric == ANSWER_LOSS
            else _answers(pair, metric, samples, notes)
            for metric in metrics
        ]
    return [_loss(pair, metrics[0], samples, notes)]


def _common_metrics(pair: Pair) -> list[str]:
    both = [
        name
        for name in (*TEXT_METRICS, *ANSWERS, ANSWER_LOSS)
        if pair.first.number(name) and pair.second.number(name)
    ]
    text = [name for name in both if name in TEXT_METRICS]
    return text[:1] or both


def _number(cell: Cell, metric: str) -> Observation:
    number = cell.number(metric)
    assert number is not None  # `_common_metrics` found it
    return number


def _without_numbers(pair: Pair) -> Difference:
    """Return the line of a pair in which a run has no number."""
    names = (*TEXT_METRICS, *ANSWERS)
    measured = [name for cell in pair for name in names if cell.number(name)]
    metric = (measured or [pair.first.numbers[0].metric or "token_perplexity"])[0]
    one, other = (cell.number(metric) or cell.numbers[0] for cell in pair)
    return Difference(metric, one, other)


def _also_differ(pair: Pair) -> tuple[str, ...]:
    """Say what else tells the two runs apart; a scheme or model that has another name is told."""
    one, other = (cell.numbers[0] for cell in pair)
    told = {
        "checkpoint_sha256": one.model != other.model,
        "scheme_sha256": one.scheme != other.scheme,
        "dtype": one.scheme != other.scheme and one.execution == other.execution == "none",
    }
    parts = [
        f"{name} {str(getattr(one, name))[:8]} in A, {str(getattr(other, name))[:8]} in B"
        for name in _DIFFERS
        if not told.get(name, False) and getattr(one, name) != getattr(other, name)
    ]
    return (f"The runs also differ in {'; '.join(parts)}.",) if parts else ()


def _loss(pair: Pair, metric: str, samples: PairedSamples, notes: tuple[str, ...]) -> Difference:
    """Compare losses window by window (or answer by answer)."""
    is_answer = metric == ANSWER_LOSS
    columns = ("answer_nll_nats", "answer_tokens") if is_answer else ("nll_nats", "num_tokens")
    losses = [numbers(rows, columns[0]) for rows in (samples.first, samples.second)]
    tokens, others = (
        [round(value) for value in numbers(rows, columns[1])]
        for rows in (samples.first, samples.second)
    )
    one, other = _number(pair.first, metric), _number(pair.second, metric)
    if tokens != others:  # windows line up by their tokens, answers by their text
        reason = (
            f"Not compared: the answers are {sum(tokens)} tokens in A and {sum(others)} in B, and "
            "a loss per token of one tokenizer says nothing beside one of another."
        )
        return Difference(metric, one, other, count=len(tokens), notes=(*notes, reason))
    units = _words(pair) if metric == "word_perplexity" else sum(tokens)
    base = Difference(metric, one, other, count=len(tokens), notes=notes)
    broken = [sum(not math.isfinite(value) for value in values) for values in losses]
    if any(broken) or len(tokens) < 2:
        difference = (math.fsum(losses[1]) - math.fsum(losses[0])) / units
        reason = (
            f"No interval: a loss that is not finite in {broken[0]} of {len(tokens)} windows of A, "
            f"{broken[1]} of B."
            if any(broken)
            else "No interval: one window."
        )
        change = None if is_answer else Change(_percent(difference))
        return dataclasses.replace(
            base, difference=difference, change=change, notes=(*notes, reason)
        )
    estimated = statistics.log_perplexity_difference(
        losses[0], losses[1], tokens, block=1 if is_answer else None
    )
    if len(tokens) < FEW_WINDOWS:
        what = "questions" if is_answer else "windows"
        more = "" if is_answer else " or a longer text"
        notes = (
            *notes,
            f"Only {len(tokens)} {what}: interval and p are rough guesses; measure more "
            f"(a larger --limit{more}).",
        )
    scale = sum(tokens) / units
    interval = Interval(*(value * scale for value in estimated))
    change = _relative(one, interval) if is_answer else Change(*map(_percent, interval))
    return dataclasses.replace(
        base,
        difference=interval.estimate,
        interval=interval,
        change=change,
        test="paired t",
        p_value=statistics.paired_t_test(losses[0], losses[1]),
        notes=notes,
    )


def _words(pair: Pair) -> float:
    counts = [cell.record.metric("num_words") for cell in pair]
    values = {None if item is None else item.value for item in counts}
    number = values.pop()
    if values or not number:
        raise RecordError(
            f"{pair.first.name} and {pair.second.name}: word perplexities of {counts[0]} and "
            f"{counts[1]} words cannot be compared"
        )
    return number


def _percent(log_ratio: float) -> float:
    """Return exp(log_ratio) - 1 in percent; infinite beyond floating-point range."""
    return math.inf if log_ratio > MAX_LOG else math.expm1(log_ratio) * 100.0


def _relative(first: Observation, interval: Interval) -> Change | None:
    """Return a change relative to A, which is itself uncertain: no interval is claimed."""
    if not first.value or not math.isfinite(first.value):
        return None
    return Change(interval.estimate / abs(first.value) * 100.0)


def _answers(pair: Pair, metric: str, samples: PairedSamples, notes: tuple[str, ...]) -> Difference:
    """Compare right and wrong answers question by question."""
    right = [
        [bool(row.get(ANSWERS[metric])) for row in rows] for rows in (samples.first, samples.second)
    ]
    one, other = _number(pair.first, metric), _number(pair.second, metric)
    test = statistics.mcnemar(right[0], right[1])
    interval = statistics.share_difference(right[0], right[1])
    return Difference(
        metric,
        one,
        other,
        count=len(right[0]),
        difference=interval.estimate,
        interval=interval,
        change=_relative(one, interval),
        test="exact McNemar",
        p_value=test.p_value,
        only_first=test.only_first,
        only_second=test.only_second,
        notes=notes,
    )
