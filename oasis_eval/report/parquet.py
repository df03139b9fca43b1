"""The tidy long form as a parquet file: typed columns, names as they are, no text to parse back.

It holds what `csv-long` holds, in its order; an absent value is null, NaN and infinity are values.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

from oasis_eval.errors import OutputError
from oasis_eval.record import replacing
from oasis_eval.report.grid import Table
from oasis_eval.report.observations import LONG_COLUMNS, Observation


def write_parquet(table: Table, path: Path) -> None:
    """Write every number of the table's records to `path`, one row a number.

    Raises:
        OutputError: It cannot be written there.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    hints = get_type_hints(Observation)
    columns = {}
    for name in LONG_COLUMNS:
        kind = next((kinds[item] for item in kinds if hints[name] in (item, item | None)), None)
        values = [getattr(item, name) for item in table.observations]
        columns[name] = pa.array(values, kind or pa.string())
    try:
        with replacing(path) as file:
            pq.write_table(pa.table(columns), file, compression="zstd")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
