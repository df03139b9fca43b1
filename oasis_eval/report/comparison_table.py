"""A comparison as a table: one line a metric of a pair, in every format that tables have.

The printed forms go through the renderers of tables; CSV has each number in a column of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, get_args

from oasis_eval.report import footnotes as texts
from oasis_eval.report.annotations import legend, model_labels
from oasis_eval.report.comparable import grouped
from oasis_eval.report.compare import ANSWERS, Comparison, Difference
from oasis_eval.report.footnotes import Footnotes
from oasis_eval.report.grid import Cell, Label, Line, Table
from oasis_eval.report.numbers import MARKS, format_change, format_number, metric_style
from oasis_eval.report.observations import Observation
from oasis_eval.report.order import ranks
from oasis_eval.report.render import csv_text, full, no_formula, render
from oasis_eval.spec import Dimension, TableSpec
from oasis_eval.statistics import LEVEL

ComparisonFormat = Literal["terminal", "markdown", "csv", "latex"]
COMPARISON_FORMATS: tuple[str, ...] = get_args(ComparisonFormat)

_SIDES: tuple[Dimension, ...] = ("model", "scheme", "seed")
_NOTHING = "–"
_CHANGE_INTERVAL = f"{LEVEL:.0%} interval (%)"
_UNADJUSTED = "p"
_FLIPS = "Flips"
_NOT_ON_PAPER = frozenset({_CHANGE_INTERVAL, _UNADJUSTED})
"""Columns for which a page has no room; they follow from others, and CSV has them."""
_SMALLEST_P = 1e-4
_NUMBERS: dict[str, Callable[[Difference], float | int | None]] = {
    "count": lambda item: item.count,
    "value_a": lambda item: item.first.value,
    "value_b": lambda item: item.second.value,
    "difference": lambda item: item.difference,
    "low": lambda item: item.interval.low if item.interval else None,
    "high": lambda item: item.interval.high if item.interval else None,
    "change_percent": lambda item: item.change.percent if item.change else None,
    "change_low": lambda item: item.change.low if item.change else None,
    "change_high": lambda item: item.change.high if item.change else None,
    "p_value": lambda item: item.p_value,
    "p_holm": lambda item: item.adjusted,
    "detectable": lambda item: item.detectable,
    "only_a": lambda item: item.only_first,
    "only_b": lambda item: item.only_second,
}
"""Columns of numbers in CSV."""


def render_comparison(
    comparison: Comparison,
    *,
    format: ComparisonFormat,  # noqa: A002 - the option's name
    width: int | None = None,
) -> str:
    """Return `comparison` as text that ends with a newline.

    Args:
        comparison: What was compared.
        format: What to write.
        width: Columns of the terminal, for `terminal` only; None: as wide as it is.
    """
    if format == "csv":
        return csv_text(_csv_rows(_in_order(comparison.differences)))
    left_out = _NOT_ON_PAPER if format == "latex" else frozenset()
    return render(comparison_table(comparison, left_out=left_out), format=format, width=width)


def comparison_table(comparison: Comparison, *, left_out: Collection[str] = ()) -> Table:
    """Lay a comparison out; what all pairs share stands below the table instead of in it.

    Args:
        comparison: What was compared.
        left_out: Headers of columns to leave out; a column without any entry has no place anyway.
    """
    differences = _in_order(comparison.differences)
    both = [side for item in differences for side in (item.first, item.second)]
    labels = model_labels(both)
    varying = [name for name in _SIDES if _varies(differences, name)]
    by_task = {(side.task, side.protocol) for side in both}
    protocols: list[Dimension] = (
        ["protocol"] if len(by_task) > len({at[0] for at in by_task}) else []
    )
    dimensions: tuple[Dimension, ...] = (*varying, "task", *protocols, "metric")
    footnotes = Footnotes()
    rows = []
    for item in differences:
        headers = [_side_label(item, name, labels) for name in varying]
        headers += [Label(value, value) for value in (item.first.task, item.first.protocol)][
            : 1 + len(protocols)
        ]
        style = metric_style(item.metric)
        marks = footnotes.marks(_measured_how(item, differences))
        headers.append(Label(item.metric, style.header, style.arrow, marks))
        rows.append(Line(tuple(headers), "value"))
    cells = [_cells(item, footnotes) for item in differences]
    names = [
        name
        for name in cells[0]
        if name not in left_out and any(row[name].text != _NOTHING for row in cells)
    ]
    columns = tuple(Line((Label(name, name),), "value") for name in names)
    notes = [
        *(_side_note(differences, name, index, labels) for index, name in enumerate("AB")),
        *(texts.scheme_note(group) for group in grouped(both, lambda side: side.scheme)),
        _method_note(differences),
        *comparison.notes,
        *legend(row[name] for row in cells for name in ("A", "B")),
    ]
    return Table(
        spec=TableSpec(name="comparison", caption="Paired differences, B minus A."),
        row_dimensions=dimensions,
        column_dimensions=("metric",),
        rows=tuple(rows),
        columns=columns,
        cells=tuple(tuple(row[name] for name in names) for row in cells),
        observations=tuple(both),
        footnotes=footnotes.all(),
        notes=tuple(note for note in notes if note),
    )


def _in_order(differences: Sequence[Difference]) -> list[Difference]:
    """Sort by model, scheme, seed of both sides, then task and protocol; metrics stay as found."""
    both = [side for item in differences for side in (item.first, item.second)]
    schemes = {side.scheme: side.record.spec.scheme for side in both}
    names: tuple[Dimension, ...] = (*_SIDES, "task", "protocol")
    position = {
        name: ranks(name, {str(getattr(side, name)) for side in both}, first=(), schemes=schemes)
        for name in names
    }

    def key(item: Difference) -> list[tuple[int, int]]:
        return [
            (
                position[name][str(getattr(item.first, name))],
                position[name][str(getattr(item.second, name))],
            )
            for name in names
        ]

    return sorted(differences, key=key)


def _varies(differences: Sequence[Difference], name: Dimension) -> bool:
    sides = (
        {getattr(item.first, name) for item in differences},
        {getattr(item.second, name) for item in differences},
    )
    return max(map(len, sides)) > 1


def _side_label(item: Difference, name: Dimension, labels: dict[str, str]) -> Label:
    one, other = (str(getattr(side, name)) for side in (item.first, item.second))
    shown = [labels[value] if name == "model" else value for value in (one, other)]
    return Label(f"{one} → {other}", shown[0] if one == other else " → ".join(shown))


def _side_note(
    differences: Sequence[Difference], name: str, index: int, labels: dict[str, str]
) -> str:
    """Say what every line has on one side."""
    first = (differences[0].first, differences[0].second)[index]
    fixed = {
        "model": labels[first.model],
        "scheme": first.scheme,
        "seed": f"seed {first.seed}",
    }
    parts = [text for field, text in fixed.items() if not _varies(differences, field)]  # type: ignore[arg-type]  # its keys are `_SIDES`
    return f"{name}: {', '.join(parts)}." if parts else ""


def _measured_how(item: Difference, differences: Sequence[Difference]) -> list[str]:
    """Return the notes on the protocol and the text behind a line."""
    finished = [
        side
        for other in differences
        if (other.first.task, other.first.protocol, other.metric)
        == (item.first.task, item.first.protocol, item.metric)
        for side in (other.first, other.second)
        if side.status == "ok"
    ]
    own = [side for side in (item.first, item.second) if side.status == "ok"]
    data = [note for side in own[:1] for note in [texts.data_note(side)] if note]
    return [*([texts.protocol_note(finished)] if own else []), *data]


def _cells(item: Difference, footnotes: Footnotes) -> dict[str, Cell]:
    """Return the cells of one line by the header of their column."""
    share = metric_style(item.metric).percent
    interval, change, detectable = item.interval, item.change, item.detectable
    around = around_change = None
    if interval is not None:
        around = " to ".join(_shift(end, share=share) for end in interval[1:])
    ends = () if change is None else tuple(end for end in change[1:] if end is not None)
    if ends and all(map(math.isfinite, ends)):
        around_change = " to ".join(map(format_change, ends))
    least = None if detectable is None else _shift(detectable, share=share).lstrip("+")
    return {
        "A": _value(item.first, footnotes),
        "B": _value(item.second, footnotes),
        "Δ": _text(
            None if item.difference is None else _shift(item.difference, share=share),
            footnotes.marks(item.notes),
        ),
        f"{LEVEL:.0%} interval": _text(around),
        "Δ (%)": _text(None if change is None else format_change(change.percent)),
        _CHANGE_INTERVAL: _text(around_change),
        _UNADJUSTED: _text(_p(item.p_value)),
        "p (Holm)": _text(_p(item.adjusted)),
        "Detectable": _text(least),
        _FLIPS: _text(
            None if item.only_first is None else f"{item.only_first} : {item.only_second}"
        ),
    }


def _value(side: Observation, footnotes: Footnotes) -> Cell:
    metric = side.metric or ""
    if side.status != "ok":
        return Cell(side.status, metric=metric, marks=footnotes.marks([texts.failure_note(side)]))
    loss = texts.loss_note(side)
    marks = footnotes.marks([loss] if loss else [])
    return Cell("ok", metric=metric, value=side.value, marks=marks)


def _text(text: str | None, marks: tuple[str, ...] = ()) -> Cell:
    return Cell("ok", text=_NOTHING if text is None else text, marks=marks)


def _shift(value: float, *, share: bool) -> str:
    """Print a difference with its sign: shares in points, others in nats."""
    text = format_number(value * 100.0, 1) if share else format_number(value, 4)
    signed = value > 0 and math.isfinite(value) and bool(text.strip("0."))
    return f"+{text}" if signed else text


def _p(value: float | None) -> str | None:
    if value is None:
        return None
    return f"<{_SMALLEST_P:.4f}" if value < _SMALLEST_P else f"{value:.4f}"


def _method_note(differences: Sequence[Difference]) -> str:
    tests = [item for item in differences if item.p_value is not None]
    shares = any(item.metric in ANSWERS for item in differences)
    losses = any(item.metric not in ANSWERS for item in differences)
    parts = ["Δ: B minus A"]
    if losses:
        parts.append(
            "of perplexities the difference of their logarithms, of losses their own, in nats, "
            "interval of a block bootstrap over windows, widened by Student's t for few blocks, "
            "p of the paired t-test"
        )
    if shares:
        parts.append("of shares in points, interval of Agresti and Min, p of McNemar's exact test")
        parts.append("flips: questions that only A and that only B answers right")
    if tests:
        parts.append(f"p (Holm): adjusted over the {len(tests)} tests of this table")
        parts.append(
            "Detectable: the smallest true difference that a comparison of this size would find "
            "four times out of five (power 80 %)"
        )
    return "; ".join(parts) + "."


def _csv_rows(differences: Sequence[Difference]) -> Iterable[list[str]]:
    sides = ("model", "scheme", "seed", "key", "status")
    yield [
        *(f"{name}_{side}" for name in sides for side in "ab"),
        *("task", "protocol", "metric"),
        *_NUMBERS,
        *("test", "notes"),
    ]
    for item in differences:
        both = (item.first, item.second)
        yield [
            *(no_formula(str(getattr(side, name))) for name in sides for side in both),
            *(no_formula(text) for text in (item.first.task, item.first.protocol, item.metric)),
            *(_csv_number(item, name) for name in _NUMBERS),
            item.test or "",
            no_formula(" ".join(item.notes)),
        ]


def _csv_number(item: Difference, name: str) -> str:
    """Return a number that reads back to the same bits, the mark of a value that is none, or ``."""
    value = _NUMBERS[name](item)
    if value is None:
        side = {"value_a": item.first, "value_b": item.second}.get(name)
        return MARKS[side.status] if side is not None and side.status != "ok" else ""
    return str(value) if isinstance(value, int) else full(value)
