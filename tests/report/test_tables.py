"""What a table shows: places, order, seeds, marks, relative changes, notes."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from oasis_eval.errors import RecordError, SpecError, UnknownNameError
from oasis_eval.parsing import parse
from oasis_eval.record import RunRecord
from oasis_eval.report.footnotes import warning_note
from oasis_eval.report.grid import Cell, Table
from oasis_eval.report.render import FORMATS, render
from oasis_eval.report.tables import build_table, load_spec
from oasis_eval.spec import TableSpec
from tests.report.samples import gallery, loss, record

PPL = TableSpec(metrics=("token_perplexity",))
BY_REFERENCE = {"baseline": "reference", "change": "columns"}


def cell(table: Table, row: int, column: int) -> Cell:
    return table.cells[row][column]


def ppl(model: str, scheme: str, value: float, **other: object) -> RunRecord:
    return record(model, scheme, metrics={"token_perplexity": value}, **other)  # type: ignore[arg-type]


def test_schemes_come_by_bits_and_models_in_natural_order() -> None:
    """Reference dtypes first, then fewer and fewer bits; 7b before 13b."""
    schemes = ["w4a4", "w4a8", "w8a8", "bf16", "w6a6", "fp32", "fp16"]
    records = [ppl(model, name, 5.0) for model in ("m-13b", "m-7b") for name in schemes]
    table = build_table(records, PPL)

    assert [line.place[-1] for line in table.columns] == [
        "fp32",
        "bf16",
        "fp16",
        "w8a8",
        "w6a6",
        "w4a8",
        "w4a4",
    ]
    assert [line.place for line in table.rows] == [("m-7b",), ("m-13b",)]


def test_given_order_comes_first() -> None:
    """The specification can put any value in front."""
    records = [ppl("a", name, 5.0) for name in ("fp32", "w8a8", "w4a4")]
    table = build_table(records, PPL.model_copy(update={"order": {"scheme": ("w4a4",)}}))

    assert [line.place[-1] for line in table.columns] == ["w4a4", "fp32", "w8a8"]


def test_seeds_give_mean_and_standard_deviation() -> None:
    """Seeds of one cell are averaged; the spread divides by n - 1."""
    values = [5.0, 6.0, 8.5]
    records = [ppl("a", "fp32", value, seed=seed) for seed, value in enumerate(values)]
    actual = cell(build_table(records, PPL), 0, 0)

    assert statistics.fmean(values) == actual.value
    assert statistics.stdev(values) == actual.spread
    assert actual.num_seeds == 3


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (("mini, oasis, seed 1", "mini, oasis, seed 2"), "mini, oasis"),
        (("mini, oasis, seed 1, 9 steps", "mini, oasis, seed 2, 9 steps"), "mini, oasis, 9 steps"),
        (("OASIS", "OASIS"), "OASIS"),
        (("first", "second"), "a"),
    ],
)
def test_seeds_are_called_by_what_they_have_in_common(labels: tuple[str, str], shown: str) -> None:
    """A row of two seeds that says one of them would be wrong about the other."""
    records = [ppl("a", "fp32", 5.0, seed=seed, label=label) for seed, label in enumerate(labels)]
    table = build_table(records, PPL)

    assert [line.labels[0].text for line in table.rows] == [shown]


def test_changes_are_over_the_seeds_that_both_have() -> None:
    """By hand; a mean over other seeds would be a change that no seed shows."""
    records = [ppl("a", "fp32", value, seed=seed) for seed, value in enumerate((4.0, 5.0, 9.0))]
    records += [ppl("a", "w4a4", value, seed=seed) for seed, value in enumerate((5.0, 6.0))]
    table = build_table(
        records, parse(TableSpec, PPL.with_rows(("scheme",)) | BY_REFERENCE, origin="t")
    )

    values = [line[0].value for line in table.cells]
    assert values == pytest.approx([6.0, 5.5])
    change = table.cells[1][1]
    assert change.kind == "change"
    assert change.value == pytest.approx((5.5 / 4.5 - 1.0) * 100.0)
    assert "Changes between means of other seeds are over the seeds that both have." in table.notes


def test_one_checkpoint_is_no_second_seed() -> None:
    """A deviation of zero over it would pass for certainty."""
    records = [ppl("a", "fp32", 5.0, seed=0)]
    again = records[0].spec.model_copy(update={"seed": 3})
    records.append(records[0].model_copy(update={"spec": again, "key": "f" * 64}))

    with pytest.raises(RecordError, match=r"'a': seeds 0 and 3 are one checkpoint .* seed=0"):
        build_table(records, PPL)


def test_seeds_as_rows_are_not_averaged() -> None:
    """With the seed as a dimension each seed is a row."""
    records = [ppl("a", "fp32", 5.0 + seed, seed=seed) for seed in (10, 9)]
    table = build_table(records, PPL.model_copy(update={"rows": ("model", "seed")}))

    assert [line.place for line in table.rows] == [("a", "9"), ("a", "10")]
    assert [row[0].value for row in table.cells] == [15.0 - 1.0, 15.0]


@pytest.mark.parametrize(("bad", "note"), [(math.inf, "1 of 2 seeds infinite"), (math.nan, "NaN")])
def test_mean_over_a_broken_seed_is_broken_and_noted(bad: float, note: str) -> None:
    """An infinite or NaN seed is not averaged away."""
    records = [ppl("a", "fp32", value, seed=seed) for seed, value in enumerate([5.0, bad])]
    table = build_table(records, PPL)
    actual = cell(table, 0, 0)

    assert repr(bad) == repr(actual.value)
    assert any(note in item.text for item in table.footnotes)


def test_failed_seed_is_left_out_and_noted() -> None:
    """The mean is over the finished seeds; the failed one is named with its reason."""
    records = [ppl("a", "fp32", 5.0, seed=0), ppl("a", "fp32", 7.0, seed=1)]
    records.append(record("a", "fp32", status="failed", reason="out of memory", seed=2))
    table = build_table(records, PPL)

    assert cell(table, 0, 0).value == 6.0
    assert any("Seed 2 left out. Failed: out of memory" in item.text for item in table.footnotes)


def test_finished_attempt_replaces_a_failed_one() -> None:
    """A run that failed and was repeated with another batch size is a number."""
    records = [
        record("a", "fp32", status="failed", reason="out of memory", batch_size=8),
        ppl("a", "fp32", 5.0, batch_size=1),
    ]
    table = build_table(records, PPL)

    assert cell(table, 0, 0).status == "ok"


@pytest.mark.parametrize("format_name", ["terminal", "csv", "latex", "markdown"])
def test_marks_are_the_same_in_every_format(format_name: str) -> None:
    """Failed, unsupported, missing, NaN and infinite cells have one mark each everywhere."""
    records = [
        ppl("nan", "fp32", math.nan),
        ppl("inf", "fp32", math.inf),
        record("fail", "fp32", status="failed", reason="x"),
        record("not", "fp32", status="unsupported", reason="y"),
        ppl("miss", "w8a8", 5.0),
    ]
    text = render(build_table(records, PPL), format=format_name)  # type: ignore[arg-type]

    for mark in ("NaN", "inf", "failed", "n/a", "–"):
        assert mark in text


def test_failed_run_stands_in_the_columns_of_its_task() -> None:
    """A run without numbers is shown even where no run of its task has finished."""
    records = [
        ppl("a", "fp32", 5.0),
        record("a", "fp32", "gsm8k", status="failed", reason="x"),
        record("a", "fp32", "wikitext2", protocol_name="rolling-word", status="failed", reason="x"),
    ]
    table = build_table(records, load_spec("results"))

    assert [line.place for line in table.columns] == [
        ("wikitext2", "token_perplexity", "fp32"),
        ("wikitext2", "word_perplexity", "fp32"),
        ("gsm8k", "pass@1", "fp32"),
    ]
    assert [item.status for item in table.cells[0]] == ["ok", "failed", "failed"]


def test_only_failures_make_a_table_of_failures() -> None:
    """A sweep in which everything failed still has a table that says why."""
    table = build_table([record(status="failed", reason="no weights")], load_spec("results"))

    assert cell(table, 0, 0).status == "failed"
    assert "no weights" in render(table, format="terminal")


def test_change_against_a_scheme() -> None:
    """Changes are percent of the reference scheme's value, row by row."""
    records = [ppl("a", "fp32", 10.0), ppl("a", "w8a8", 10.5), ppl("a", "w4a4", 400.0)]
    table = build_table(records, PPL.model_copy(update={"baseline": "reference"}))

    assert [line.kind for line in table.rows] == ["value", "change"]
    assert [item.value for item in table.cells[1]] == [None, 5.0, 3900.0]
    assert cell(table, 1, 0).status == "reference"


