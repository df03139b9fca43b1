"""Headers, footnote letters and explanations around the numbers of a grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oasis_eval.report import footnotes as texts
from oasis_eval.report.comparable import grouped
from oasis_eval.report.footnotes import Footnotes
from oasis_eval.report.grid import Cell, Grid, Label, Line, Place, Table
from oasis_eval.report.numbers import FLOOR, FLOOR_ERRORS, MARKS, Status, metric_style
from oasis_eval.report.observations import Observation
from oasis_eval.spec import Dimension, TableSpec

_LEGEND: dict[Status, str] = {
    "failed": "the run ended with an error",
    "unsupported": "the scheme cannot be done on this model or by its backend",
    "missing": "not evaluated",
    "reference": "what relative changes refer to",
    "undefined": "no change relative to a value that is missing, zero, not finite or at the floor",
}
CHANGE_HEADER = "Δ (%)"
_PROTOCOL_DIMENSIONS = ("task", "protocol", "metric")


@dataclass(frozen=True, slots=True)
class _Explanation:
    """Notes on one subject, and the dimension whose headers carry their letters."""

    dimension: Dimension | None
    """None: no header does; the notes stand below the table without a letter."""
    by_number: Mapping[tuple[str, str | None], str]
    """Note by record key and metric."""

    def of(self, items: Iterable[Observation]) -> list[str]:
        """Return the notes of `items`, each once, sorted."""
        found = (self.by_number.get((item.key, item.metric)) for item in items)
        return sorted({note for note in found if note is not None})


def annotate(grid: Grid, *, spec: TableSpec, observations: Sequence[Observation]) -> Table:
    """Turn a grid into a table: texts of headers, letters of footnotes, explanations of marks."""
    members = [item for cell in grid.members.values() for item in cell]
    explanations = _explanations(members, grid)
    warned_headers, warned_cells = _warnings(members, grid)
    labels = model_labels(members)
    footnotes = Footnotes()

    def headers(axis: int) -> tuple[Line, ...]:
        dimensions = (grid.row_dimensions, grid.column_dimensions)[axis]
        lines = (grid.rows, grid.columns)[axis]
        below = _by_prefix(grid, axis)
        marks: dict[Place, tuple[str, ...]] = {}
        for depth, dimension in enumerate(dimensions):
            for place in dict.fromkeys(line.place[: depth + 1] for line in lines):
                notes = [
                    note
                    for explanation in explanations
                    if explanation.dimension == dimension
                    for note in explanation.of(below[place])
                ]
                notes += warned_headers.get((dimension, place[-1]), ())
                marks[place] = footnotes.marks(notes)
        texts_of = {
            place: _header(dimensions[len(place) - 1], place[-1], labels=labels, marks=letters)
            for place, letters in marks.items()
        }
        return tuple(_with_texts(line, texts_of) for line in lines)

    columns, rows = headers(1), headers(0)
    general, means_differ = _spread_notes(grid)
    general += grid.notes
    cells = []
    for row, line in zip(grid.rows, grid.cells, strict=True):
        marked = []
        for column, cell in zip(grid.columns, line, strict=True):
            notes = []
            if cell.kind == "value":
                items = grid.members.get((row.place, column.place), ())
                if cell.spread_kind == "std" and means_differ:
                    notes.append(texts.mean_note(cell.num_seeds))
                notes += _cell_notes(items, floor=cell.floor)
                notes += [note for item in items for note in warned_cells.get(item.key, ())]
            marked.append(dataclasses.replace(cell, marks=footnotes.marks(notes)))
        cells.append(tuple(marked))
    baseline = labels.get(grid.baseline or "", grid.baseline)
    general += [
        note for item in explanations if item.dimension is None for note in item.of(members)
    ]
    if "model" not in grid.row_dimensions + grid.column_dimensions:
        general += [
            f"Model: {label}." for label in sorted({labels[item.model] for item in members})
        ]
    if "metric" not in grid.row_dimensions + grid.column_dimensions:
        general += _metric_note(members)
    if baseline is not None:
        general.append(f"Δ: change relative to {baseline}, in percent.")
    return Table(
        spec=spec,
        row_dimensions=grid.row_dimensions,
        column_dimensions=grid.column_dimensions,
        rows=rows,
        columns=columns,
        cells=tuple(cells),
        observations=tuple(observations),
        footnotes=footnotes.all(),
        notes=(*general, *legend(cell for row_cells in cells for cell in row_cells)),
    )


def _explanations(members: Sequence[Observation], grid: Grid) -> list[_Explanation]:
    """Make the notes on protocols, data and schemes, and decide which headers carry them."""
    dimensions = grid.row_dimensions + grid.column_dimensions
    carriers = [name for name in dimensions if name in _PROTOCOL_DIMENSIONS]
    carrier = carriers[-1] if carriers else None
    finished = [item for item in members if item.status == "ok"]
    protocols, data, schemes = {}, {}, {}
    for group in grouped(finished, lambda item: (item.task, item.metric, item.protocol)):
        note = texts.protocol_note(group)
        protocols.update({(item.key, item.metric): note for item in group})
    for item in finished:
        text = texts.data_note(item)
        if text is not None:
            data[item.key, item.metric] = text
    for group in grouped(members, lambda item: item.scheme):
        note = texts.scheme_note(group)
        schemes.update({(item.key, item.metric): note for item in group})
    return [
        _Explanation(carrier, protocols),
        _Explanation("task" if "task" in dimensions else carrier, data),
        _Explanation("scheme" if "scheme" in dimensions else None, schemes),
    ]


def _warnings(
    members: Sequence[Observation], grid: Grid
) -> tuple[dict[tuple[Dimension, str], list[str]], dict[str, list[str]]]:
    """Return the records' warnings by header where all of its records share them, else by key."""
    headers: dict[tuple[Dimension, str], list[str]] = {}
    keys: dict[str, list[str]] = {}
    by_warning: dict[str, dict[str, Observation]] = {}
    finished = {item.key: item for item in members if item.status == "ok"}
    for key in sorted(finished):
        for warning in finished[key].record.warnings:
            by_warning.setdefault(texts.warning_note(warning), {})[key] = finished[key]
    sizes: dict[tuple[Dimension, str], int] = {}
    dimensions: list[Dimension] = [
        name
        for name in grid.row_dimensions + grid.column_dimensions
        if name in ("model", "scheme", "task")
    ]
    for item in finished.values():
        for name in dimensions:
            header = (name, str(getattr(item, name)))
            sizes[header] = sizes.get(header, 0) + 1
    for warning in sorted(by_warning):
        items = by_warning[warning].values()
        for name in dimensions:
            values = {str(getattr(item, name)) for item in items}
            if len(items) > 1 and sum(sizes[name, value] for value in values) == len(items):
                for value in values:
                    headers.setdefault((name, value), []).append(warning)
                break
        else:
            for item in items:
                keys.setdefault(item.key, []).append(warning)
    return headers, keys


