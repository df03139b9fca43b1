"""The records of files and folders, by way of an index where a folder holds many.

What comes out is what `read_records` and the filters give, to the byte, with an index or without.
An index is made and renewed by whoever reads; a folder that cannot be written to has none.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from oasis_eval.errors import NoMatchError, RecordError
from oasis_eval.record import RunRecord, read_record, record_names
from oasis_eval.report.index import (
    PARTS,
    WITHOUT_DETAILS,
    Index,
    Stamp,
    encoded_fields,
    make_row,
    new_index,
)
from oasis_eval.report.observations import FILTER_COLUMNS, matching, no_match

MIN_FILES = 2000
"""Record files from which on a folder gets an index."""
SETTLED_NS = 2_000_000_000
"""A file that changed this shortly ago may change again without showing it in its times."""
_WORTHWHILE = 50
"""An index is renewed when one in so many of its rows is not as its file."""

Where = Mapping[str, tuple[str, ...]]
_Use = Literal["found", "new", "none"]
"""Which index is used: that of the folder, renewed where it is old; one made anew; none."""


class _Entry(NamedTuple):
    """One record file."""

    name: str
    key: str
    texts: tuple[str | None, ...]
    """What filters match, field by field of the filters."""
    row: int | None = None
    """In the index of its folder."""
    record: RunRecord | None = None
    """What was read of a file that is in no index."""


class _DamagedIndexError(Exception):
    """An index does not hold what it should."""


def find_records(
    paths: Sequence[Path], *, where: Where | None = None, whole: bool = False
) -> list[RunRecord]:
    """Return the records of files and folders that may match, sorted by file name.

    A record that no filter can keep is left out unread; of the others the filters decide.

    Args:
        paths: Files of records, and folders with `*.json` directly inside.
        where: Filters, as those of a table; one on an unknown field leaves nothing out.
        whole: Whether coverage, layers and tracebacks are needed, too.

    Raises:
        RecordError: A path does not exist or a file is no record.
        NoMatchError: There are records, and none of them can match.
    """
    filters = dict(where or {})
    if not filters.keys() <= set(FILTER_COLUMNS):
        filters = {}
    with _no_collection():
        uses: tuple[_Use, ...] = ("found", "new")
        for use in uses:
            try:
                return _find(paths, filters, whole=whole, use=use)
            except _DamagedIndexError:
                continue
        return _find(paths, filters, whole=whole, use="none")


def _find(paths: Sequence[Path], where: Where, *, whole: bool, use: _Use) -> list[RunRecord]:
    shelves: list[_Shelf] = []
    try:
        for path in paths:
            shelves.append(_Shelf(path, where, whole=whole, use=use))
        return _choose(shelves, where, whole=whole)
    finally:
        for shelf in shelves:
            shelf.close()


def _choose(shelves: Sequence[_Shelf], where: Where, *, whole: bool) -> list[RunRecord]:
    entries = [entry for shelf in shelves for entry in shelf.entries]
    count = Counter(entry.key for entry in entries)
    test = _Filters(where)
    # Of a key that is there twice, both together decide which one counts, and whether one does.
    hits = [count[entry.key] == 1 and test.may_pass(entry) for entry in entries]
    repeated = {key for key, number in count.items() if number > 1}
    if entries and not any(hits) and not repeated:
        raise NoMatchError(no_match(where, test.found(entries)))
    everything = not any(hits)
    wanted = {
        id(entry)
        for entry, hit in zip(entries, hits, strict=True)
        if hit or everything or entry.key in repeated
    }
    return [
        record
        for shelf in shelves
        for record in shelf.records(
            [entry for entry in shelf.entries if id(entry) in wanted], repeated, whole=whole
        )
    ]


class _Filters:
    """Filters on texts that many records share."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._passes: dict[tuple[str, str], bool] = {}

    def may_pass(self, entry: _Entry) -> bool:
        """Tell whether each field has a text that matches; a text that is None always does."""
        for name, text in zip(self._where, entry.texts, strict=True):
            if text is not None and not self._one(name, text):
                return False
        return True

    def _one(self, name: str, text: str) -> bool:
        passes = self._passes.get((name, text))
        if passes is None:
            passes = any(matching(item, self._where[name]) for item in json.loads(text))
            self._passes[name, text] = passes
        return passes

    def found(self, entries: Sequence[_Entry]) -> dict[str, set[str]]:
        """Return the texts of each field in all entries."""
        distinct: dict[str, set[str]] = {name: set() for name in self._where}
        for entry in entries:
            for name, text in zip(self._where, entry.texts, strict=True):
                distinct[name].add(text or "[]")
        return {
            name: {item for text in texts for item in json.loads(text)}
            for name, texts in distinct.items()
        }


