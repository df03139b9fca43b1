"""What each scheme does to each number of a model, against the scheme that quantizes nothing.

Values are means over seeds, as in tables. Intervals and flips come from the paired samples beside
the records, by the methods of `compare`, where both sides have one run with samples; where both
have several seeds, intervals are of the mean of the seeds' differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oasis_eval.errors import RecordError
from oasis_eval.report.comparable import check_pair, grouped
from oasis_eval.report.compare import TEXT_METRICS, Difference, differences_of
from oasis_eval.report.html.selection import Selection
from oasis_eval.report.observations import Observation
from oasis_eval.report.order import ranks
from oasis_eval.report.pairs import Cell, Pair
from oasis_eval.statistics import Interval, mean_over_seeds

ANSWERS = "pass@1"


@dataclass(frozen=True, slots=True)
class Result:
    """One number of one model under one scheme: the mean over its seeds."""

    numbers: tuple[Observation, ...]
    """One a seed; the attempts without numbers where none finished."""
    value: float | None
    """None where no run finished, or where several results stand for one seed."""
    problem: str | None = None
    """Why there is no value."""

    @property
    def first(self) -> Observation:
        """Return what stands for the result's settings."""
        return self.numbers[0]


@dataclass(frozen=True, slots=True)
class Effect:
    """A quantized result beside the unquantized one."""

    result: Result
    percent: float | None = None
    """Relative change of a perplexity; None where a side is missing, zero or not finite."""
    points: float | None = None
    """Change of a share of right answers, in percentage points."""
    low: float | None = None
    """Lower end of the paired 95 % interval of `percent` or `points`."""
    high: float | None = None
    lost: int | None = None
    """Questions that only the unquantized model answers right."""
    gained: int | None = None
    problem: str | None = None
    """Why the two cannot be compared."""

    @property
    def is_measurable(self) -> bool:
        """Whether zero is outside the interval; true where there is no interval."""
        return self.low is None or self.high is None or not self.low <= 0.0 <= self.high


@dataclass(frozen=True, slots=True)
class Line:
    """One model on one task by one protocol: the reference and what the schemes make of it."""

    model: str
    task: str
    protocol: str
    limit: int | None
    metric: str
    reference: Result | None
    """None where no unquantized run is there."""
    effects: tuple[Effect, ...]
    """In the order of schemes."""


def lines(selection: Selection) -> list[Line]:
    """Return a line for each model, task, protocol and limit, in the order of the report."""
    found = []
    order = {name: at for at, name in enumerate(selection.models)}
    groups = grouped(
        selection.observations, lambda item: (item.model, item.task, item.protocol, item.limit)
    )
    for group in sorted(groups, key=lambda items: order[items[0].model]):
        for metric in _metrics(group):
            found.append(_line(group, metric, selection))
    return found


def _metrics(group: Sequence[Observation]) -> Iterator[str]:
    """Yield the perplexity that is compared and the share of right answers, if they are there.

    Runs without numbers alone are told by what their protocol is run for.
    """
    names = {item.metric for item in group}
    text = next((name for name in TEXT_METRICS if name in names), None)
    if text is not None:
        yield text
    if ANSWERS in names:
        yield ANSWERS
    if names == {None}:
        asks = group[0].protocol.startswith(("gsm8k", "passkey"))
        yield ANSWERS if asks else TEXT_METRICS[-1]


def _line(group: Sequence[Observation], metric: str, selection: Selection) -> Line:
    relevant = [item for item in group if item.metric in (metric, None)]
    results = [_result(items) for items in grouped(relevant, lambda item: item.scheme)]
    schemes = {item.first.scheme: item.first.record.spec.scheme for item in results}
    plain = {
        item.first.scheme: item
        for item in results
        if schemes[item.first.scheme].execution == "none"
    }
    reference = None
    finished = {name: item for name, item in plain.items() if item.value is not None} or plain
    if finished:
        order = ranks("scheme", finished, first=(), schemes=schemes)
        reference = finished[min(order, key=order.__getitem__)]
    first = group[0]
    return Line(
        model=first.model,
        task=first.task,
        protocol=first.protocol,
        limit=first.limit,
        metric=metric,
        reference=reference,
        effects=tuple(
            _effect(item, reference, metric, selection) for item in results if item is not reference
        ),
    )


def _result(numbers: Sequence[Observation]) -> Result:
    finished = [item for item in numbers if item.value is not None]
    if not finished:
        reason = " ".join((numbers[0].reason or "no reason recorded").split())
        return Result(tuple(numbers), None, reason)
    values = [item.value for item in finished if item.value is not None]
    if len({item.seed for item in finished}) < len(finished):
        return Result(tuple(finished), None, f"{len(finished)} results for one seed")
    finite = all(math.isfinite(value) for value in values)
    return Result(tuple(finished), statistics.fmean(values) if finite else sum(values))


def _effect(result: Result, reference: Result | None, metric: str, selection: Selection) -> Effect:
    if reference is None or reference.value is None or result.value is None:
        return Effect(result)
    try:
        check_pair(reference.first, result.first)
    except RecordError:
        return Effect(result, problem="not measured like the unquantized run")
    is_answer = metric == ANSWERS
    both_finite = math.isfinite(result.value) and math.isfinite(reference.value)
    percent = points = None
    if both_finite and is_answer:
        points = (result.value - reference.value) * 100.0
    elif both_finite and reference.value != 0.0:
        percent = (result.value / reference.value - 1.0) * 100.0
    low, high, found = None, None, _difference(reference, result, metric, selection)
    if found is not None and is_answer and found.interval is not None:
        low, high = found.interval.low * 100.0, found.interval.high * 100.0
    elif found is not None and not is_answer and found.change is not None:
        low, high = found.change.low, found.change.high
    seeds = _over_seeds(reference, result) if both_finite else None
    if seeds is not None and (is_answer or percent is not None):
        scale = 100.0 if is_answer else 100.0 / reference.value
        low, high = seeds.low * scale, seeds.high * scale
    return Effect(
        result,
        percent=percent,
        points=points,
        low=low,
        high=high,
        lost=found.only_first if found else None,
        gained=found.only_second if found else None,
    )


def _over_seeds(reference: Result, result: Result) -> Interval | None:
    """Return the interval of the mean difference; None where the seeds are not the same several."""
    before = {item.seed: item.value for item in reference.numbers}
    after = {item.seed: item.value for item in result.numbers}
    if before.keys() != after.keys() or len(before) < 2:
        return None
    pairs = [(before[seed], after[seed]) for seed in before]
    return mean_over_seeds([new - old for old, new in pairs if old is not None and new is not None])


def _difference(
    reference: Result, result: Result, metric: str, selection: Selection
) -> Difference | None:
    """Return the paired difference of two single runs, None where they cannot be paired."""
    if len(reference.numbers) != 1 or len(result.numbers) != 1:
        return None
    pair = Pair(*(_cell(item.first, selection) for item in (reference, result)))
    try:
        found = differences_of(pair)
    except RecordError:  # without samples a change is shown without an interval
        return None
    return next((item for item in found if item.metric == metric), None)


def _cell(number: Observation, selection: Selection) -> Cell:
    return Cell(selection.folder(number.key), (number,))