def model_labels(members: Sequence[Observation]) -> dict[str, str]:
    """Return what each model is called; two models with one label get their names beside it.

    Checkpoints of several seeds are called by what their labels have in common.
    """
    labels = {
        group[0].model: _common({item.label for item in group}) or group[0].model
        for group in grouped(members, lambda item: item.model)
    }
    count = {label: list(labels.values()).count(label) for label in labels.values()}
    return {
        name: f"{label} ({name})" if count[label] > 1 else label for name, label in labels.items()
    }


def _common(labels: set[str]) -> str:
    """Return the parts between commas that all labels have, in their order."""
    parts = [label.split(", ") for label in sorted(labels)]
    return ", ".join(part for part in parts[0] if all(part in each for each in parts))


def _by_prefix(grid: Grid, axis: int) -> dict[Place, list[Observation]]:
    """Collect the observations below each header of each level."""
    below: dict[Place, list[Observation]] = {}
    for places, items in grid.members.items():
        place = places[axis]
        for depth in range(len(place)):
            below.setdefault(place[: depth + 1], []).extend(items)
    return below


def _header(
    dimension: Dimension, value: str, *, labels: Mapping[str, str], marks: tuple[str, ...]
) -> Label:
    if dimension == "metric":
        style = metric_style(value)
        return Label(value, style.header, style.arrow, marks)
    return Label(value, labels[value] if dimension == "model" else value, "", marks)


def _with_texts(line: Line, texts_of: Mapping[Place, Label]) -> Line:
    """Put the printed headers into a line; one of changes says so instead of its innermost."""
    place = line.place
    headers = [texts_of[place[: depth + 1]] for depth in range(len(place))]
    if line.kind == "change":
        headers[-1] = Label(place[-1], CHANGE_HEADER)
    return Line(tuple(headers), line.kind)


def _spread_notes(grid: Grid) -> tuple[list[str], bool]:
    """Return what `±` means, and whether each mean needs a note on its own number of seeds."""
    cells = [cell for row in grid.cells for cell in row]
    notes = []
    if any(cell.spread_kind == "stderr" for cell in cells):
        notes.append("Single runs: value ± standard error.")
    sizes = {cell.num_seeds for cell in cells if cell.spread_kind == "std"}
    if len(sizes) == 1:
        notes.append(texts.mean_note(*sizes))
    return notes, len(sizes) > 1


def _cell_notes(items: Sequence[Observation], *, floor: bool) -> list[str]:
    if all(item.status != "ok" for item in items):
        return sorted({texts.failure_note(item) for item in items})
    found = [texts.loss_note(item) for item in items]
    found += [texts.completions_note(item) for item in items]
    found += [texts.answer_note(item) for item in items if floor]
    return texts.seeds_notes(items) + [note for note in found if note is not None]


def _metric_note(members: Sequence[Observation]) -> list[str]:
    notes = []
    for name in sorted({item.metric for item in members if item.metric is not None}):
        style = metric_style(name)
        direction = f", {style.better} is better" if style.better else ""
        notes.append(f"Values: {style.header}{direction}.")
    return notes


def legend(cells: Iterable[Cell]) -> list[str]:
    """Explain each mark that occurs, in a fixed order."""
    seen = list(cells)
    statuses = {cell.status for cell in seen}
    values = [cell.value for cell in seen if cell.value is not None]
    legend = []
    if any(cell.floor for cell in seen):
        legend.append(
            f"{FLOOR}: not distinguishable from 0 (at most {FLOOR_ERRORS} standard errors above)"
        )
    if any(math.isnan(value) for value in values):
        legend.append("NaN: not a number, the model's output is broken")
    if any(math.isinf(value) for value in values):
        legend.append("inf: infinite, beyond floating-point range")
    legend += [f"{MARKS[name]}: {text}" for name, text in _LEGEND.items() if name in statuses]
    return [f"{'; '.join(legend)}."] if legend else []
