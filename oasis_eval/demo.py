"""The main job on the mini family: trained variants side by side, for a first look."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from oasis_eval import pipeline
from oasis_eval.paths import data_folder
from oasis_eval.record import RunRecord, write_text_atomically
from oasis_eval.report.render import render
from oasis_eval.report.tables import build_table, load_spec
from oasis_eval.spec import EvaluationSpec

SCHEMES = ("fp32", "w8a8", "w8a8-static", "w4a4", "w4a4-static")
TASKS = ("mini_ppl", "mini_gsm")
NUM_ITEMS = 30
"""Windows of prose, and questions."""
BASELINE = "mini-vanilla"
MODELS = (
    BASELINE,
    "mini-outeffhop",
    "mini-oasis",
    "mini-vanilla-repo",
    "mini-aos-repo",
    "mini-oasis-repo",
)
"""The paper's ladder, wired with blocks and as the authors' code does; `oasis-eval models` has the
rest of the family."""
TABLES = ("outliers", "mini")
FIGURES = ("perplexity", "outliers", "depth-routing")


def run(out: Path, *, models: tuple[str, ...] = MODELS) -> pipeline.Report:
    """Measure the models in five schemes with diagnostics; write records, tables and figures.

    Args:
        out: Folder of records, tables and figures.
        models: Names of cards, the first of `MODELS` among them.
    """
    _say(
        f"{len(models)} small models trained alike, {len(SCHEMES)} schemes: the first {NUM_ITEMS} "
        f"windows of generated prose and {NUM_ITEMS} word problems, with diagnostics."
    )
    spec = EvaluationSpec(
        models=models,
        schemes=SCHEMES,
        tasks=TASKS,
        limit=NUM_ITEMS,
        batch_size=NUM_ITEMS,
        diagnostics=True,
    )
    report = pipeline.evaluate(spec, out / "records")
    tables = [path for name in TABLES for path in _write_table(name, report.records, out)]
    figures = _draw(out)
    _say(
        f"\nTables:  {', '.join(str(path) for path in tables)}\n"
        f"Figures: {len(figures)} files in {out / 'figures'}\n"
        f"Records: {out / 'records'}   One page of it: oasis-eval report {out / 'records'}\n"
        f"How the models were trained and what a whole run gives: "
        f"{data_folder('results') / 'reference'}\n"
        "Next, your own checkpoint:\n"
        "  oasis-eval evaluate ./my-model --scheme fp32,w8a8,w4a4 --task wikitext2 --limit 20"
    )
    return report


def _write_table(name: str, records: Sequence[RunRecord], out: Path) -> list[Path]:
    """Print a table and write it in three formats."""
    spec = load_spec(name).model_copy(update={"baseline": BASELINE})
    table = build_table(records, spec, folders=[out / "records"])
    print(render(table, format="terminal"))  # noqa: T201 - the command's output
    paths = []
    for suffix, kind in {"csv": "csv", "tex": "latex", "md": "markdown"}.items():
        paths.append(out / f"{name}.{suffix}")
        write_text_atomically(paths[-1], render(table, format=kind))  # type: ignore[arg-type]  # literals above
    return paths


def _draw(out: Path) -> list[Path]:
    from oasis_eval.report.figures.kinds import draw, read_sources
    from oasis_eval.report.figures.style import formats_named, save

    drawings, lacking = draw(read_sources([out / "records"]), FIGURES, where={})
    for line in lacking:
        _say(f"not drawn: {line}")
    formats = formats_named(("pdf", "png"))
    return [path for drawing in drawings for path in save(drawing, out / "figures", formats)]


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - the command's output
