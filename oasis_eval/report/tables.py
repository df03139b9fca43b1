"""Records to a table: observations placed by the dimensions of a table specification.

The one idea: a table is a grid of `Cell` values whose headers, marks and footnotes are decided
here, so that every output format shows the same table. Means are over seeds and over nothing
else; whatever would mix anything more is refused (`comparable`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from oasis_eval.errors import RecordError, SpecError, UnknownNameError
from oasis_eval.paths import data_folder
from oasis_eval.record import RunRecord
from oasis_eval.report.comparable import check_cell, check_columns, check_names
from oasis_eval.report.footnotes import Footnote
from oasis_eval.report.numbers import KNOWN_METRICS, Status, is_floor
from oasis_eval.report.observations import LONG_COLUMNS, Observation, keep, observe
from oasis_eval.report.order import ranks
from oasis_eval.spec import Dimension, QuantScheme, TableSpec, parse, read_yaml

Kind = Literal["value", "change"]
Place = tuple[str, ...]
"""Values of the row (or column) dimensions, outermost first."""


@dataclass(frozen=True, slots=True)
class Label:
    """One header: a value of a dimension."""

    value: str
    """The value itself, as in the records."""
    text: str
    """What is printed, not yet escaped."""
    arrow: str = ""
    """Direction in which the metric improves."""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """The headers of one row or column."""

    labels: tuple[Label, ...]
    kind: Kind

    @property
    def place(self) -> Place:
        """Return the dimension values."""
        return tuple(label.value for label in self.labels)


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of the grid."""

    status: Status
    """`ok` has a value (which may be NaN or infinite); the others have a mark instead."""
    kind: Kind = "value"
    metric: str = ""
    value: float | None = None
    """In the metric's own unit; a change is in percent."""
    spread: float | None = None
    spread_kind: Literal["std", "stderr"] | None = None
    num_seeds: int = 1
    floor: bool = False
    """Whether a Pass@k is not distinguishable from 0."""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table, ready for any format."""

    spec: TableSpec
    row_dimensions: tuple[Dimension, ...]
    column_dimensions: tuple[Dimension, ...]
    """Those of the specification, less a protocol that tells no columns apart."""
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    cells: tuple[tuple[Cell, ...], ...]
    """Row by row."""
    long: pd.DataFrame
    """Tidy form: one row per record and metric, all metrics of the records."""
    footnotes: tuple[Footnote, ...]
    notes: tuple[str, ...]
    """Explanations of marks, without a letter."""

    @property
    def caption(self) -> str | None:
        """Return the caption of the specification."""
        return self.spec.caption

    @property
    def wide(self) -> pd.DataFrame:
        """Return the grid as numbers at full precision; NaN where a cell has a mark."""
        return pd.DataFrame(
            [
                [math.nan if cell.value is None else cell.value for cell in row]
                for row in self.cells
            ],
            index=_index(self.rows, self.row_dimensions),
            columns=_index(self.columns, self.column_dimensions),
        )


@dataclass(frozen=True, slots=True)
class Baseline:
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
        folder = data_folder("results") / "tables"
        known = {item.stem: item for item in folder.glob("*.yaml")}
        if str(name_or_path) not in known:
            raise UnknownNameError("table", str(name_or_path), known)
        path = known[str(name_or_path)]
    value = read_yaml(path)
    if isinstance(value, dict):
        value = {"name": path.stem, **value}
    return parse(TableSpec, value, origin=str(path))


def build_table(records: Sequence[RunRecord], spec: TableSpec) -> Table:
    """Place records in a table.

    The result depends on the content of the records only, not on their order.

    Args:
        records: Results of any models, schemes, tasks and seeds.
        spec: Rows, columns and decorations.

    Raises:
        RecordError: There are no records, or they cannot stand in one table; the message names
            the field in which they differ and how to keep one side.
        SpecError: A metric, field or baseline of the specification is not in the records.
    """
    raise NotImplementedError
