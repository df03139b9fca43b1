"""The main job on a real small model and a short text, for a first look."""

from __future__ import annotations

import sys
from pathlib import Path

from oasis_eval import pipeline
from oasis_eval.paths import data_folder
from oasis_eval.record import write_text_atomically
from oasis_eval.report.render import render
from oasis_eval.report.tables import build_table, load_spec
from oasis_eval.spec import EvaluationSpec

MODEL = "smollm2-135m-instruct"


def run(out: Path) -> pipeline.Report:
    """Measure the model in fp32, W8A8 (dynamic and static ranges) and W4A4, and write its table.

    Args:
        out: Folder of records and tables.

    Raises:
        MissingExtraError: The package that carries the weights is not installed.
    """
    spec = EvaluationSpec(
        models=(MODEL,),
        schemes=("fp32", "w8a8", "w8a8-static-linear", "w4a4"),
        tasks=("text",),
        window=512,
        data={"text": str(data_folder("tasks") / "text" / "demo.txt")},
    )
    print(  # noqa: T201 - the command's output
        f"{MODEL} (its weights were 4-bit before) on a short story, four schemes.\n"
        "The first run converts the weights once, which takes about a minute.",
        file=sys.stderr,
    )
    report = pipeline.evaluate(spec, out / "records")
    settings = load_spec("schemes").model_copy(update={"baseline": "reference"})
    table = build_table(report.records, settings)
    files = {"table.csv": "csv", "table.tex": "latex", "table.md": "markdown"}
    for name, kind in files.items():
        write_text_atomically(out / name, render(table, format=kind))  # type: ignore[arg-type]  # literals above
    print(render(table, format="terminal"))  # noqa: T201 - the command's output
    print(  # noqa: T201 - the command's output
        f"\nRecords: {out / 'records'}   Tables: {', '.join(str(out / name) for name in files)}\n"
        "Next, your own checkpoint:\n"
        "  oasis-eval evaluate ./my-model --scheme fp32,w8a8,w4a4 --task wikitext2 --limit 20"
    )
    return report
