"""What `table`, `compare` and `report` say beside their result."""

from __future__ import annotations

import csv
import json
import re
import statistics
from pathlib import Path

import pytest
import yaml

from oasis_eval.cli import output
from oasis_eval.record import write_record
from tests import tiny
from tests.command_line import CommandLine
from tests.report.comparisons import store, text_record, windows
from tests.report.samples import gallery, loss, record


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def test_failed_runs_can_be_left_out(tmp_path: Path, call: CommandLine) -> None:
    """The note names the filter, and the filter does what the note says."""
    write_record(tmp_path, record("m", "fp32", metrics=loss(2.0)))
    write_record(tmp_path, record("m", "w4a4", task="wiki40b", status="failed", reason="typo"))
    first = call(["table", tmp_path])
    (advice,) = re.findall(r"note: a failed run is in this table; without: (.*)", first.err)
    second = call(["table", tmp_path, *advice.split()])

    assert "wiki40b" in first.out
    assert (second.status, second.err) == (0, "")
    assert "wiki40b" not in second.out


@pytest.mark.parametrize("known", [True, False], ids=["card", "option"])
def test_folders_of_one_name_are_seeds_of_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: CommandLine, known: bool
) -> None:
    """As the page on tables says: one row, mean and deviation by hand, the seed from the card."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(tiny.prose(300))
    options = ["--scheme", "fp32", "--task", "text", "--data", "text=notes.txt", "--window", 64]
    values = []
    for seed in (1, 2):
        tiny.save(tmp_path / f"s{seed}" / "oasis", model=tiny.build_model(seed=seed))
        card = {
            "name": "oasis",
            "family": "llama",
            "label": f"mini, oasis, seed {seed}",
            "source": {"kind": "dir", "path": "oasis"},
            "seed": seed if known else None,
        }
        (tmp_path / f"s{seed}" / "oasis.yaml").write_text(yaml.safe_dump(card))
        words = ["evaluate", f"s{seed}/oasis", *options, "--out", "seeds"]
        words += [] if known else ["--seed", seed]
        result = call([*words, "--json", "--quiet"])
        metrics = json.loads(result.out)["metrics"]
        values += [item["value"] for item in metrics if item["name"] == "token_perplexity"]
    (row,) = csv.DictReader(call(["table", "seeds", "--format", "csv"]).out.splitlines())

    assert row["label"] == "mini, oasis"
    (mean,) = (float(text) for name, text in row.items() if name.endswith("token_perplexity/fp32"))
    assert mean == pytest.approx(statistics.mean(values), rel=1e-12)
    (deviation,) = (float(text) for name, text in row.items() if name.endswith("/std"))
    assert deviation == pytest.approx(statistics.stdev(values), rel=1e-12)


@pytest.mark.parametrize("number", [2, 5, 6])
def test_few_windows_are_said(tmp_path: Path, call: CommandLine, number: int) -> None:
    """An interval from a handful of windows says that it is one."""
    for seed, scheme in enumerate(("fp32", "w8a8")):
        rows = windows(3.0, seed=seed, num=number)
        store(tmp_path, text_record(rows, "m", scheme), rows)
    found = call(["compare", tmp_path, tmp_path, "--where-a", "scheme=fp32"])
    text = " ".join(found.out.split())

    assert found.status == 0
    assert (f"Only {number} windows: interval and p are rough guesses" in text) == (number < 6)
    assert "widened by Student's t" in text
    assert "Detectable: the smallest true difference" in text


def test_a_table_wider_than_the_terminal_says_what_to_do(
    tmp_path: Path, call: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table in parts names the option that makes it narrow, and the option does."""
    for scheme in ("fp32", "w8a8", "w6a6", "w5a5", "w4a4", "w3a3"):
        write_record(tmp_path, record("m", scheme, metrics=loss(2.0)))
    monkeypatch.setattr(output, "width_for", lambda out: 50)
    first = call(["table", tmp_path])
    (advice,) = re.findall(r"it stands in \d parts; make columns rows \((--rows \S+)\)", first.err)
    second = call(["table", tmp_path, *advice.split()])

    assert (second.status, second.err) == (0, "")
    assert max(map(len, second.out.split("Perplexity")[-1].splitlines()[:8])) <= 50


def test_no_match_is_one_line(tmp_path: Path, call: CommandLine) -> None:
    """What there is instead, at once, in each command with filters; exit status 2."""
    for scheme in ("fp32", "w8a8"):
        write_record(tmp_path, record("m", scheme, metrics=loss(2.0)))
    out = tmp_path / "report.html"
    expected = "no record has scheme=w9a9; found: fp32, w8a8\n"
    table = call(["table", tmp_path, "--where", "scheme=w9a9"])
    report = call(["report", tmp_path, "--where", "scheme=w9a9", "--out", out])
    compare = call(["compare", tmp_path, tmp_path, "--where-b", "scheme=w9a9"])

    assert (table.status, table.err) == (2, f"error: {expected}")
    assert (report.status, report.err) == (2, f"error: {expected}")
    assert (compare.status, compare.err) == (2, f"error: B ({tmp_path}): {expected}")


def test_size_of_a_report(tmp_path: Path, call: CommandLine) -> None:
    """A small report's size is in kilobytes, not rounded to nothing."""
    write_record(tmp_path, record("m", "fp32", metrics=loss(2.0)))
    out = tmp_path / "report.html"
    found = call(["report", tmp_path, "--out", out])

    assert found.err == f"{out}: {out.stat().st_size / 1e3:.0f} kB\n"


def test_parquet_holds_what_csv_long_holds(tmp_path: Path, call: CommandLine) -> None:
    """The same rows in the same order, with types; what is absent is null, NaN stays NaN."""
    import pyarrow.parquet as pq

    runs = tmp_path / "runs"
    for item in gallery():
        write_record(runs, item)
    path, text = tmp_path / "long.parquet", tmp_path / "long.csv"
    first = call(["table", runs, "--format", "parquet", "--out", path, "--where", "status=ok"])
    call(["table", runs, "--format", "csv-long", "--out", text, "--where", "status=ok"])
    refused = call(["table", runs, "--format", "parquet"])
    rows = pq.read_table(path).to_pylist()
    with text.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))

    assert (first.status, first.out, first.err) == (0, "", "")
    assert (refused.status, "give --out FILE" in refused.err) == (2, True)
    assert [list(row) for row in rows] == [list(line) for line in lines]
    assert {type(row["value"]) for row in rows} == {float}
    assert {type(row["limit"]) for row in rows} == {int, type(None)}
    for row, line in zip(rows, lines, strict=True):
        assert repr(row["value"]).replace("nan", "NaN") == line["value"]
        assert (row["model"], str(row["seed"])) == (line["model"], line["seed"])
        assert row["stderr"] == (float(line["stderr"]) if line["stderr"] else None)