def test_change_against_a_model_by_its_label() -> None:
    """The baseline row comes first and has no change; the others have one under them."""
    records = [ppl("z", "w8a8", 10.0, label="Vanilla"), ppl("a", "w8a8", 2.645)]
    table = build_table(records, PPL.model_copy(update={"baseline": "Vanilla"}))

    assert [(line.place[0], line.kind) for line in table.rows] == [
        ("z", "value"),
        ("a", "value"),
        ("a", "change"),
    ]
    assert cell(table, 2, 0).value == pytest.approx(-73.55)
    assert "-73.55" in render(table, format="terminal")


def test_change_as_columns() -> None:
    """Changes can stand beside their values."""
    records = [ppl("a", "fp32", 10.0), ppl("a", "w4a4", 20.0)]
    table = build_table(records, load_spec("schemes"))

    assert [
        (line.place[1], row[0].value, row[1].status)
        for line, row in zip(table.rows, table.cells, strict=True)
    ] == [("fp32", 10.0, "reference"), ("w4a4", 20.0, "ok")]
    assert cell(table, 1, 1).value == 100.0


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_no_change_against_an_unusable_baseline(value: float) -> None:
    """Zero, infinity and NaN are nothing to be relative to."""
    records = [ppl("a", "fp32", value), ppl("a", "w8a8", 10.0)]
    table = build_table(records, PPL.model_copy(update={"baseline": "fp32"}))

    assert cell(table, 1, 1).status == "undefined"


