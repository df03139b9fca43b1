"""A folder's records in one columnar file, so that a hundred thousand of them need no JSON each.

A row is a record file: its name and stamps, the texts that filters match, and each field of the
record as JSON in a column of its own. What a table does not need (coverage, layers, tracebacks) is
not even read, and equal texts become one object. Only files decide what is there: a row counts
while its file has the same size and times, so an index can be old, foreign, damaged or gone, and
every answer stays the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_type_hints

from pydantic import TypeAdapter

from oasis_eval import parsing, spec
from oasis_eval import record as record_module
from oasis_eval.errors import RecordError
from oasis_eval.record import RunRecord, replacing
from oasis_eval.report import observations
from oasis_eval.report.observations import FILTER_COLUMNS, field_texts

if TYPE_CHECKING:
    import pyarrow as pa

INDEX_NAME = ".index.parquet"
PARTS = tuple(RunRecord.model_fields)
WITHOUT_DETAILS: dict[str, object] = {"traceback": None, "layers": (), "coverage": None}
"""Fields that no table needs, and most of a record's bytes: empty."""
_VERSION = 1
_GROUP_ROWS = 2000
"""Records that are in memory at once while an index is written."""
_UNIQUE = frozenset({"key", "spec", "metrics", "layers", "provenance", "traceback"})
"""Fields that hardly two records share."""
_FIELD, _PART = "field.", "part."


class Stamp(NamedTuple):
    """What the file system says of a file's content."""

    size: int
    mtime_ns: int
    ctime_ns: int
    """Of the last change of the file's content or place, which no program sets at will."""


class Row(NamedTuple):
    """One record file."""

    name: str
    stamp: Stamp
    key: str
    fields: Mapping[str, str | None]
    """The texts of each field as a JSON list; None passes every filter."""
    parts: Mapping[str, str]
    """Each field of the record as JSON."""


def make_row(name: str, stamp: Stamp, record: RunRecord) -> Row:
    """Return the row of a record that is in a file called `name`."""
    parts = {part: _adapter(part).dump_json(getattr(record, part)).decode() for part in PARTS}
    return Row(name, stamp, record.key, encoded_fields(record), parts)


def encoded_fields(record: RunRecord) -> dict[str, str | None]:
    """Return the texts of each field as a JSON list, None where every filter has to look.

    That is so of a record that contradicts itself: whoever reads it is told, filter or not.
    """
    try:
        texts = field_texts(record)
    except RecordError:
        return dict.fromkeys(FILTER_COLUMNS)
    return {name: None if text is None else json.dumps(text) for name, text in texts.items()}


