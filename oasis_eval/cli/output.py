"""What commands print: tables and lists on standard output, everything else on standard error."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oasis_eval.errors import OasisError

if TYPE_CHECKING:
    from oasis_eval.record import RunRecord


def print_table(records: list[RunRecord]) -> None:
    """Print the default table of records."""
    from oasis_eval.report.render import render
    from oasis_eval.report.tables import build_table, load_spec

    try:
        built = build_table(records, load_spec("results"))
        text = render(built, format="terminal", width=width_for(None))
    except OasisError as error:  # the records are on disk whatever the table makes of them
        text = f"no single table shows these records: {error}"
    write(text, None)


def width_for(out: Path | None) -> int | None:
    """Return the columns of the terminal that a table is printed on, None where there is none."""
    return shutil.get_terminal_size().columns if out is None and sys.stdout.isatty() else None


def write(text: str, out: Path | None) -> None:
    """Print `text`, or write it to a file."""
    from oasis_eval.record import write_text_atomically

    if out is None:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
    else:
        write_text_atomically(out, text)


def say_of_cells(messages: Iterable[tuple[RunRecord, str, str]]) -> None:
    """Print each message once, with the schemes that it concerns."""
    concerned: dict[tuple[str, str, str, str], list[str]] = {}
    for record, kind, text in messages:
        key = (kind, record.card.name, record.spec.task.name, text)
        schemes = concerned.setdefault(key, [])
        if record.spec.scheme.name not in schemes:
            schemes.append(record.spec.scheme.name)
    for (kind, model, task, text), schemes in concerned.items():
        # A message about the task's own text begins with its name.
        what = text.removeprefix(f"{task}: ")
        say(f"{kind}: {model} {', '.join(schemes)} on {task}: {what}")


def print_rows(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())  # noqa: T201 - the command's output


def say(text: str) -> None:
    """Print a message on standard error."""
    print(text, file=sys.stderr)  # noqa: T201 - errors and warnings