def test_no_change_against_the_floor() -> None:
    """A Pass@1 that cannot be told from 0 gives no percentages."""
    records = [
        record("a", name, "gsm8k", metrics={"pass@1": (value, 0.01)}, count=100)
        for name, value in (("fp32", 0.01), ("w8a8", 0.3))
    ]
    table = build_table(records, TableSpec(metrics=("pass@1",), baseline="fp32"))

    assert cell(table, 0, 0).floor
    assert cell(table, 1, 1).status == "undefined"
    assert "1.0 floor" in render(table, format="markdown")


def test_standard_error_is_printed_when_asked_for() -> None:
    """`uncertainty: all` adds the standard error of single runs, and a note says so."""
    records = [record("a", "fp32", "gsm8k", metrics={"pass@1": (0.5, 0.05)}, count=100)]
    spec = TableSpec(metrics=("pass@1",))
    without = render(build_table(records, spec), format="terminal")
    shown = render(
        build_table(records, spec.model_copy(update={"uncertainty": "all"})), format="terminal"
    )

    assert "±" not in without
    assert "50.0 ± 5.0" in shown
    assert "standard error" in shown


def test_protocol_level_appears_only_where_needed() -> None:
    """Two windows of one task need the protocol in the header, one does not."""
    one = [ppl("a", "fp32", 5.0)]
    two = [*one, ppl("a", "fp32", 6.0, protocol_name="gptq-2048")]

    assert build_table(one, PPL).column_dimensions == ("task", "metric", "scheme")
    assert [build_table(two, PPL).columns[0].place] == [
        ("wikitext2", "gptq-1024", "token_perplexity", "fp32")
    ]


def test_first_metric_of_a_protocol() -> None:
    """`show: first` takes the word perplexity of word protocols, the token one of others."""
    records = [
        record(metrics={"token_perplexity": 5.0}),
        record(
            metrics={"token_perplexity": 6.0, "word_perplexity": 9.0}, protocol_name="rolling-word"
        ),
    ]
    table = build_table(records, load_spec("results"))

    assert [item.value for item in table.cells[0]] == [5.0, 9.0]


