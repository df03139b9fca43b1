"""What all printed forms of a table share: cell texts, header spans, clean text.

CSV has its own rules and uses none of this.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from oasis_eval.report.grid import Cell, Label, Line, Table
from oasis_eval.report.numbers import (
    FLOOR,
    MARKS,
    format_change,
    format_value,
    format_with_error,
)
from oasis_eval.spec import Dimension

BEST = "*"
"""Stands before the best of a column where nothing can be bold."""


class Span(NamedTuple):
    """One header and the columns it stands over: `start` up to, but without, `stop`."""

    start: int
    stop: int
    label: Label


def cell_text(cell: Cell) -> str:
    """Return what a cell prints, without footnote letters."""
    if cell.text is not None:
        return cell.text
    if cell.status != "ok" or cell.value is None:
        return MARKS[cell.status]
    if cell.kind == "change":
        text = format_change(cell.value)
        if cell.low is None or cell.high is None:
            return text
        return f"{text} ({format_change(cell.low)} to {format_change(cell.high)})"
    text = format_value(cell.value, cell.metric)
    if cell.spread is not None:
        text = format_with_error(cell.value, cell.spread, cell.metric)
    return f"{text} {FLOOR}" if cell.floor else text


def header_spans(table: Table) -> list[list[Span]]:
    """Return the column headers level by level, outermost first; equal neighbours are one."""
    levels = []
    depth = len(table.column_dimensions)
    for level in range(depth):
        spans: list[Span] = []
        for position, line in enumerate(table.columns):
            last = level == depth - 1
            start = spans[-1].start if spans else 0
            same = not last and bool(spans) and _under_one(table.columns[start], line, level)
            if same:
                spans[-1] = spans[-1]._replace(stop=position + 1)
            else:
                spans.append(Span(position, position + 1, line.labels[level]))
        levels.append(spans)
    return levels


def row_headers(table: Table) -> Iterator[tuple[Label | None, ...]]:
    """Yield the headers of each row; None where the row above has the same one."""
    previous: Line | None = None
    for line in table.rows:
        depth = len(line.labels)
        yield tuple(
            None
            if previous is not None and level < depth - 1 and _under_one(previous, line, level)
            else label
            for level, label in enumerate(line.labels)
        )
        previous = line


def starts_group(table: Table, position: int) -> bool:
    """Tell whether a row begins a block: another outermost header, or a value after a change."""
    if position == 0:
        return False
    if len(table.row_dimensions) == 1:
        return any(line.kind == "change" for line in table.rows[position - 1 : position])
    return not _under_one(table.rows[position - 1], table.rows[position], 0)


def dimension_header(dimension: str) -> str:
    """Return the header over the row headers of a dimension."""
    return dimension.capitalize()


def narrower(table: Table) -> str:
    """Say what to do about a table with too many columns."""
    values = _values(table.columns, table.column_dimensions)
    name = max(values, key=lambda name: len(values[name]))
    if len(values[name]) < 2:
        return "give its models shorter labels ('label' of a card)"
    fewer = f"keep fewer columns (--where {name}={values[name][0]})"
    if len(values) < 2:
        return fewer
    rows = ",".join((*table.row_dimensions, name))
    return f"make columns rows (--rows {rows}) or {fewer}"


def shorter(table: Table) -> str:
    """Say what to do about a table with too many rows, or notes where there is one row."""
    values = _values(table.rows, table.row_dimensions)
    name = max(values, key=lambda name: len(values[name]))
    if len(values[name]) < 2:
        return narrower(table)
    return f"keep fewer rows (--where {name}={values[name][0]})"


def _values(lines: Sequence[Line], dimensions: Sequence[Dimension]) -> dict[Dimension, list[str]]:
    """Return the values of each dimension along an axis."""
    return {
        name: list(dict.fromkeys(line.place[level] for line in lines))
        for level, name in enumerate(dimensions)
    }


def plain(text: str) -> str:
    """Return `text` on one line; control and invisible formatting characters become `?`."""
    return "".join(
        "?" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn") else character
        for character in " ".join(text.split())
    )


def label_text(label: Label) -> str:
    """Return a header with its arrow, without footnote letters."""
    return f"{label.text} {label.arrow}" if label.arrow else label.text


def marks_text(marks: Sequence[str]) -> str:
    """Return footnote letters as they stand behind a text."""
    return ",".join(marks)


def _under_one(left: Line, right: Line, level: int) -> bool:
    return left.place[: level + 1] == right.place[: level + 1]
