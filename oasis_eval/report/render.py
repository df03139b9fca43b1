"""A table as text: terminal, Markdown, LaTeX, and CSV in wide and in tidy long form.

The printed forms show the same numbers, marks and footnotes. CSV holds names as in the records
and numbers at full precision, with the same marks in place of a number. Texts that a spreadsheet
would run as a formula (a name that begins with `=`, `+`, `-` or `@`) get an apostrophe in front.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from oasis_eval.report.grid import Cell, Label, Table
from oasis_eval.report.latex import render_latex
from oasis_eval.report.layout import (
    cell_text,
    dimension_header,
    label_text,
    marks_text,
    plain,
)
from oasis_eval.report.numbers import MARKS
from oasis_eval.report.observations import LONG_COLUMNS, shown
from oasis_eval.report.terminal import render_terminal

Format = Literal["terminal", "csv", "csv-long", "latex", "markdown"]
FORMATS: tuple[str, ...] = get_args(Format)

_CHANGE = "change_percent"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MARKDOWN_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$!])")


def render(table: Table, *, format: Format, width: int | None = None) -> str:  # noqa: A002 - the option's name
    """Return `table` as text that ends with a newline.

    Args:
        table: The table.
        format: What to write.
        width: Columns of the terminal, for `terminal` only; None: as wide as it is.
    """
    match format:
        case "terminal":
            return render_terminal(table, width=width)
        case "markdown":
            return _markdown(table)
        case "latex":
            return render_latex(table)
        case "csv":
            return csv_text(_wide_rows(table))
        case "csv-long":
            return csv_text(_long_rows(table))


# --- CSV --------------------------------------------------------------------------------------


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    """Return lines of cells as CSV; numbers at full precision (`full`), texts by `no_formula`."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def no_formula(text: str) -> str:
    """Return `text` so that no spreadsheet runs it."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _wide_rows(table: Table) -> Iterable[list[str]]:
    """Yield a header and one line per row; uncertainties and seeds are columns of their own."""
    extras = [_extras([row[index] for row in table.cells]) for index in range(len(table.columns))]
    quantity = any(line.kind == "change" for line in table.rows)
    header = [name for dimension in table.row_dimensions for name in _row_names(dimension)]
    header += ["quantity"] if quantity else []
    for line, names in zip(table.columns, extras, strict=True):
        path = "/".join([*line.place, *([_CHANGE] if line.kind == "change" else [])])
        header += [no_formula(path), *(no_formula(f"{path}/{name}") for name in names)]
    yield header
    labels = {line.place: line.labels for line in table.rows if line.kind == "value"}
    for line, row in zip(table.rows, table.cells, strict=True):
        cells = [
            no_formula(text)
            for dimension, label in zip(table.row_dimensions, labels[line.place], strict=True)
            for text in _row_values(dimension, label)
        ]
        if quantity:
            cells.append("value" if line.kind == "value" else _CHANGE)
        for cell, names in zip(row, extras, strict=True):
            cells += [_number(cell), *(_extra(cell, name) for name in names)]
        yield cells


def _row_names(dimension: str) -> list[str]:
    return ["model", "label"] if dimension == "model" else [dimension]


def _row_values(dimension: str, label: Label) -> list[str]:
    return [label.value, label.text] if dimension == "model" else [label.value]


def _extras(cells: Sequence[Cell]) -> list[str]:
    kinds = {cell.spread_kind for cell in cells if cell.spread_kind is not None}
    seeds = ["seeds"] if any(cell.num_seeds > 1 for cell in cells) else []
    interval = ["low", "high"] if any(cell.low is not None for cell in cells) else []
    best = ["best"] if any(cell.best for cell in cells) else []
    return [*sorted(kinds), *interval, *best, *seeds]


def _extra(cell: Cell, name: str) -> str:
    if name == "seeds":
        return str(cell.num_seeds) if cell.status == "ok" and cell.kind == "value" else ""
    if name == "best":
        return "best" if cell.best else ""
    if name in ("low", "high"):
        end = cell.low if name == "low" else cell.high
        return "" if end is None else full(end)
    return repr(cell.spread) if cell.spread_kind == name else ""


def _number(cell: Cell) -> str:
    if cell.status != "ok" or cell.value is None:
        return MARKS[cell.status]
    return full(cell.value)


def full(value: float) -> str:
    """Print a number so that it reads back to the same bits."""
    return "NaN" if value != value else repr(value)  # noqa: PLR0124 - true of NaN alone


def _long_rows(table: Table) -> Iterable[list[str]]:
    yield list(LONG_COLUMNS)
    for item in table.observations:
        yield [_long_cell(getattr(item, name)) for name in LONG_COLUMNS]


def _long_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return full(value)
    return no_formula(value) if isinstance(value, str) else shown(value)


# --- Markdown ---------------------------------------------------------------------------------


def escape_markdown(text: str) -> str:
    """Return `text` so that a Markdown table cell shows exactly it."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", plain(text))


def _markdown(table: Table) -> str:
    """Return a GitHub-flavoured table; headers of several levels are lines of one header cell."""
    header = [dimension_header(name) for name in table.row_dimensions]
    header += ["<br>".join(map(_markdown_label, line.labels)) for line in table.columns]
    rows = [
        [
            *map(_markdown_label, line.labels),
            *(_markdown_cell(cell) + _markdown_marks(cell.marks) for cell in cells),
        ]
        for line, cells in zip(table.rows, table.cells, strict=True)
    ]
    rule = [":---"] * len(table.row_dimensions) + ["---:"] * len(table.columns)
    lines = [] if table.caption is None else [f"**{escape_markdown(table.caption)}**", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]
    notes = [
        f"- {_markdown_marks((note.mark,))} {escape_markdown(note.text)}"
        for note in table.footnotes
    ]
    notes += [f"- {escape_markdown(note)}" for note in table.notes]
    return "\n".join(lines + ([""] if notes else []) + notes) + "\n"


def _markdown_cell(cell: Cell) -> str:
    return f"**{cell_text(cell)}**" if cell.best else cell_text(cell)


def _markdown_label(label: Label) -> str:
    return escape_markdown(label_text(label)) + _markdown_marks(label.marks)


def _markdown_marks(marks: Sequence[str]) -> str:
    return f"<sup>{marks_text(marks)}</sup>" if marks else ""
