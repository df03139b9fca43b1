"""Tables: rows, columns and decorations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from oasis_eval.parsing import Spec

Dimension = Literal["model", "family", "variant", "scheme", "task", "protocol", "metric", "seed"]


class TableSpec(Spec):
    """Rows, columns and decorations of a result table."""

    name: str = Field(default="results", min_length=1)
    """Label of the LaTeX table, `tab:<name>`."""
    caption: str | None = None
    """Plain text; every format escapes it by its own rules."""
    rows: tuple[Dimension, ...] = Field(default=("model",), min_length=1)
    """Dimensions down the side, outermost first."""
    columns: tuple[Dimension, ...] = Field(
        default=("task", "protocol", "metric", "scheme"), min_length=1
    )
    """Dimensions across the top, outermost first; `protocol` is printed only where it is needed
    to tell columns apart, since a footnote names it anyway."""
    metrics: tuple[str, ...] = Field(
        default=("token_perplexity", "word_perplexity", "pass@1"), min_length=1
    )
    """Metrics to show, in this order; one that a task does not have takes no column."""
    show: Literal["all", "first"] = "all"
    """Whether a task under a protocol shows all of these metrics or the first that it has."""
    where: dict[str, tuple[str, ...]] = Field(default={})
    """Keep only records whose field matches one of the patterns (fnmatch); fields are the columns
    of the long form, for example `{protocol: [gptq-2048], limit: ["8"]}`."""
    order: dict[Dimension, tuple[str, ...]] = Field(default={})
    """Values that come first in a dimension; the rest follow in natural order."""
    baseline: str | None = None
    """Model, label, variant or scheme that relative changes refer to; `reference` is the scheme
    that quantizes nothing."""
    change: Literal["rows", "columns"] = "rows"
    """Whether relative changes (%) are rows under their values or columns beside them."""
    uncertainty: Literal["none", "seeds", "all"] = "seeds"
    """What follows a value after `±`: nothing; the standard deviation over seeds; and for a single
    run its standard error too, where that is known."""

    best: Literal["none", "significant"] = "none"
    """Whether the best of each column is bold: only if a paired test tells it from the next, else
    those that are not told apart share the bold. Needs the samples beside the records."""
    change_interval: bool = False
    """Whether relative changes of perplexities have their paired interval, where there are samples
    of both."""

    def with_rows(self, rows: Sequence[str]) -> dict[str, object]:
        """Return the settings of this table with other rows, not yet checked.

        Columns that become rows leave the columns; what is no longer a row becomes the outermost
        columns.
        """
        columns = [name for name in self.rows + self.columns if name not in rows]
        return {**self.model_dump(), "rows": tuple(rows), "columns": tuple(columns)}

    @model_validator(mode="after")
    def _dimensions_once(self) -> Self:
        used = self.rows + self.columns
        twice = sorted({item for item in used if used.count(item) > 1})
        if twice:
            raise ValueError(f"dimensions used twice in rows and columns: {', '.join(twice)}")
        return self