def test_equal_labels_are_told_apart() -> None:
    """Two models with one label get their names beside it."""
    table = build_table([ppl("a", "fp32", 5.0, label="X"), ppl("b", "fp32", 6.0, label="X")], PPL)

    assert [line.labels[0].text for line in table.rows] == ["X (a)", "X (b)"]


def test_notes_hold_no_path() -> None:
    """Of local data only the file name is printed."""
    for format_name in set(FORMATS) - {"csv"}:
        text = render(build_table(gallery(), load_spec("results")), format=format_name)  # type: ignore[arg-type]

        assert "wikitext2.raw" in text
        assert "/home" not in text


def test_reasons_hold_no_path() -> None:
    """A failure names the file, not the folders above it; a hub id stays whole."""
    reason = "file '/home/me/runs/model.safetensors' is cut off; load owner/name@1 instead"
    table = build_table([record(status="failed", reason=reason)], PPL)

    expected = "Failed: file 'model.safetensors' is cut off; load owner/name@1 instead."
    assert expected in {note.text for note in table.footnotes}


def test_each_footnote_once_and_each_letter_used() -> None:
    """No note is repeated and none is without a reference."""
    table = build_table(gallery(), load_spec("results"))
    used = {
        mark
        for line in (*table.rows, *table.columns)
        for label in line.labels
        for mark in label.marks
    }
    used |= {mark for row in table.cells for item in row for mark in item.marks}

    assert len({note.text for note in table.footnotes}) == len(table.footnotes)
    assert {note.mark for note in table.footnotes} == used


def test_infinite_perplexity_has_its_loss_beside_it() -> None:
    """The mean loss still tells two collapsed models apart."""
    table = build_table([record(metrics=loss(812.3))], PPL)

    assert cell(table, 0, 0).value == math.inf
    assert any("812.3 nats per token" in note.text for note in table.footnotes)


def test_cut_and_unread_completions_are_noted() -> None:
    """Each Pass@1 says how many completions were cut or held no answer, if any."""
    records = [
        record(
            task="gsm8k",
            metrics={"pass@1": (0.5, 0.05), "answer_nll_per_token": 1.25},
            count=100,
            details={"num_cut": 7, "num_unread": 3},
        )
    ]
    table = build_table(records, load_spec("gsm8k"))

    assert any("7 of 100 completions cut" in note.text for note in table.footnotes)


def test_csv_reads_back_to_the_same_numbers() -> None:
    """Every value of the wide and of the long CSV is the record's, bit for bit."""
    table = build_table(gallery(), load_spec("results"))
    rows = list(csv.reader(io.StringIO(render(table, format="csv"))))
    read = {
        name: [float(row[index]) for row in rows[1:] if row[index] not in ("failed", "n/a", "–")]
        for index, name in enumerate(rows[0])
        if "/" in name and not name.endswith(("/std", "/stderr", "/seeds"))
    }
    for index, line in enumerate(table.columns):
        expected = [row[index].value for row in table.cells if row[index].value is not None]

        assert repr(expected) == repr(read["/".join(line.place)])
    long = pd.read_csv(io.StringIO(render(table, format="csv-long")))
    ok = table.long[table.long["status"] == "ok"]

    pd.testing.assert_series_equal(
        ok["value"].reset_index(drop=True),
        long[long["status"] == "ok"]["value"].reset_index(drop=True),
        check_exact=True,
    )


def test_wide_frame_holds_the_grid() -> None:
    """The frame for further computing has the numbers under their dimensions."""
    frame = build_table(gallery(), load_spec("results")).wide

    assert frame.index.names == ["model", "quantity"]
    value = frame.loc[("gemma3-270m", "value"), ("wikitext2", "token_perplexity", "fp32", "value")]
    assert value == pytest.approx(math.exp(2.7))


