"""Best values and intervals of changes inside tables, from the samples beside the records."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest

from oasis_eval.record import read_records
from oasis_eval.report.compare import compare
from oasis_eval.report.grid import Cell, Table
from oasis_eval.report.render import render
from oasis_eval.report.tables import build_table
from oasis_eval.spec import TableSpec
from tests.report.comparisons import answers, question_record, store, text_record, windows
from tests.report.samples import record

BEST = TableSpec(metrics=("token_perplexity", "pass@1"), best="significant")
INTERVALS = TableSpec(
    metrics=("token_perplexity",), baseline="fp32", change="columns", change_interval=True
)


def table(folder: Path, spec: TableSpec) -> Table:
    return build_table(list(read_records([folder])), spec, folders=[folder])


def best(found: Table, column: int = 0) -> list[str]:
    rows = zip(found.rows, found.cells, strict=True)
    return [line.place[0] for line, cells in rows if cells[column].best]


def models(folder: Path, shifts: dict[str, float]) -> Path:
    """Models whose losses lie `shift` above one another, on the same windows."""
    for seed, (name, shift) in enumerate(shifts.items()):
        rows = windows(3.0, seed=seed, shift=shift)
        store(folder, text_record(rows, name, "fp32"), rows)
    return folder


def test_one_that_is_significantly_best(tmp_path: Path) -> None:
    """Alone in bold."""
    found = table(models(tmp_path, {"a": 0.05, "b": 0.0, "c": 0.1}), BEST)

    assert best(found) == ["b"]
    assert any(note.startswith("Bold (*") for note in found.notes)


def test_ties_share_the_bold(tmp_path: Path) -> None:
    """What no test tells apart from the best is best too, however the digits fall."""
    found = table(models(tmp_path, {"a": 0.0, "b": 0.0002, "c": 0.1}), BEST)

    assert best(found) == ["a", "b"]


def test_more_right_answers_are_better(tmp_path: Path) -> None:
    """The direction is the metric's."""
    few, many = answers(0.1, seed=1, num=200), answers(0.9, seed=2, num=200)
    store(tmp_path, question_record(few, "few", "fp32"), few)
    store(tmp_path, question_record(many, "many", "fp32"), many)

    assert best(table(tmp_path, BEST)) == ["many"]


def test_a_broken_model_is_never_best(tmp_path: Path) -> None:
    """NaN and infinity lose without a test; a failed run does not compete."""
    models(tmp_path, {"a": 0.0})
    rows = windows(3.0, seed=4)
    for name, loss in (("nan", math.nan), ("inf", math.inf)):
        broken = [{**row, "nll_nats": loss} for row in rows]
        store(tmp_path, text_record(broken, name, "fp32"), broken)
    store(tmp_path, record("crashed", status="failed", reason="out of memory"), [])

    assert best(table(tmp_path, BEST)) == ["a"]


@pytest.mark.parametrize("cause", ["samples", "windows", "seeds"])
def test_what_cannot_be_paired_has_no_best(tmp_path: Path, cause: str) -> None:
    """No claim without a test, and the note says why."""
    models(tmp_path, {"a": 0.05, "b": 0.0})
    rows = windows(3.0, seed=5)
    if cause == "seeds":
        store(tmp_path, text_record(rows, "b", "fp32", seed=1), rows)
    else:
        other = rows if cause == "samples" else rows[:-1]
        store(tmp_path, text_record(other, "c", "fp32"), [] if cause == "samples" else other)

    found = table(tmp_path, BEST)

    assert best(found) == []
    assert any(note.startswith("No best is marked") for note in found.notes)


def test_alone_in_its_column_is_not_best(tmp_path: Path) -> None:
    """There is nothing that it is better than."""
    assert best(table(models(tmp_path, {"a": 0.0}), BEST)) == []


def test_nothing_is_marked_unless_asked_for(tmp_path: Path) -> None:
    """The default of every table."""
    found = table(models(tmp_path, {"a": 0.05, "b": 0.0}), TableSpec(metrics=("token_perplexity",)))

    assert best(found) == []
    assert not any("Bold" in note for note in found.notes)


@pytest.mark.parametrize(
    ("format_name", "mark"),
    [
        ("terminal", "*19.4"),
        ("markdown", "| **19.4"),
        ("latex", r"& \textbf{\boldmath 19.4"),
        ("csv", ",best"),
    ],
)
def test_every_format_marks_the_best(tmp_path: Path, format_name: str, mark: str) -> None:
    """Bold, a star where there is no bold, and a column in CSV; the others are unmarked."""
    found = table(models(tmp_path, {"a": 0.05, "b": 0.0}), BEST)

    text = render(found, format=format_name)  # type: ignore[arg-type]

    assert mark in text
    (other,) = [line for line in text.splitlines() if "20.4" in line]
    for sign in ("*20", "**20", "textbf", "best"):
        assert sign not in other


def two_schemes(folder: Path) -> Path:
    for seed, (name, shift) in enumerate({"fp32": 0.0, "w8a8": 0.02}.items()):
        rows = windows(3.0, seed=seed, shift=shift)
        store(folder, text_record(rows, "tiny", name), rows)
    return folder


def changes(found: Table) -> list[Cell]:
    return [cell for row in found.cells for cell in row if cell.kind == "change"]


def test_intervals_of_changes_are_those_of_compare(tmp_path: Path) -> None:
    """A table and `compare` say the same of the same runs."""
    two_schemes(tmp_path)
    where = {"where_first": {"scheme": ("fp32",)}, "where_second": {"scheme": ("w8a8",)}}
    (expected,) = compare(tmp_path, tmp_path, **where).differences

    (cell,) = changes(table(tmp_path, INTERVALS))

    assert expected.change is not None
    assert (cell.low, cell.high) == (expected.change.low, expected.change.high)
    assert cell.value == pytest.approx(expected.change.percent)


def test_intervals_stand_behind_the_change(tmp_path: Path) -> None:
    """In the printed forms in parentheses, in CSV in columns of their own."""
    found = table(two_schemes(tmp_path), INTERVALS)
    (cell,) = changes(found)

    printed = f"+{cell.value:.2f} (+{cell.low:.2f} to +{cell.high:.2f})"
    assert printed in render(found, format="terminal")
    assert f"($+{cell.low:.2f}$ to $+{cell.high:.2f}$)" in render(found, format="latex")
    (line,) = csv.DictReader(io.StringIO(render(found, format="csv")))
    assert [float(line[name]) for name in line if name.endswith("/low")] == [cell.low]


def test_without_samples_a_change_has_no_interval(tmp_path: Path) -> None:
    """The change itself is still there."""
    for path in two_schemes(tmp_path).glob("*.samples.jsonl"):
        path.unlink()

    (cell,) = changes(table(tmp_path, INTERVALS))

    assert cell.value is not None
    assert (cell.low, cell.high) == (None, None)
