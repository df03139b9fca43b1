"""Records to a table: observations placed by the dimensions of a table specification.

Means are over seeds and over nothing else; whatever would mix anything more is refused by
`comparable`. What is printed around the numbers is decided in `annotations`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oasis_eval.errors import RecordError, SpecError, UnknownNameError
from oasis_eval.parsing import parse, read_yaml
from oasis_eval.paths import data_folder
from oasis_eval.record import RunRecord
from oasis_eval.report.annotations import annotate
from oasis_eval.report.comparable import check_cell, check_columns, check_names
from oasis_eval.report.grid import Cell, Grid, Label, Line, Place, Table
from oasis_eval.report.numbers import KNOWN_METRICS, is_floor
from oasis_eval.report.observations import Observation, chosen
from oasis_eval.report.order import ranks
from oasis_eval.spec import Dimension, TableSpec

REFERENCE = "reference"
"""As a baseline: the scheme that quantizes nothing."""

_PARTIAL_NOTE = "Changes between means of other seeds are over the seeds that both have."


@dataclass(frozen=True, slots=True)
class _Baseline:
    """The value of a dimension that relative changes refer to."""

    dimension: Dimension
    value: str


def load_spec(name_or_path: str | Path) -> TableSpec:
    """Read a built-in table specification by name, or one from a YAML file.

    Raises:
        UnknownNameError: It is neither a file nor a built-in name.
        SpecError: The file is not a table specification.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml") and len(path.parts) == 1:
        known = {item.stem: item for item in (data_folder("results") / "tables").glob("*.yaml")}
        if str(name_or_path) not in known:
            raise UnknownNameError("table", str(name_or_path), known)
        path = known[str(name_or_path)]
    value = read_yaml(path)
    if isinstance(value, dict):
        value = {"name": path.stem, **value}
    return parse(TableSpec, value, origin=str(path))


def build_table(
    records: Sequence[RunRecord], spec: TableSpec, *, folders: Sequence[Path] = ()
) -> Table:
    """Place records in a table.

    The result depends on the content of the records only, not on their order.

    Args:
        records: Results of any models, schemes, tasks and seeds.
        spec: Rows, columns and decorations.
        folders: Where the samples of the records may lie, for `best` and `change_interval`.

    Raises:
        RecordError: There are no records, or they cannot stand in one table; the message names
            the field in which they differ and how to keep one side.
        SpecError: A metric, field or baseline of the specification is not in the records.
    """
    if not records:
        raise RecordError(
            "no records: run 'oasis-eval evaluate MODEL' first, or give the folder it wrote to"
        )
    kept = chosen(records, spec.where)
    selected = _select(kept, spec)
    check_names(selected)
    check_columns(selected, protocols_apart="protocol" in spec.rows + spec.columns)
    baseline = _baseline(selected, spec)
    grid = _grid(selected, spec, baseline)
    if baseline is not None:
        grid = _with_changes(grid, spec, baseline)
    if baseline is not None and spec.change_interval:
        from oasis_eval.report.significance import add_intervals

        grid = add_intervals(grid, baseline.dimension, folders)
    if spec.best == "significant":
        from oasis_eval.report.significance import mark_best

        grid = mark_best(grid, folders)
    return annotate(grid, spec=spec, observations=_in_order(kept, spec))


def dimension_value(item: Observation, dimension: Dimension) -> str:
    """Return where an observation stands in `dimension`."""
    return str(getattr(item, dimension))


def _select(observations: Sequence[Observation], spec: TableSpec) -> list[Observation]:
    """Return what the table shows: the numbers of its metrics, and runs without numbers.

    A run without numbers stands in every column that finished runs of its task have.

    Raises:
        SpecError: A metric of the specification is unknown, or the records have none of them.
    """
    measured = sorted({item.metric for item in observations if item.metric is not None})
    unknown = [name for name in spec.metrics if name not in KNOWN_METRICS.union(measured)]
    if unknown or (measured and not set(measured) & set(spec.metrics)):
        wanted = ", ".join(unknown or spec.metrics)
        raise SpecError(
            f"table {spec.name!r}: metric {wanted} is not in the records; "
            f"they have: {', '.join(measured) or 'none, every run failed'}"
        )
    selected = [item for item in observations if item.metric in spec.metrics]
    if spec.show == "first":
        selected = _first_metrics(selected, spec.metrics)
    columns: dict[tuple[str, str], set[str]] = {}
    for item in selected:
        columns.setdefault((item.task, item.protocol), set()).add(item.metric or "")
    for item in observations:
        if item.metric is None:
            expected = columns.get((item.task, item.protocol), {_usual_metric(item.protocol)})
            for name in sorted(expected & set(spec.metrics)):
                selected.append(dataclasses.replace(item, metric=name))
    if not selected:
        raise RecordError(
            f"table {spec.name!r}: no record has one of its metrics {', '.join(spec.metrics)}"
        )
    return selected


