"""Which differences inside a table are real: the best of a column, and intervals of changes.

Both come from the samples beside the records, by the paired tests of `compare`. Where they cannot
be had, nothing is marked, and a note says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from oasis_eval.errors import RecordError
from oasis_eval.report import pairs
from oasis_eval.report.compare import Difference, differences_of
from oasis_eval.report.grid import Cell, Grid, Place
from oasis_eval.report.layout import BEST
from oasis_eval.report.numbers import metric_style
from oasis_eval.report.observations import Observation
from oasis_eval.spec import Dimension
from oasis_eval.statistics import LEVEL, holm

_ALPHA = 1.0 - LEVEL
_BEST_NOTE = (
    f"Bold ({BEST} in plain text): best of its column, or not told from it by a paired test "
    f"(t-test over windows, McNemar for answers; Holm within the column, level {_ALPHA:.2f})."
)
_UNTESTED_NOTE = (
    "No best is marked in columns whose values cannot be paired (no samples, other windows, "
    "several seeds)."
)
_INTERVAL_NOTE = f"Changes in parentheses: paired {LEVEL:.0%} interval."

Members = Mapping[tuple[Place, Place], Sequence[Observation]]


class _Entry(NamedTuple):
    """A finished value of a column."""

    row: int
    value: float
    number: Observation


def mark_best(grid: Grid, folders: Sequence[Path]) -> Grid:
    """Mark the best values of each column: one that is significantly best, or those tied with it.

    Args:
        grid: Values, with or without changes.
        folders: Where samples may lie.
    """
    marked: set[tuple[int, int]] = set()
    untested = False
    for column in range(len(grid.columns)):
        for entries in _competitors(grid, column):
            best = _best(entries, folders)
            untested |= best is None
            marked |= {(row, column) for row in best or ()}
    cells = tuple(
        tuple(
            dataclasses.replace(cell, best=True) if (row, column) in marked else cell
            for column, cell in enumerate(line)
        )
        for row, line in enumerate(grid.cells)
    )
    notes = [*([_BEST_NOTE] if marked else []), *([_UNTESTED_NOTE] if untested else [])]
    return dataclasses.replace(grid, cells=cells, notes=(*grid.notes, *notes))


def add_intervals(grid: Grid, dimension: Dimension, folders: Sequence[Path]) -> Grid:
    """Give relative changes of perplexities their interval, where both runs have samples.

    Args:
        grid: Values and changes.
        dimension: The one that the baseline is a value of.
        folders: Where samples may lie.
    """

    def interval(row: int, column: int, cell: Cell) -> Cell:
        if cell.kind != "change" or cell.status != "ok":
            return cell
        here = (grid.rows[row].place, grid.columns[column].place)
        found = _difference(_only(grid.members, there(here)), _only(grid.members, here), folders)
        if found is None or found.change is None:
            return cell
        ends = (found.change.low, found.change.high)
        if not all(end is not None and math.isfinite(end) for end in ends):
            return cell
        return dataclasses.replace(cell, low=ends[0], high=ends[1])

    def there(here: tuple[Place, Place]) -> tuple[Place, Place]:
        axis = 0 if dimension in grid.row_dimensions else 1
        index = (grid.row_dimensions, grid.column_dimensions)[axis].index(dimension)
        place = (*here[axis][:index], grid.baseline or "", *here[axis][index + 1 :])
        return (place, here[1]) if axis == 0 else (here[0], place)

    cells = tuple(
        tuple(interval(row, column, cell) for column, cell in enumerate(line))
        for row, line in enumerate(grid.cells)
    )
    has_any = any(cell.low is not None for line in cells for cell in line)
    notes = (*grid.notes, _INTERVAL_NOTE) if has_any else grid.notes
    return dataclasses.replace(grid, cells=cells, notes=notes)


def _competitors(grid: Grid, column: int) -> list[list[_Entry | None]]:
    """Return the values of a column that compete: two or more of one task, protocol and metric.

    None stands for a value over several seeds.
    """
    groups: dict[tuple[str, str, str | None], list[_Entry | None]] = {}
    for row, line in enumerate(grid.rows):
        cell = grid.cells[row][column]
        place = (line.place, grid.columns[column].place)
        if cell.kind != "value" or cell.status != "ok" or cell.value is None:
            continue
        numbers = grid.members[place]
        if metric_style(cell.metric).better is None:
            continue
        number = _only(grid.members, place)
        key = (numbers[0].task, numbers[0].protocol, numbers[0].metric)
        entry = None if number is None else _Entry(row, cell.value, number)
        groups.setdefault(key, []).append(entry)
    return [entries for entries in groups.values() if len(entries) > 1]


def _best(entries: Sequence[_Entry | None], folders: Sequence[Path]) -> set[int] | None:
    """Return the rows of the best; None where values cannot be told apart by a test."""
    known = [item for item in entries if item is not None]
    finite = [item for item in known if math.isfinite(item.value)]
    if len(known) < len(entries) or not finite:
        return None
    lower = metric_style(known[0].number.metric or "").better == "lower"
    first = (min if lower else max)(finite, key=lambda item: item.value)
    others = [item for item in finite if item is not first]
    p_values = []
    for other in others:
        found = _difference(first.number, other.number, folders)
        if found is None or found.p_value is None:
            return None
        p_values.append(found.p_value)
    adjusted = holm(p_values) if p_values else []
    tied = {other.row for other, p in zip(others, adjusted, strict=True) if p >= _ALPHA}
    return {first.row, *tied}


def _only(members: Members, place: tuple[Place, Place]) -> Observation | None:
    """Return the number behind a cell, None where there are several seeds or no run."""
    found = members.get(place, ())
    return found[0] if len(found) == 1 else None


def _difference(
    first: Observation | None, second: Observation | None, folders: Sequence[Path]
) -> Difference | None:
    """Return the paired difference of two numbers, None where they cannot be paired."""
    if first is None or second is None:
        return None
    pair = pairs.Pair(_cell(first, folders), _cell(second, folders))
    try:
        return differences_of(pair)[0]
    except RecordError:  # said in a note: a table without samples is still a table
        return None


def _cell(number: Observation, folders: Sequence[Path]) -> pairs.Cell:
    name = f"{number.key}.samples.jsonl"
    folder = next((item for item in folders if (item / name).exists()), Path())
    return pairs.Cell(folder, (number,))
