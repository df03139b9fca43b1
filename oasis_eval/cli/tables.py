"""Commands that read records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oasis_eval.cli import options, output
from oasis_eval.errors import SpecError

PARQUET = "parquet"


def table(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORDS...", help="Folders or files of records.")
    ],
    spec: Annotated[
        str,
        typer.Option(
            help="Table by name (results, perplexity, gsm8k, schemes, outliers, diagnostics, mini) "
            "or YAML file."
        ),
    ] = "results",
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="terminal, csv, csv-long, latex, markdown, or parquet (long).")
    ] = "terminal",
    baseline: Annotated[
        str | None,
        typer.Option(help="Model or scheme that relative changes refer to; 'reference': fp32."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="What is down the side instead of the table's own: model,scheme. The rest is "
            "columns."
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=PATTERN",
            help="Keep records whose field (a column of csv-long) matches: scheme=w8a8*, "
            "limit=20. Repeatable; one field's patterns are alternatives.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write instead of the screen.")] = None,
) -> None:
    """Make a table of records: on screen, as CSV, LaTeX (booktabs) or Markdown.

    Example: oasis-eval table results/runs --baseline reference --format latex --out table.tex
    """
    from oasis_eval.parsing import parse
    from oasis_eval.report.latex import page_notes
    from oasis_eval.report.parquet import write_parquet
    from oasis_eval.report.render import FORMATS, render
    from oasis_eval.report.store import find_records
    from oasis_eval.report.tables import build_table, load_spec
    from oasis_eval.report.terminal import split_note
    from oasis_eval.spec import TableSpec

    if format not in (*FORMATS, PARQUET):
        raise SpecError(f"--format {format!r}: expected one of {', '.join((*FORMATS, PARQUET))}")
    if format == PARQUET and out is None:
        raise SpecError("--format parquet: a screen cannot show it; give --out FILE")
    settings = load_spec(spec)
    if rows is not None:
        changed = settings.with_rows(options.names(rows, "--rows"))
        settings = parse(TableSpec, changed, origin=f"--rows {rows}")
    if baseline is not None:
        settings = settings.model_copy(update={"baseline": baseline})
    if where:
        settings = settings.model_copy(
            update={"where": {**settings.where, **options.filters(where, "--where")}}
        )
    folders = [path if path.is_dir() else path.parent for path in records]
    found = find_records(records, where=settings.where)
    built = build_table(found, settings, folders=folders)
    if format == PARQUET and out is not None:
        write_parquet(built, out)
    else:
        output.write(render(built, format=format, width=output.width_for(out)), out)  # type: ignore[arg-type]  # checked above
    if format == "latex":
        for line in page_notes(built):
            output.say(f"note: {line}")
    if format == "terminal" and (note := split_note(built, output.width_for(out))) is not None:
        output.say(f"note: {note}")
    failed = {item.key for item in built.observations if item.status == "failed"}
    if failed:
        what = f"{len(failed)} failed runs are" if len(failed) > 1 else "a failed run is"
        output.say(f"note: {what} in this table; without: --where status=ok")


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder or file of records.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="What is compared with A.")],
    where_a: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=PATTERN", help="Records of A, as `table --where`: scheme=fp32."
        ),
    ] = None,
    where_b: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=PATTERN", help="Records of B: scheme=w8a8.")
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="terminal, markdown, csv or latex.")
    ] = "terminal",
    out: Annotated[Path | None, typer.Option(help="File to write instead of the screen.")] = None,
) -> None:
    """Test whether B differs from A, window by window and answer by answer.

    Example: oasis-eval compare results/runs results/runs --where-a scheme=fp32
    --where-b scheme=w8a8
    """
    from oasis_eval.report.compare import compare as compare_records
    from oasis_eval.report.comparison_table import COMPARISON_FORMATS, render_comparison

    if format not in COMPARISON_FORMATS:
        raise SpecError(f"--format {format!r}: expected one of {', '.join(COMPARISON_FORMATS)}")
    found = compare_records(
        first,
        second,
        where_first=options.filters(where_a or [], "--where-a"),
        where_second=options.filters(where_b or [], "--where-b"),
    )
    text = render_comparison(found, format=format, width=output.width_for(out))  # type: ignore[arg-type]  # checked above
    output.write(text, out)


def import_(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="lm-eval's --output_path, or files in it."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of records.")] = options.RECORDS,
) -> None:
    """Make records of lm-eval's result files, so that tables show its numbers beside ours.

    Example: oasis-eval import lm-eval-out --out results/runs
    """
    from oasis_eval.harness.results import import_results

    for path in results:
        for record, place, is_new in import_results(path, out):
            numbers = f"{len(record.metrics)} numbers" if is_new else "there already"
            what = f"{record.card.label}, {record.spec.scheme.name}, {record.spec.task.name}"
            print(f"{what}: {numbers}, {place}")  # noqa: T201 - the command's output
    print(f"\nTable: oasis-eval table {out}")  # noqa: T201 - the command's output