def test_terminal_splits_a_wide_table_and_cuts_nothing() -> None:
    """Columns that do not fit continue below; every value is printed."""
    table = build_table(gallery(), load_spec("results"))
    whole = render(table, format="terminal")
    split = render(table, format="terminal", width=80)
    grid = split.split("\n[a]")[0]

    assert max(map(len, grid.splitlines())) <= 80
    assert all(text in split for text in ("20.29 ± 0.20", "0.2 ± 0.2 floor", "1.632e4"))
    assert "…" not in whole + split


@pytest.mark.parametrize("width", [40, 80, 100])
def test_terminal_keeps_a_change_beside_its_value(width: int) -> None:
    """A split never begins with a column of changes."""
    table = build_table(gallery(), load_spec("schemes"))
    lines = render(table, format="terminal", width=width).splitlines()
    headers = [line for line in lines if line.startswith("Model")]

    assert all(re.search(r"Scheme +(Perplexity|Pass@1)", line) for line in headers)


def test_no_records_say_what_to_do() -> None:
    """An empty folder is one clear line."""
    with pytest.raises(RecordError, match="evaluate"):
        build_table([], PPL)


def test_unknown_metric_lists_those_there() -> None:
    """A misspelt metric names the ones in the records."""
    with pytest.raises(SpecError, match=r"perplexiti .*token_perplexity"):
        build_table([ppl("a", "fp32", 5.0)], TableSpec(metrics=("perplexiti",)))


def test_metric_that_no_record_has_is_an_error_when_it_is_all() -> None:
    """A table of Pass@1 from perplexity records lists what there is."""
    with pytest.raises(SpecError, match=r"pass@1 is not in the records.*token_perplexity"):
        build_table([ppl("a", "fp32", 5.0)], TableSpec(metrics=("pass@1",)))


def test_unknown_baseline_lists_those_there() -> None:
    """A baseline in no row and no column names the possible ones."""
    with pytest.raises(SpecError, match=r"'bf16' is in no row or column.*fp32"):
        build_table([ppl("a", "fp32", 5.0)], PPL.model_copy(update={"baseline": "bf16"}))


def test_unknown_filter_field_lists_the_fields() -> None:
    """A wrong key of `where` names the right ones."""
    with pytest.raises(SpecError, match=r"unknown field 'modle'.*model"):
        build_table([ppl("a", "fp32", 5.0)], PPL.model_copy(update={"where": {"modle": ("a",)}}))


def test_filter_keeps_matching_records() -> None:
    """Patterns select by any field; what is not set is `none`."""
    records = [ppl("a", "fp32", 5.0), ppl("a", "fp32", 6.0, limit=8)]
    for pattern, value in (("none", 5.0), ("8", 6.0)):
        spec = PPL.model_copy(update={"where": {"limit": (pattern,)}})

        assert cell(build_table(records, spec), 0, 0).value == value


@pytest.mark.parametrize("name", ["results", "perplexity", "gsm8k", "schemes"])
def test_built_in_specs_load(name: str) -> None:
    """Every built-in table is valid and named after its file."""
    assert load_spec(name).name == name


def test_unknown_spec_name() -> None:
    """A wrong name suggests the right one."""
    with pytest.raises(UnknownNameError, match="results"):
        load_spec("result")


def test_spec_from_a_file(tmp_path: Path) -> None:
    """A YAML file is a table; its name is the file's unless it says another."""
    path = tmp_path / "mine.yaml"
    path.write_text("rows: [variant]\n")

    assert (load_spec(path).name, load_spec(str(path)).rows) == ("mine", ("variant",))
    path.write_text("rows: [variant]\ncolums: [task]\n")
    with pytest.raises(SpecError, match="unknown key 'colums'"):
        load_spec(path)


def test_report_imports_no_heavy_library() -> None:
    """Tables are made where no torch is installed."""
    code = (
        "import sys, oasis_eval.report.tables, oasis_eval.report.render;"
        "print([name for name in ('torch', 'transformers', 'lm_eval', 'ray', 'datasets', 'pandas')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_no_note_holds_a_path() -> None:
    """Warnings keep the last part of a path: a table may be published."""
    note = warning_note("/home/someone/models/x/model.safetensors: extra tensors ")

    assert note == "Warning: model.safetensors: extra tensors."
