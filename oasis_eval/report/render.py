"""A table as text: terminal, CSV, LaTeX or Markdown.

The same numbers and marks in each; only headers, escapes and rules differ.
"""

from __future__ import annotations

from typing import Literal

from oasis_eval.report.tables import Table

Format = Literal["terminal", "csv", "csv-long", "latex", "markdown"]


# renderers are called with a Table that build_table checked
def render(table: Table, *, format: Format, width: int | None = None) -> str:  # noqa: A002 - the option's name
    """Return `table` as text that ends with a newline."""
    raise NotImplementedError(format)
