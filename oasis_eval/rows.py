"""Files become rows: plain text, WikiText lines, jsonl and parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from oasis_eval.errors import DataError

Layout = Literal["wikitext", "plain", "documents", "sentences"]
Row = dict[str, str]

_HEADING = re.compile(r"^ = (?:[^=\n]|[^=\n].*[^=\n]) = \r?\n?$")
_NO_TEXT = frozenset({".yaml", ".yml", ".toml", ".csv", ".tsv", ".safetensors", ".gguf"})
"""Files that are text at best by mistake; another suffix, or none, may be one."""


def read_file(
    path: Path, columns: tuple[str, ...], layout: Layout, *, name: str
) -> tuple[Layout, list[Row]]:
    """Read a local file whole.

    Args:
        path: A `.jsonl` or `.parquet` file; where `columns` is `text` alone, any plain text, too.
        columns: What every row must have, as text.
        layout: What the data set's rows are that the file stands for.
        name: That data set, for messages.

    Returns:
        What the rows are, which the file itself decides between WikiText and other text, and the
        rows.

    Raises:
        DataError: The file is missing, no text, or lacks a column. One line.
    """
    if not path.is_file():
        raise DataError(f"{_at(name, path)} is no file; expected a text, jsonl or parquet file")
    suffix = path.suffix.lower()
    if suffix in _NO_TEXT:
        raise DataError(
            f"{_at(name, path)} is no text to read; expected .txt, .raw, .md or another plain "
            "text, .jsonl or .parquet"
        )
    try:
        if suffix in (".jsonl", ".json"):
            rows = list(_json_rows(name, path, columns))
        elif suffix == ".parquet":
            rows = list(_parquet_rows(name, path, columns))
        elif columns == ("text",):
            return _text_rows(path)
        else:
            raise DataError(f"{_at(name, path)} must be jsonl or parquet with {_names(columns)}")
    except UnicodeDecodeError as error:
        raise DataError(f"{_at(name, path)} is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise DataError(f"{_at(name, path)} cannot be read ({error.strerror})") from error
    if layout != "wikitext":
        return layout, rows
    if any(is_heading(row["text"]) for row in rows):
        return "wikitext", as_published(rows)
    return "documents", rows  # rows that are no WikiText lines are documents of their own


def row_of(where: str, value: object, columns: tuple[str, ...]) -> Row:
    """Return the columns of one row.

    Raises:
        DataError: One is missing or no text; `where` says in which row.
    """
    if not isinstance(value, dict) or any(not isinstance(value.get(key), str) for key in columns):
        found = (
            {key: type(item).__name__ for key, item in sorted(value.items())}
            if isinstance(value, dict)
            else type(value).__name__
        )
        raise DataError(f"{where} must have text columns {_names(columns)}; found {found}")
    return {key: value[key] for key in columns}


def as_published(rows: list[Row]) -> list[Row]:
    """WikiText rows of any origin: an empty line is an empty string, any other ends in a newline.

    Files with other line ends than the published ones are the same text.
    """
    return [{**row, "text": row["text"] if row["text"].strip() else ""} for row in rows]


def is_heading(line: str) -> bool:
    """Tell whether a line of WikiText begins an article: a heading of level one."""
    return _HEADING.match(line) is not None


def _at(name: str, path: Path, where: str = "") -> str:
    """Return what messages call a place in a file: the text's name, if that is not the file's."""
    return f"{path}{where}" if name == path.name else f"{name}: {path}{where}"


def _text_rows(path: Path) -> tuple[Layout, list[Row]]:
    """Read a text file: WikiText layout if it has level-one headings, else one document."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        text = file.read()
    lines = text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    if not any(is_heading(line) for line in lines):
        return "plain", [{"text": text}]
    rows = [{"text": line.removesuffix("\r") + "\n"} for line in lines]
    return "wikitext", as_published(rows)


def _json_rows(name: str, path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{_at(name, path, f':{number}')} is not JSON") from error
            yield row_of(_at(name, path, f":{number}"), value, columns)


def _parquet_rows(name: str, path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.strerror is not None:
            raise  # the file, not what is in it
        raise DataError(f"{_at(name, path)} is not a parquet file") from error
    for number, value in enumerate(table.to_pylist()):
        yield row_of(_at(name, path, f" row {number}"), value, columns)


def _names(columns: tuple[str, ...]) -> str:
    return " and ".join(repr(column) for column in columns)
