"""Files of figures: the same bytes every time, fonts inside, no type 3, text as text."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oasis_eval.errors import RecordError, SpecError
from oasis_eval.report.figures.lines import Panel, Point, Series, draw_panels
from oasis_eval.report.figures.ranking import ranking
from oasis_eval.report.figures.style import (
    FORMATS,
    Drawing,
    encoded,
    formats_named,
    plain,
    save,
    settings,
    stem_of,
    wrapped,
)
from tests.report.figures.drawn import check_nothing_is_clipped, texts


def drawing() -> Drawing:
    series = tuple(
        Series(f"s{at}", at, (Point(0.0, 1.0 + at), Point(1.0, float("nan")))) for at in range(6)
    )
    with settings():
        return Drawing("x", draw_panels([Panel("t", "x", "y", series)], width=3.3, columns=1))


SCRIPT = """
import hashlib
from oasis_eval.report.figures.style import encoded
from tests.report.figures.test_files import drawing
print(*(hashlib.sha256(encoded(drawing().figure, kind)).hexdigest() for kind in ("pdf", "png")))
"""


def test_the_same_figure_is_the_same_bytes() -> None:
    """In another process with another hash seed, at another time."""
    environment = {"PYTHONHASHSEED": "7", "PATH": "", "MPLCONFIGDIR": "/tmp", "TZ": "UTC-5"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    here = [hashlib.sha256(encoded(drawing().figure, kind)).hexdigest() for kind in FORMATS]

    assert done.stdout.split() == here


def test_pdf_has_its_fonts_inside_and_none_of_type_3() -> None:
    """As journals demand; and no time stamp."""
    content = encoded(drawing().figure, "pdf")

    assert content.startswith(b"%PDF")
    assert b"/Type3" not in content
    assert b"/FontFile2" in content
    assert re.search(rb"/BaseFont /[A-Z]{6}\+DejaVuSans", content)
    assert b"/CreationDate" not in content
    assert b"Matplotlib" not in content


def test_png_says_nothing_of_the_program() -> None:
    """Nor of the time."""
    content = encoded(drawing().figure, "png")

    assert content.startswith(b"\x89PNG")
    assert b"Software" not in content
    assert b"tIME" not in content


def test_a_users_own_settings_change_nothing() -> None:
    """Whatever is in their matplotlibrc."""
    import matplotlib as mpl

    before = encoded(drawing().figure, "pdf")
    with mpl.rc_context({"font.size": 20.0, "pdf.fonttype": 3, "text.parse_math": True}):
        after = encoded(drawing().figure, "pdf")
        size = mpl.rcParams["font.size"]

    assert after == before
    assert size == 20.0


def test_files_are_written_in_the_formats_asked_for(tmp_path: Path) -> None:
    """And a folder that cannot be made is an error of ours."""
    paths = save(drawing(), tmp_path / "new", ("pdf", "png"))

    assert [path.name for path in paths] == ["x.pdf", "x.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        save(drawing(), tmp_path / "file", ("png",))
    with pytest.raises(SpecError, match="'svg': expected some of pdf, png"):
        formats_named(("svg",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a$b_c%#", "a$b_c%#"),
        ("two\n lines\t", "two lines"),
        ("中", "�"),
        ("\u202eabc\x1b", "�abc�"),
        ("x" * 70, "x" * 59 + "…"),
    ],
)
def test_names_become_one_line_of_the_fonts_characters(text: str, expected: str) -> None:
    """Nothing hides, reorders or breaks a label."""
    assert plain(text) == expected


def test_long_titles_are_wrapped_and_then_cut() -> None:
    """At words where there are some."""
    assert wrapped("one two three", 0.6) == "one two\nthree"
    assert wrapped("a" * 100, 0.71).splitlines() == ["a" * 10, "a" * 9 + "…"]


def test_stems_hold_nothing_that_a_file_system_dislikes() -> None:
    """Whatever the label."""
    assert stem_of("outliers", "../a b/$c", "x.y") == "outliers-a-b-c-x.y"
    assert stem_of("中") == "figure"


def test_ranking_is_in_order_with_its_intervals() -> None:
    """Largest on top, what is no number above all, each bar as long as its value."""
    labels = ["low", "no $number$", "high_1", "infinite"]
    values = [0.1, float("nan"), 2.0, float("inf")]
    with settings():
        found = ranking(
            labels, values, [(0.05, 0.2), None, (1.5, 2.5), None], value_label="nats", title="T"
        )
        (axes,) = found.figure.axes

        order = ["no $number$", "infinite", "high_1", "low"]
        assert [text.get_text() for text in axes.get_yticklabels()] == order
        bars = {
            patch.get_gid(): (patch.get_width(), patch.get_y() + 0.35) for patch in axes.patches
        }
        assert bars == {"high_1": (2.0, 2.0), "low": (0.1, 3.0)}
        intervals = [
            [float(x) for x in item.get_xdata()] for item in axes.lines if item.get_marker() == "|"
        ]
        assert intervals == [[1.5, 2.5], [0.05, 0.2]]
        assert {"not a number", "infinite"} <= set(texts(found.figure))
        check_nothing_is_clipped(found.figure)


def test_ranking_counts_what_it_leaves_out() -> None:
    """And refuses lists that do not match."""
    with settings():
        found = ranking([f"l{i}" for i in range(50)], list(range(50)), [None] * 50, value_label="v")

        assert "(10 smaller ones left out)" in found.figure.axes[0].get_xlabel()
        with pytest.raises(ValueError, match="1 labels, 2 values"):
            ranking(["a"], [1.0, 2.0], [None, None], value_label="v")
