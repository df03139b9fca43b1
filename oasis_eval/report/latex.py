r"""LaTeX tables that need no package but booktabs.

Every text that comes from outside passes `escape` once, and only texts do: commands are written
around the escaped pieces. pandas' Styler is not used here because it leaves index headers and
formatter output unescaped and cannot set rules under groups of columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from oasis_eval.report.grid import Cell, Label, Table
from oasis_eval.report.layout import (
    Span,
    cell_text,
    dimension_header,
    header_spans,
    label_text,
    marks_text,
    narrower,
    plain,
    row_headers,
    shorter,
    starts_group,
)

_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\char34{}",
        "±": r"$\pm$",
        "Δ": r"$\Delta$",
        "↓": r"$\downarrow$",
        "↑": r"$\uparrow$",
        "→": r"$\to$",
        "×": r"$\times$",
        "−": r"$-$",
        "∞": r"$\infty$",
        "≤": r"$\leq$",
        "≥": r"$\geq$",
        "α": r"$\alpha$",
        "β": r"$\beta$",
        "µ": r"$\mu$",
    }
)
_LIGATURES = re.compile(r"([-`',!?])(?=[-`',])")
"""Pairs that TeX fonts join into another sign, such as two hyphens into a dash."""
_NUMBER = re.compile(r"(\(?)([+-]?)([0-9]+(?:\.[0-9]+)?)(?:e([+-]?[0-9]+))?(\)?)")


_TEXT_WIDTH_POINTS, _TEXT_HEIGHT_POINTS = 345.0, 550.0
"""Of an article in 10 points."""


class _Size(NamedTuple):
    """A size of type, in points."""

    command: str
    letter: float
    """Mean width of a letter."""
    separation: int
    """Half the gap between two columns."""
    line: float
    """Height of a row."""


_SIZES = (
    _Size("", 5.0, 6, 12.0),
    _Size(r"\small", 4.6, 4, 11.3),
    _Size(r"\footnotesize", 4.2, 4, 9.8),
    _Size(r"\scriptsize", 3.8, 3, 8.9),
)
_CAPTION = _Size("", 4.5, 0, 12.0)
_NOTES = _Size(r"\footnotesize", 4.0, 0, 9.5)
"""Prose is narrower than numbers."""
_RULES_POINTS = 25.0
"""Of the three rules of a table, the lines under groups of columns, and the gap above its notes."""
_GAP_POINTS = 5.5
"""Of `\\addlinespace`."""
_LETTERS_OF_MARKS = 1


def escape(text: str) -> str:
    """Return `text` so that LaTeX prints exactly it.

    The ten special characters, `<`, `>`, `|` and `"` (wrong in the default font encoding) and a
    few mathematical signs become commands. Letters that pdfLaTeX's fonts do not have (for example
    Chinese ones) stay; compile with XeLaTeX or LuaLaTeX and a font that has them.
    """
    return _LIGATURES.sub(r"\1{}", plain(text).translate(_ESCAPES))


def render_latex(table: Table) -> str:
    """Return a `table` environment."""
    num_rows_columns, num_columns = len(table.row_dimensions), len(table.columns)
    lines = [r"\begin{table}[t]", r"\centering"]
    if table.caption is not None:
        lines.append(rf"\caption{{{escape(table.caption)}}}")
    lines.append(rf"\label{{tab:{re.sub('[^A-Za-z0-9:.-]', '-', table.spec.name)}}}")
    size = _size(table)
    if size.command:
        lines += [size.command, rf"\setlength{{\tabcolsep}}{{{size.separation}pt}}"]
    shape = "l" * num_rows_columns + "r" * num_columns
    lines.append(rf"\makebox[\linewidth][c]{{\begin{{tabular}}{{{shape}}}")
    lines.append(r"\toprule")
    rooms = _rooms(table)
    lines += _header(table, rooms)
    lines.append(r"\midrule")
    for position, (headers, cells) in enumerate(zip(row_headers(table), table.cells, strict=True)):
        if starts_group(table, position):
            lines.append(r"\addlinespace")
        indent = table.rows[position].kind == "change" and num_rows_columns == 1
        first = ["" if label is None else _label(label, indent=indent) for label in headers]
        texts = [
            _number_text(cell) + _hanging(cell.marks, room)
            for cell, room in zip(cells, rooms, strict=True)
        ]
        lines.append(_row([*first, *texts]))
    lines += [r"\bottomrule", r"\end{tabular}}"]
    lines += _notes(table)
    lines.append(r"\end{table}")
    return "\n".join(lines) + "\n"


def page_notes(table: Table) -> list[str]:
    """Return in one line each that a table is too wide or too tall for a page, and what to do.

    Both are estimated: the width at the smallest size that `render_latex` sets, the height, of a
    table with all its notes, at the one that it takes.
    """
    notes = []
    name = table.spec.name
    excess = _width(table, _SIZES[-1]) / _TEXT_WIDTH_POINTS - 1.0
    if excess > 0.0:
        notes.append(
            f"table {name!r} is about {excess:.0%} wider than the text of a page, set as "
            f"small as it gets; {narrower(table)}"
        )
    excess = _height(table, _size(table)) / _TEXT_HEIGHT_POINTS - 1.0
    if excess > 0.0:
        notes.append(
            f"table {name!r} is about {excess:.0%} taller than a page, its notes counted, where "
            f"LaTeX cuts it off; {shorter(table)}"
        )
    return notes


def _header(table: Table, rooms: Sequence[str]) -> list[str]:
    shift = len(table.row_dimensions)
    levels = header_spans(table)
    lines = []
    for spans in levels[:-1]:
        lines.append(_row([""] * shift + [_spanning(span) for span in spans]))
        rules = [
            rf"\cmidrule(lr){{{span.start + shift + 1}-{span.stop + shift}}}"
            for span in spans
            if span.stop - span.start > 1
        ]
        if rules:
            lines.append(" ".join(rules))
    names = [escape(dimension_header(name)) for name in table.row_dimensions]
    inner = [
        escape(label_text(span.label)) + _hanging(span.label.marks, room)
        for span, room in zip(levels[-1], rooms, strict=True)
    ]
    lines.append(_row([*names, *inner]))
    return lines


def _rooms(table: Table) -> list[str]:
    """Return the widest footnote letters of each column."""
    rooms = []
    for index, span in enumerate(header_spans(table)[-1]):
        marks = [span.label.marks, *(row[index].marks for row in table.cells)]
        rooms.append(max(map(_marks, marks), key=len))
    return rooms


def _hanging(marks: Sequence[str], room: str) -> str:
    """Set letters into a stretch that every cell of the column keeps free behind its number."""
    own = _marks(marks)
    if own == room:
        return own
    return (rf"\rlap{{{own}}}" if own else "") + rf"\phantom{{{room}}}"


def _spanning(span: Span) -> str:
    text = _label(span.label)
    num_columns = span.stop - span.start
    return text if num_columns == 1 else rf"\multicolumn{{{num_columns}}}{{c}}{{{text}}}"


def _label(label: Label, *, indent: bool = False) -> str:
    return (r"\quad " if indent else "") + escape(label_text(label)) + _marks(label.marks)


def _number_text(cell: Cell) -> str:
    """Set what a cell prints, its numbers in math; the best in bold."""
    text = " ".join(map(_word, cell_text(cell).split(" ")))
    return rf"\textbf{{\boldmath {text}}}" if cell.best else text


def _word(word: str) -> str:
    match = _NUMBER.fullmatch(word)
    if match is None:
        return escape(word)
    before, sign, digits, exponent, after = match.groups()
    power = "" if exponent is None else rf"\times10^{{{exponent}}}"
    number = f"${sign}{digits}{power}$" if sign or power else digits
    return f"{before}{number}{after}"


def _marks(marks: Sequence[str]) -> str:
    return rf"\,\textsuperscript{{{marks_text(marks)}}}" if marks else ""


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _size(table: Table) -> _Size:
    """Return the largest size at which a table is about as wide as an article's text."""
    fitting = [size for size in _SIZES if _width(table, size) <= _TEXT_WIDTH_POINTS]
    return fitting[0] if fitting else _SIZES[-1]