class Index:
    """An index that is open: its rows stay those of this file, whatever replaces it."""

    def __init__(self, folder: Path) -> None:
        """Open the index of a folder.

        Raises:
            OSError: There is none, or it is damaged.
            ValueError: It is damaged, or was not made by this very version.
        """
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(
            folder / INDEX_NAME,
            read_dictionary=[f"{_FIELD}{name}" for name in FILTER_COLUMNS]
            + [f"{_PART}{name}" for name in PARTS if name not in _UNIQUE],
            page_checksum_verification=True,
        )
        try:
            metadata = self._file.metadata.metadata or {}
            if metadata.get(b"oasis-eval") != _fingerprint() or self._file.schema_arrow.names != (
                _schema().names
            ):
                raise ValueError("the index of another version")
            table = self._file.read(columns=["name", *Stamp._fields, "key"])
            columns = [table.column(name).to_pylist() for name in table.column_names]
            self.names: list[str] = columns[0]
            self.stamps = list(map(Stamp, *columns[1:4]))
            self.keys: list[str] = columns[4]
        except BaseException:
            self._file.close()
            raise
        sizes = [self._file.metadata.row_group(at).num_rows for at in range(self._num_groups)]
        self._starts = [sum(sizes[:at]) for at in range(len(sizes) + 1)]

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @property
    def _num_groups(self) -> int:
        return int(self._file.metadata.num_row_groups)

    def texts(self, field: str) -> list[str | None]:
        """Return the texts of a field, as JSON lists, row by row."""
        column: list[str | None] = []
        for chunk in self._file.read(columns=[f"{_FIELD}{field}"]).column(0).chunks:
            known = [*chunk.dictionary.to_pylist(), None]
            column += [known[-1 if at is None else at] for at in chunk.indices.to_pylist()]
        return column

    def records(self, rows: Sequence[int], parts: Sequence[str]) -> Iterator[tuple[int, RunRecord]]:
        """Yield rows, ascending, with their records; fields beyond `parts` are as if not recorded.

        Raises:
            OSError: The index is damaged.
            ValueError: The same.
        """
        known: dict[str, dict[str, object]] = {part: {} for part in parts}
        adapters = {part: _adapter(part) for part in parts}
        for group, chosen in self._by_group(rows):
            table = self._file.read_row_group(group, columns=[f"{_PART}{part}" for part in parts])
            table = table.take(_positions(row - self._starts[group] for row in chosen))
            columns = []
            for part in parts:
                read = adapters[part].validate_json
                column = table.column(f"{_PART}{part}")
                columns.append(
                    [read(text) for text in column.to_pylist()]
                    if part in _UNIQUE
                    else _shared(column, known[part], read)
                )
            for row, values in zip(chosen, zip(*columns, strict=True), strict=True):
                fields = WITHOUT_DETAILS | dict(zip(parts, values, strict=True))
                yield row, RunRecord.model_construct(**fields)  # type: ignore[arg-type]  # each value is from its field's own adapter

    def tables(self, rows: Sequence[int]) -> Iterator[pa.Table]:
        """Yield rows, ascending, as they are stored."""
        for group, chosen in self._by_group(rows):
            table = self._file.read_row_group(group).cast(_schema())
            yield table.take(_positions(row - self._starts[group] for row in chosen))

    def _by_group(self, rows: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        at = 0
        for group in range(self._num_groups):
            chosen = []
            while at < len(rows) and rows[at] < self._starts[group + 1]:
                chosen.append(rows[at])
                at += 1
            if chosen:
                yield group, chosen


class Writer:
    """Rows on their way into a new index."""

    def __init__(self, file: object) -> None:
        """Start an index in an open file."""
        import pyarrow.parquet as pq

        self._rows: list[Row] = []
        self._tables: list[pa.Table] = []
        self._file = pq.ParquetWriter(
            file,
            _schema(),
            compression="zstd",
            dictionary_pagesize_limit=1 << 26,
            write_page_checksum=True,
        )

    def add(self, row: Row) -> None:
        """Add a row."""
        self._rows.append(row)
        if len(self._rows) >= _GROUP_ROWS:
            self._flush()

    def copy(self, table: pa.Table) -> None:
        """Add the rows of an older index."""
        self._tables.append(table)
        if sum(item.num_rows for item in self._tables) >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            self._tables.append(_table(self._rows))
        if self._tables:
            self._file.write_table(pa.concat_tables(self._tables), row_group_size=2 * _GROUP_ROWS)
        self._rows, self._tables = [], []

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._file.close()


@contextmanager
def new_index(folder: Path) -> Iterator[tuple[Writer, int]]:
    """Yield a writer, and the file system's time before anything is read, in nanoseconds.

    Raises:
        OSError: The folder cannot be written to.
    """
    with replacing(folder / INDEX_NAME) as file:
        now = os.fstat(file.fileno()).st_mtime_ns
        writer = Writer(file)
        yield writer, now
        writer.close()


def _shared(
    column: pa.ChunkedArray, known: dict[str, object], read: Callable[[str], object]
) -> list[object]:
    """Return the values of a column of texts, one object for equal ones."""
    values: list[object] = []
    for chunk in column.chunks:
        texts = chunk.dictionary.to_pylist()
        for at in chunk.indices.to_pylist():
            text = texts[at]
            if text not in known:
                known[text] = read(text)
            values.append(known[text])
    return values


def _positions(rows: Iterable[int]) -> pa.Array:
    """Return row numbers as pyarrow wants them; its own conversion of a list loads pandas."""
    import pyarrow as pa

    numbers = array("q", rows)
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


def _table(rows: Sequence[Row]) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, list[str | int | None]] = {
        "name": [row.name for row in rows],
        **{name: [getattr(row.stamp, name) for row in rows] for name in Stamp._fields},
        "key": [row.key for row in rows],
        **{f"{_FIELD}{name}": [row.fields[name] for row in rows] for name in FILTER_COLUMNS},
        **{f"{_PART}{part}": [row.parts[part] for row in rows] for part in PARTS},
    }
    return pa.table(columns, schema=_schema())


@functools.cache
def _schema() -> pa.Schema:
    import pyarrow as pa

    texts = [*(f"{_FIELD}{name}" for name in FILTER_COLUMNS), *(f"{_PART}{part}" for part in PARTS)]
    return pa.schema(
        [
            ("name", pa.string()),
            *((name, pa.int64()) for name in Stamp._fields),
            ("key", pa.string()),
            *((name, pa.string()) for name in texts),
        ],
        metadata={b"oasis-eval": _fingerprint()},
    )


@functools.cache
def _adapter(part: str) -> TypeAdapter[object]:
    return TypeAdapter(get_type_hints(RunRecord, include_extras=True)[part])


@functools.cache
def _fingerprint() -> bytes:
    """Return what decides what an index holds: the text of the modules that it is made by."""
    folders = [Path(spec.__file__).parent]
    files = [Path(str(module.__file__)) for module in (parsing, record_module, observations)]
    files += [Path(__file__), *(path for item in folders for path in sorted(item.glob("*.py")))]
    digest = hashlib.sha256(str(_VERSION).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest().encode()
