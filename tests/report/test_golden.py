"""Whole tables against stored files.

The files are rewritten, and the tests then fail to make the change seen, only by

    OASIS_REWRITE_GOLDEN=1 pytest tests/report/test_golden.py
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from oasis_eval.report.render import FORMATS, render
from oasis_eval.report.tables import build_table, load_spec
from tests.report.samples import gallery

GOLDEN = Path(__file__).parent / "golden"
SUFFIXES = {
    "terminal": ".txt",
    "csv": ".csv",
    "csv-long": ".long.csv",
    "latex": ".tex",
    "markdown": ".md",
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", ["results", "perplexity", "schemes", "gsm8k"])
def test_table_equals_stored_file(name: str, format_name: str) -> None:
    """NaN, infinity, missing, failed, unsupported, seeds, changes and odd names look as agreed."""
    path = GOLDEN / (name + SUFFIXES[format_name])
    actual = render(build_table(gallery(), load_spec(name)), format=format_name)  # type: ignore[arg-type]
    if os.environ.get("OASIS_REWRITE_GOLDEN") == "1":
        path.write_text(actual, encoding="utf-8")
        pytest.fail(f"{path.name} was rewritten; look at it and run again without the variable")

    assert path.read_text(encoding="utf-8") == actual


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", ["results", "schemes"])
def test_order_of_records_changes_nothing(name: str, format_name: str) -> None:
    """The same records in any order give the same bytes."""
    records = gallery()
    expected = render(build_table(records, load_spec(name)), format=format_name)  # type: ignore[arg-type]
    for seed in range(5):
        shuffled = random.Random(seed).sample(records, len(records))
        actual = render(build_table(shuffled, load_spec(name)), format=format_name)  # type: ignore[arg-type]

        assert expected == actual