def _first_metrics(
    observations: Sequence[Observation], metrics: tuple[str, ...]
) -> list[Observation]:
    """Keep of each task and protocol the metric that comes first in `metrics`."""
    first: dict[tuple[str, str], int] = {}
    for item in observations:
        place = (item.task, item.protocol)
        rank = metrics.index(item.metric or "")
        first[place] = min(rank, first.get(place, rank))
    return [
        item for item in observations if item.metric == metrics[first[item.task, item.protocol]]
    ]


def _usual_metric(protocol: str) -> str:
    """Return the metric that a protocol is run for, where no run of it finished."""
    if protocol.startswith("gsm8k"):
        return "pass@1"
    if protocol.startswith("passkey"):
        return "exact_match"
    return "word_perplexity" if protocol.startswith("rolling") else "token_perplexity"


def _grid(observations: Sequence[Observation], spec: TableSpec, baseline: _Baseline | None) -> Grid:
    column_dimensions = _telling(observations, spec.columns)
    position = _positions(observations, spec, baseline)
    members: dict[tuple[Place, Place], list[Observation]] = {}
    for item in observations:
        row = tuple(dimension_value(item, name) for name in spec.rows)
        column = tuple(dimension_value(item, name) for name in column_dimensions)
        members.setdefault((row, column), []).append(item)

    def lines(places: Iterable[Place], dimensions: Sequence[Dimension]) -> tuple[Line, ...]:
        def key(place: Place) -> tuple[int, ...]:
            return tuple(
                position[name][value] for name, value in zip(dimensions, place, strict=True)
            )

        return tuple(
            Line(tuple(Label(value, value) for value in place), "value")
            for place in sorted(set(places), key=key)
        )

    members = {place: check_cell(members[place]) for place in sorted(members)}
    rows = lines((row for row, _ in members), spec.rows)
    columns = lines((column for _, column in members), column_dimensions)
    cells = tuple(
        tuple(_cell(members.get((row.place, column.place), []), spec) for column in columns)
        for row in rows
    )
    return Grid(
        row_dimensions=spec.rows,
        column_dimensions=column_dimensions,
        rows=rows,
        columns=columns,
        cells=cells,
        members=members,
        baseline=baseline.value if baseline else None,
    )


def _telling(
    observations: Sequence[Observation], dimensions: tuple[Dimension, ...]
) -> tuple[Dimension, ...]:
    """Drop the protocol from the columns where the other dimensions tell them apart."""
    others = tuple(name for name in dimensions if name != "protocol")

    def places(names: Sequence[Dimension]) -> set[Place]:
        return {tuple(dimension_value(item, name) for name in names) for item in observations}

    return others if others and len(places(others)) == len(places(dimensions)) else dimensions


def _positions(
    observations: Sequence[Observation], spec: TableSpec, baseline: _Baseline | None
) -> dict[Dimension, dict[str, int]]:
    schemes = {item.scheme: item.record.spec.scheme for item in observations}
    positions = {}
    for name in spec.rows + spec.columns:
        first = spec.order.get(name, ())
        if name == "metric":
            first += spec.metrics
        if baseline is not None and baseline.dimension == name:
            first += (baseline.value,)
        values = {dimension_value(item, name) for item in observations}
        positions[name] = ranks(name, values, first=first, schemes=schemes)
    return positions


def _cell(observations: Sequence[Observation], spec: TableSpec) -> Cell:
    """Reduce the seeds of one cell: the mean of finite values, else what is not finite."""
    if not observations:
        return Cell("missing")
    metric = observations[0].metric or ""
    finished = [item for item in observations if item.value is not None]
    if not finished:
        failed = any(item.status == "failed" for item in observations)
        return Cell("failed" if failed else "unsupported", metric=metric)
    values = [item.value for item in finished if item.value is not None]
    floors = [
        is_floor(metric, value, stderr=item.stderr, count=item.count)
        for item, value in zip(finished, values, strict=True)
    ]
    cell = Cell("ok", metric=metric, num_seeds=len(values), floor=all(floors))
    if len(values) == 1:
        cell = dataclasses.replace(cell, value=values[0])
        stderr = finished[0].stderr
        if spec.uncertainty != "all" or stderr is None or not math.isfinite(stderr):
            return cell
        return dataclasses.replace(cell, spread=stderr, spread_kind="stderr")
    if not all(math.isfinite(value) for value in values):
        return dataclasses.replace(cell, value=sum(values))
    cell = dataclasses.replace(cell, value=statistics.fmean(values))
    if spec.uncertainty == "none":
        return cell
    return dataclasses.replace(cell, spread=statistics.stdev(values), spread_kind="std")