class _Shelf:
    """The record files of one path, and the index that holds most of them."""

    def __init__(self, path: Path, where: Where, *, whole: bool, use: _Use) -> None:
        self._index: Index | None = None
        self._where, self._whole = where, whole
        if not path.is_dir():
            if not path.exists():
                raise RecordError(f"{path}: no such file or folder of records")
            self._folder = path.parent
            self.entries = [self._read(path.name)]
            return
        self._folder = path
        names = record_names(path)
        rows: dict[str, int] = {}
        if len(names) >= MIN_FILES and use != "none":
            self._index, rows = _indexed(path, names, trusted=use == "found")
        texts = self._texts()
        try:
            self.entries = [
                self._read(name)
                if (row := rows.get(name)) is None
                else _Entry(name, self._keys[row], tuple(item[row] for item in texts), row)
                for name in names
            ]
        except BaseException:
            self.close()
            raise

    @property
    def _keys(self) -> list[str]:
        assert self._index is not None  # there are rows
        return self._index.keys

    def _texts(self) -> list[list[str | None]]:
        if self._index is None:
            return []
        try:
            with _reading_index():
                return [self._index.texts(name) for name in self._where]
        except BaseException:
            self.close()
            raise

    def _read(self, name: str) -> _Entry:
        record = read_record(self._folder / name)
        fields = encoded_fields(record) if self._where else {}
        texts = tuple(fields[name] for name in self._where)
        entry = _Entry(name, record.key, texts)
        if not _Filters(self._where).may_pass(entry):
            return entry
        kept = record if self._whole else record.model_copy(update=WITHOUT_DETAILS)
        return entry._replace(record=kept)

    def records(
        self, entries: Sequence[_Entry], repeated: set[str], *, whole: bool
    ) -> Iterator[RunRecord]:
        """Yield the records of entries; those of repeated keys whole, since all of it counts."""
        rows = [item.row for item in entries if item.row is not None and item.key not in repeated]
        stored: dict[int, RunRecord] = {}
        if self._index is not None and rows:
            parts = PARTS if whole else [part for part in PARTS if part not in WITHOUT_DETAILS]
            with _reading_index():
                stored = dict(self._index.records(sorted(rows), parts))
        for entry in entries:
            if entry.key in repeated:
                yield read_record(self._folder / entry.name)
            elif entry.row is not None:
                yield stored.pop(entry.row)
            else:
                yield entry.record or read_record(self._folder / entry.name)

    def close(self) -> None:
        if self._index is not None:
            self._index.close()


def _indexed(
    folder: Path, names: Sequence[str], *, trusted: bool
) -> tuple[Index | None, dict[str, int]]:
    """Return a folder's index, renewed if that is worth it, and the rows that are as their file."""
    stamps = {
        name: stamp
        for name in names
        if name.isprintable() and (stamp := _stamp(os.path.join(folder, name))) is not None
    }
    index = _open(folder) if trusted else None
    rows = _current(index, stamps)
    before = time.time_ns() - SETTLED_NS
    changed = [name for name in stamps if name not in rows and max(stamps[name][1:]) < before]
    gone = 0 if index is None else len(index.names) - len(rows)
    if _WORTHWHILE * (len(changed) + gone) >= len(names):
        renewed = _renew(folder, index, sorted(rows.values()), {n: stamps[n] for n in changed})
        if index is not None:
            index.close()
        index = _open(folder) if renewed or index is not None else None
        rows = _current(index, stamps)
    return index, rows


def _renew(
    folder: Path, index: Index | None, rows: Sequence[int], changed: Mapping[str, Stamp]
) -> bool:
    """Write an index of the rows that are still right and of changed files; tell whether it was."""
    import pyarrow as pa

    try:
        with new_index(folder) as (writer, now):
            if index is not None:
                with _reading_index():
                    for table in index.tables(rows):
                        writer.copy(table)
            for name, stamp in changed.items():
                if max(stamp.mtime_ns, stamp.ctime_ns) >= now - SETTLED_NS:
                    continue
                try:
                    record = read_record(folder / name)
                except RecordError:
                    break  # whoever reads the files one by one says which is damaged
                writer.add(make_row(name, stamp, record))
    except (OSError, ValueError, pa.ArrowException):  # no room, no right to write, or no column
        return False
    return True


def _open(folder: Path) -> Index | None:
    try:
        with _reading_index():
            return Index(folder)
    except _DamagedIndexError:
        return None


def _current(index: Index | None, stamps: Mapping[str, Stamp]) -> dict[str, int]:
    """Return the rows of files that did not change since."""
    if index is None:
        return {}
    return {
        name: row
        for row, (name, stamp) in enumerate(zip(index.names, index.stamps, strict=True))
        if stamps.get(name) == stamp
    }


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@contextmanager
def _reading_index() -> Iterator[None]:
    """Take whatever an index cannot be read for as damage."""
    import pyarrow as pa

    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        raise _DamagedIndexError from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from walking over many live objects again and again while more are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
