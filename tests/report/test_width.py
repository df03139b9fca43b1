"""A LaTeX table that does not fit a page says so, and its advice helps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from oasis_eval.parsing import parse
from oasis_eval.paths import data_folder
from oasis_eval.record import RunRecord, write_record
from oasis_eval.report.grid import Table
from oasis_eval.report.latex import page_notes, render_latex
from oasis_eval.report.tables import build_table, load_spec
from oasis_eval.spec import TableSpec
from tests.command_line import CommandLine
from tests.report.samples import record
from tests.report.tex import NEEDS_TEX, compiled

PPL = TableSpec(metrics=("token_perplexity",), uncertainty="none")
SCHEMES = [f"w{weights}a{inputs}" for weights in (8, 6, 5, 4) for inputs in (8, 7, 6, 5, 4)]


def _records(
    schemes: list[str], *, task: str = "wikitext2", label: str = "tiny"
) -> list[RunRecord]:
    return [
        record("tiny", name, task, label=label, metrics={"token_perplexity": 12.34})
        for name in schemes
    ]


def test_the_last_column_that_fits_is_the_last_that_is_quiet() -> None:
    """Counted by hand: letters of 3.8 points, two gaps of 3, one letter of room for a mark."""
    model = (4 + 1) * 3.8 + 6  # "tiny" and a mark
    column = (5 + 1) * 3.8 + 6  # "12.34" and a mark, under a header of four letters
    most = int((345.0 - model) // column)
    assert most == 11

    assert page_notes(build_table(_records(SCHEMES[:most]), PPL)) == []
    (note,) = page_notes(build_table(_records(SCHEMES[: most + 1]), PPL))
    percent = (model + (most + 1) * column) / 345.0 - 1.0
    assert f"about {percent:.0%} wider" in note


def test_a_long_header_over_few_columns_counts() -> None:
    """It widens them, as TeX does."""
    short, long = (
        page_notes(build_table(_records(["fp32"], task=task), PPL))
        for task in ("wikitext2", "w" * 90)
    )

    assert short == []
    assert "shorter labels" in long[0]
    assert "--where" not in long[0]


def test_long_labels_of_models_count() -> None:
    """Where there is one column nothing can be moved."""
    assert page_notes(build_table(_records(["fp32"], label="x" * 60), PPL)) == []
    (note,) = page_notes(build_table(_records(["fp32"], label="x" * 90), PPL))

    assert "'label' of a card" in note


def _tall(num_models: int, num_schemes: int) -> Table:
    return build_table(
        [
            record(f"m{number}", name, label=f"m{number}", metrics={"token_perplexity": 12.34})
            for number in range(num_models)
            for name in SCHEMES[:num_schemes]
        ],
        PPL,
    )


def test_a_table_that_is_too_tall_says_so() -> None:
    """One row more than a page holds; the advice keeps one model."""
    heights = {rows: page_notes(_tall(rows, 1)) for rows in (20, 60)}

    assert heights[20] == []
    (note,) = heights[60]
    assert "taller than a page" in note
    assert "keep fewer rows (--where model=m0)" in note


@NEEDS_TEX
@pytest.mark.parametrize(("models", "schemes"), [(60, 1), (60, 8), (80, 9), (60, 11), (90, 4)])
def test_tex_finds_it_as_tall(tmp_path: Path, models: int, schemes: int) -> None:
    """TeX says by how many points a float is too large for its page, 550 points of text."""
    table = _tall(models, schemes)
    said = compiled(tmp_path, [render_latex(table)])
    excess = re.search(r"Float too large for page by ([0-9.]+)pt", said)
    assert excess is not None, said[-2000:]

    (note,) = page_notes(table)
    percent = re.search(r"about (\d+)% taller", note)
    assert percent is not None, note
    assert 1.0 + int(percent[1]) / 100 == pytest.approx(1.0 + float(excess[1]) / 550.0, rel=0.03)


def test_the_advice_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option that the note names makes the note go away; other formats never have it."""
    for item in _records(["fp32", *SCHEMES[:13]]):
        write_record(tmp_path, item)
    call = CommandLine(monkeypatch, capsys)
    plain = call(["table", tmp_path, "--format", "latex"])

    assert plain.status == 0
    assert plain.err.startswith("note: table 'results' is about ")
    assert plain.err.count("\n") == 1
    assert r"\begin{tabular}{l" + "r" * 14 + "}" in plain.out
    advice = re.findall(r"\((--\w+ \S+)\)", plain.err)
    assert advice == ["--rows model,scheme", "--where scheme=fp32"]
    for options in advice:
        helped = call(["table", tmp_path, "--format", "latex", *shlex.split(options)])
        assert (helped.status, helped.err) == (0, ""), options
    assert call(["table", tmp_path, "--format", "markdown"]).err == ""
    written = call(["table", tmp_path, "--format", "latex", "--out", tmp_path / "t.tex"])
    assert written.err == plain.err
    assert (tmp_path / "t.tex").read_text() == plain.out


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (("model", "scheme"), ("task", "protocol", "metric")),
        (("scheme",), ("model", "task", "protocol", "metric")),
        (("model",), ("task", "protocol", "metric", "scheme")),
    ],
)
def test_every_dimension_stays(rows: tuple[str, ...], columns: tuple[str, ...]) -> None:
    """Rows are those asked for, in that order; whatever else there was is columns."""
    changed = parse(TableSpec, TableSpec(caption="c").with_rows(rows), origin="test")

    assert (changed.rows, changed.columns, changed.caption) == (rows, columns, "c")


@pytest.mark.parametrize("rows", ["model,colour", "model,task,protocol,metric,scheme", ","])
def test_wrong_rows_are_refused(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown dimension, no column left, nothing at all: one line that names the option."""
    result = CommandLine(monkeypatch, capsys)(["table", tmp_path, "--rows", rows])

    assert result.status == 2
    assert result.err.startswith("error: --rows ")
    assert result.err.count("\n") == 1


def test_rows_of_values_with_changes() -> None:
    """A table's baseline and changes come along."""
    settings = load_spec("schemes").model_copy(update={"baseline": "fp32"})
    table = build_table(
        _records(["fp32", "w4a4"]), parse(TableSpec, settings.with_rows(("scheme",)), origin="t")
    )

    assert [line.place for line in table.rows] == [("fp32",), ("w4a4",)]
    assert [line.kind for line in table.columns] == ["value", "change"]


def test_the_help_names_every_table_that_ships(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table nobody can name is no table."""
    text = CommandLine(monkeypatch, capsys)(["table", "--help"]).out
    words = set(re.findall(r"[\w-]+", text))

    assert {path.stem for path in (data_folder("results") / "tables").glob("*.yaml")} <= words