def _baseline(observations: Sequence[Observation], spec: TableSpec) -> _Baseline | None:
    """Find the dimension that the baseline of the specification is a value of.

    Raises:
        SpecError: It is in no row and no column.
    """
    if spec.baseline is None:
        return None
    seen: list[str] = []
    for dimension in spec.rows + spec.columns:
        if dimension not in ("model", "family", "variant", "scheme"):
            continue
        for item in observations:
            value = dimension_value(item, dimension)
            names = {value, item.label} if dimension == "model" else {value}
            if spec.baseline in names:
                return _Baseline(dimension, value)
            seen.append(value)
    schemes = {item.scheme: item.record.spec.scheme for item in observations}
    plain = {name for name, scheme in schemes.items() if scheme.execution == "none"}
    if spec.baseline == REFERENCE and plain and "scheme" in spec.rows + spec.columns:
        order = ranks("scheme", plain, first=spec.order.get("scheme", ()), schemes=schemes)
        return _Baseline("scheme", min(order, key=order.__getitem__))
    found = ", ".join(sorted(set(seen))) or "none"
    raise SpecError(
        f"table {spec.name!r}: baseline {spec.baseline!r} is in no row or column "
        f"(there are: {found}); name one of them, or evaluate the baseline too"
    )


def _with_changes(grid: Grid, spec: TableSpec, baseline: _Baseline) -> Grid:
    """Add relative changes in percent, as rows under their values or columns beside them."""
    by_rows = baseline.dimension in grid.row_dimensions
    dimensions = grid.row_dimensions if by_rows else grid.column_dimensions
    index = dimensions.index(baseline.dimension)
    at = {
        (row.place, column.place): cell
        for row, cells in zip(grid.rows, grid.cells, strict=True)
        for column, cell in zip(grid.columns, cells, strict=True)
    }

    partial: list[tuple[Place, Place]] = []

    def referred(place: Place) -> Place:
        return (*place[:index], baseline.value, *place[index + 1 :])

    def cell(row: Line, column: Line) -> Cell:
        own = at[row.place, column.place]
        if "change" not in (row.kind, column.kind):
            return own
        if by_rows:
            there = (referred(row.place), column.place)
        else:
            there = (row.place, referred(column.place))
        if there == (row.place, column.place) and own.status == "ok":
            return Cell("reference", kind="change", metric=own.metric)
        members = (grid.members.get((row.place, column.place), ()), grid.members.get(there, ()))
        shared = _shared_seeds(*members)
        if shared is None:
            return _change(own, at.get(there, Cell("missing")))
        partial.append(there)
        return _change(*(_cell([i for i in items if i.seed in shared], spec) for items in members))

    def doubled(lines: tuple[Line, ...], *, leave_out_baseline: bool) -> tuple[Line, ...]:
        result = []
        for line in lines:
            result.append(line)
            if not (leave_out_baseline and line.place == referred(line.place)):
                result.append(Line(line.labels, "change"))
        return tuple(result)

    rows, columns = grid.rows, grid.columns
    if spec.change == "rows":
        rows = doubled(rows, leave_out_baseline=by_rows)
    else:
        columns = doubled(columns, leave_out_baseline=not by_rows)
    cells = tuple(tuple(cell(row, column) for column in columns) for row in rows)
    notes = (*grid.notes, *([_PARTIAL_NOTE] if partial else []))
    return dataclasses.replace(grid, rows=rows, columns=columns, cells=cells, notes=notes)


def _shared_seeds(own: Sequence[Observation], base: Sequence[Observation]) -> set[int] | None:
    """Return the seeds that both have numbers of; None where all are shared, or none is."""
    seeds, others = (
        {item.seed for item in items if item.value is not None} for items in (own, base)
    )
    return (seeds & others or None) if seeds != others else None


def _change(cell: Cell, base: Cell) -> Cell:
    if cell.status != "ok" or cell.value is None:
        return Cell(cell.status, kind="change", metric=cell.metric)
    usable = base.value is not None and math.isfinite(base.value) and base.value != 0.0
    if not usable or base.floor or base.value is None:
        return Cell("undefined", kind="change", metric=cell.metric)
    percent = (cell.value - base.value) / abs(base.value) * 100.0
    return Cell("ok", kind="change", metric=cell.metric, value=percent)


def _in_order(observations: Sequence[Observation], spec: TableSpec) -> list[Observation]:
    """Return the observations in the order of the table's rows and columns."""
    schemes = {item.scheme: item.record.spec.scheme for item in observations}
    names: tuple[Dimension, ...] = ("model", "scheme", "task", "protocol", "metric", "seed")
    positions = [
        ranks(
            name,
            {dimension_value(item, name) for item in observations},
            first=spec.order.get(name, ()),
            schemes=schemes,
        )
        for name in names
    ]

    def key(item: Observation) -> tuple[object, ...]:
        places = [
            position[dimension_value(item, name)]
            for name, position in zip(names, positions, strict=True)
        ]
        return (*places, item.filter or "", item.key)

    return sorted(observations, key=key)