def _height(table: Table, size: _Size) -> float:
    """Estimate the height of a table with caption and notes, in points."""
    num_lines = len(header_spans(table)) + len(table.rows)
    num_gaps = sum(starts_group(table, position) for position in range(len(table.rows)))
    notes = [*(note.text for note in table.footnotes), *table.notes]
    text = _lines(table.caption or "", _CAPTION) * _CAPTION.line
    text += sum(_lines(note, _NOTES) for note in notes) * _NOTES.line
    return num_lines * size.line + num_gaps * _GAP_POINTS + _RULES_POINTS + text


def _lines(text: str, size: _Size) -> int:
    """Estimate the lines of a paragraph."""
    return math.ceil(len(text) * size.letter / _TEXT_WIDTH_POINTS)


def _width(table: Table, size: _Size) -> float:
    """Estimate the width of a table from the letters of its widest texts."""
    points, separation = size.letter, size.separation
    levels = header_spans(table)
    letters = [
        max(len(label_text(span.label)), *(len(cell_text(row[index])) for row in table.cells))
        for index, span in enumerate(levels[-1])
    ]
    widths = [(number + _LETTERS_OF_MARKS) * points + 2 * separation for number in letters]
    for span in (span for spans in levels[:-1] for span in spans):
        header = (len(label_text(span.label)) + _LETTERS_OF_MARKS) * points + 2 * separation
        missing = header - sum(widths[span.start : span.stop])
        widths[span.stop - 1] += max(0.0, missing)  # as TeX widens the last column of a group
    rows = [
        max(len(label_text(line.labels[level])) for line in table.rows) + _LETTERS_OF_MARKS
        for level in range(len(table.row_dimensions))
    ]
    return sum(widths) + sum(number * points + 2 * separation for number in rows)


def _notes(table: Table) -> list[str]:
    notes = [
        rf"\textsuperscript{{{note.mark}}}~{escape(note.text)}\par" for note in table.footnotes
    ]
    notes += [rf"{escape(note)}\par" for note in table.notes]
    if not notes:
        return []
    start = rf"\begin{{minipage}}{{\linewidth}}{_NOTES.command}\raggedright"
    return [r"\par\medskip", start, *notes, r"\end{minipage}"]
