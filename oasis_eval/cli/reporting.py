"""The command that makes a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oasis_eval.cli import options, output


def report(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORDS...", help="Folders or files of records.")
    ],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "Quantization report",
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=PATTERN",
            help="Keep records whose field matches, as `table --where`: scheme=w8a8*.",
        ),
    ] = None,
) -> None:
    """Write one HTML file about records: verdict, tables, figures, answers, how it was measured.

    It needs no other file and no network.

    Example: oasis-eval report results/runs --out report.html
    """
    from oasis_eval.report.html.page import build_report
    from oasis_eval.report.store import find_records

    filters = options.filters(where or [], "--where")
    text = build_report(
        find_records(records, where=filters, whole=True),
        folders=[path if path.is_dir() else path.parent for path in records],
        where=filters,
        title=title,
    )
    output.write(text, out)
    size = len(text.encode())
    output.say(f"{out}: {size / 1e6:.1f} MB" if size >= 1e6 else f"{out}: {size / 1e3:.0f} kB")
