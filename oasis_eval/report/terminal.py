"""Tables for a terminal or a plain text file.

Laid out here rather than by rich's tables, which have no headers over several columns and cut
cells that do not fit; nothing in the text is markup, so print it with `print` or as rich `Text`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

from oasis_eval.report.grid import Label, Table
from oasis_eval.report.layout import (
    BEST,
    Span,
    cell_text,
    dimension_header,
    header_spans,
    label_text,
    marks_text,
    narrower,
    plain,
    row_headers,
    starts_group,
)

_GAP = 2
_MIN_NOTE_WIDTH = 60
_NOTE_WIDTH = 100


class _Layout(NamedTuple):
    table: Table
    heads: list[list[str]]
    """Row headers, column by column, the name of the dimension first."""
    body: list[list[str]]
    """Innermost column headers, then the cells; letters aligned behind the numbers."""
    widths: list[int]


def render_terminal(table: Table, *, width: int | None) -> str:
    """Return `table` as text.

    Args:
        table: The table.
        width: Columns of the terminal: a wider table continues below, with its row headers
            repeated. None: never split. Nothing is ever cut off.
    """
    layout = _layout(table)
    lines = [] if table.caption is None else [plain(table.caption), ""]
    blocks = _fitting(layout, width)
    for number, (start, stop) in enumerate(blocks):
        lines += [""] if number else []
        lines += _block(layout, start, stop)
    notes = [f"[{note.mark}] {plain(note.text)}" for note in table.footnotes]
    notes += [plain(note) for note in table.notes]
    note_width = max(_MIN_NOTE_WIDTH, min(width or _NOTE_WIDTH, _NOTE_WIDTH))
    for note in notes:
        indent = "    " if note.startswith("[") else ""
        lines += textwrap.wrap(note, note_width, subsequent_indent=indent, break_long_words=False)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def split_note(table: Table, width: int | None) -> str | None:
    """Say in one line that a table is wider than the terminal, and what to do; None: it fits."""
    number = len(_fitting(_layout(table), width))
    if number < 2:
        return None
    return f"wider than the terminal, so it stands in {number} parts; {narrower(table)}"


def _layout(table: Table) -> _Layout:
    body = _body(table)
    return _Layout(table, _row_heads(table), body, _widths(table, body))


def _fitting(layout: _Layout, width: int | None) -> list[tuple[int, int]]:
    """Split the columns into stretches that fit a terminal."""
    beside = [line.kind == "change" for line in layout.table.columns]
    heads = layout.heads
    head_width = sum(map(_column_width, heads)) + _GAP * (len(heads) - 1)
    return _blocks(layout.widths, beside, None if width is None else width - head_width)


def _row_heads(table: Table) -> list[list[str]]:
    """Return the row headers, column by column, the name of the dimension first."""
    rows = list(row_headers(table))
    heads = []
    for level, name in enumerate(table.row_dimensions):
        texts = [dimension_header(name)]
        for line, labels in zip(table.rows, rows, strict=True):
            label = labels[level]
            indent = "  " if line.kind == "change" and len(labels) == 1 else ""
            texts.append("" if label is None else indent + _label(label))
        heads.append(texts)
    return heads


def _body(table: Table) -> list[list[str]]:
    """Return innermost headers and cells, letters in a stretch of their own in each column."""
    columns = []
    for index, span in enumerate(header_spans(table)[-1]):
        cells = [row[index] for row in table.cells]
        best = [f"{BEST}{cell_text(cell)}" if cell.best else cell_text(cell) for cell in cells]
        texts = [plain(label_text(span.label)), *best]
        marks = [span.label.marks, *(cell.marks for cell in cells)]
        letters = [_marks(mark) for mark in marks]
        room = _column_width(letters)
        columns.append(
            [text + _left(mark, room) for text, mark in zip(texts, letters, strict=True)]
        )
    return [list(row) for row in zip(*columns, strict=True)]


def _widths(table: Table, body: Sequence[Sequence[str]]) -> list[int]:
    """Return column widths at which every cell and every header fits."""
    widths = [_column_width([row[position] for row in body]) for position in range(len(body[0]))]
    for spans in reversed(header_spans(table)[:-1]):
        for span in spans:
            missing = cell_len(_label(span.label)) - _span_width(widths, span)
            for step in range(max(missing, 0)):
                widths[span.start + step % (span.stop - span.start)] += 1
    return widths


def _block(layout: _Layout, start: int, stop: int) -> list[str]:
    """Return the lines of the columns from `start` up to, but without, `stop`."""
    table, heads, body, widths = layout
    gap = " " * _GAP
    head_widths = [_column_width(head) for head in heads]
    margin = " " * (sum(head_widths) + _GAP * (len(heads) - 1))
    total = len(margin) + sum(widths[start:stop]) + _GAP * (stop - start)
    levels = header_spans(table)
    lines = ["━" * total]
    for spans in levels[:-1]:
        inside = [
            _cut(span, start, stop) for span in spans if span.start < stop and span.stop > start
        ]
        sizes = [_span_width(widths, span) for span in inside]
        pairs = list(zip(inside, sizes, strict=True))
        names = [_centered(_label(span.label), size) for span, size in pairs]
        lines.append(gap.join([margin, *names]))
        if all(span.stop - span.start == 1 for span in inside):
            continue
        rules = [("─" if span.stop - span.start > 1 else " ") * size for span, size in pairs]
        lines.append(gap.join([margin, *rules]))
    texts = [[_right(row[index], widths[index]) for index in range(start, stop)] for row in body]
    for position, cells in enumerate(texts):
        if position > 0 and starts_group(table, position - 1):
            lines.append("")
        names = [_left(head[position], size) for head, size in zip(heads, head_widths, strict=True)]
        lines.append(gap.join([*names, *cells]))
        if position == 0:
            lines.append("─" * total)
    lines.append("━" * total)
    return lines


def _blocks(
    widths: Sequence[int], beside: Sequence[bool], room: int | None
) -> list[tuple[int, int]]:
    """Split the columns into stretches that fit beside the row headers.

    Args:
        widths: Width of each column.
        beside: Whether a column belongs beside the one before it.
        room: Width to fit; None: no limit.
    """
    if room is None:
        return [(0, len(widths))]
    starts = [index for index, glued in enumerate(beside) if not glued or index == 0]
    blocks, start, used = [], 0, 0
    for index, stop in zip(starts, [*starts[1:], len(widths)], strict=True):
        width = sum(widths[index:stop]) + _GAP * (stop - index)
        if index > start and used + width > room:
            blocks.append((start, index))
            start, used = index, 0
        used += width
    return [*blocks, (start, len(widths))]


def _cut(span: Span, start: int, stop: int) -> Span:
    return span._replace(start=max(span.start, start), stop=min(span.stop, stop))


def _span_width(widths: Sequence[int], span: Span) -> int:
    return sum(widths[span.start : span.stop]) + _GAP * (span.stop - span.start - 1)


def _label(label: Label) -> str:
    return plain(label_text(label)) + _marks(label.marks)


def _marks(marks: Sequence[str]) -> str:
    return f" [{marks_text(marks)}]" if marks else ""


def _column_width(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _left(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _right(text: str, width: int) -> str:
    return " " * (width - cell_len(text)) + text


def _centered(text: str, width: int) -> str:
    left = (width - cell_len(text)) // 2
    return _left(" " * left + text, width)
