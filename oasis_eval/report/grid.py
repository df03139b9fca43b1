"""The table as a grid of labelled cells, the same for every output format.

pandas is loaded only for the frames: printing a table needs none of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from oasis_eval.report.footnotes import Footnote
from oasis_eval.report.numbers import Status
from oasis_eval.report.observations import LONG_COLUMNS, Observation
from oasis_eval.spec import Dimension, TableSpec

if TYPE_CHECKING:
    import pandas as pd

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
    low: float | None = None
    """Lower end of a change's interval."""
    high: float | None = None
    best: bool = False
    """Whether it is the best of its column, alone or tied."""
    num_seeds: int = 1
    text: str | None = None
    """What is printed where that is not the value, for example an interval."""
    floor: bool = False
    """Whether a Pass@k is not distinguishable from 0."""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells in their places, before headers, marks and notes are decided."""

    row_dimensions: tuple[Dimension, ...]
    column_dimensions: tuple[Dimension, ...]
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    cells: tuple[tuple[Cell, ...], ...]
    members: Mapping[tuple[Place, Place], Sequence[Observation]]
    """The observations behind each value cell, by row and column; one a seed."""
    baseline: str | None
    """What relative changes refer to."""
    notes: tuple[str, ...] = ()
    """What was decided about the cells."""


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
    observations: tuple[Observation, ...]
    """Every number of the records, shown or not, in the order of the table."""
    footnotes: tuple[Footnote, ...]
    notes: tuple[str, ...]
    """Explanations of marks, without a letter."""

    @property
    def caption(self) -> str | None:
        """Return the caption of the specification."""
        return self.spec.caption

    @property
    def long(self) -> pd.DataFrame:
        """Return the tidy form: one row per record and metric, all metrics of the records."""
        import pandas as pd

        rows = [[getattr(item, name) for name in LONG_COLUMNS] for item in self.observations]
        frame = pd.DataFrame(rows, columns=list(LONG_COLUMNS), dtype=object)
        return frame.astype({"value": float, "stderr": float})

    @property
    def wide(self) -> pd.DataFrame:
        """Return the grid as numbers at full precision; NaN where a cell has a mark."""
        import pandas as pd

        return pd.DataFrame(
            [
                [math.nan if cell.value is None else cell.value for cell in row]
                for row in self.cells
            ],
            index=_index(self.rows, self.row_dimensions),
            columns=_index(self.columns, self.column_dimensions),
        )


def _index(lines: Sequence[Line], dimensions: Sequence[Dimension]) -> pd.MultiIndex:
    import pandas as pd

    return pd.MultiIndex.from_tuples(
        [(*line.place, line.kind) for line in lines], names=[*dimensions, "quantity"]
    )
