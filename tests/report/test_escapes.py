"""Names with characters that a format gives a meaning are printed as they are."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from oasis_eval.report.latex import escape
from oasis_eval.report.layout import plain
from oasis_eval.report.render import escape_markdown, render
from oasis_eval.report.tables import build_table, load_spec
from oasis_eval.spec import TableSpec
from tests.report.samples import NASTY, gallery, record, scheme
from tests.report.tex import NEEDS_TEX, compiled

SPECIAL = "".join(sorted(set(r"&%$#_{}~^\<>|*`[]()!-+='\",.:;@?/ ab1")))
names = st.text(alphabet=SPECIAL, min_size=1, max_size=20)
_COMMANDS = {
    r"\textbackslash{}": "\\",
    r"\textasciitilde{}": "~",
    r"\textasciicircum{}": "^",
    r"\textless{}": "<",
    r"\textgreater{}": ">",
    r"\textbar{}": "|",
    r"\char34{}": '"',
    **{f"\\{character}": character for character in "&%$#_{}"},
    "{}": "",
}
_TOKEN = re.compile("|".join(re.escape(command) for command in _COMMANDS))


def read_latex(text: str) -> str:
    """Return what LaTeX prints for an escaped text."""
    return _TOKEN.sub(lambda match: _COMMANDS[match[0]], text)


@settings(max_examples=300, deadline=None)
@given(names)
def test_latex_escape_is_undone_by_reading(name: str) -> None:
    """Each special character is escaped exactly once."""
    assert plain(name) == read_latex(escape(name))


@settings(max_examples=300, deadline=None)
@given(names)
def test_latex_escape_leaves_no_active_character(name: str) -> None:
    """Without our own commands nothing is left that TeX acts on."""
    rest = _TOKEN.sub("", escape(name))

    assert not set(rest) & set(r"&%$#_{}~^\<>|" + '"')


@pytest.mark.parametrize("text", ["a--b", "---", "``x''", "?`", "!`", ",,"])
def test_latex_ligatures_are_broken(text: str) -> None:
    """Two hyphens stay two hyphens."""
    assert not re.search(r"--|``|''|\?`|!`|,,", escape(text))


@settings(max_examples=300, deadline=None)
@given(names)
def test_markdown_cell_shows_the_name(name: str) -> None:
    """A Markdown parser with tables reads back the name from one cell, as plain text."""
    source = f"| {escape_markdown(name)} | 1 |\n| --- | --- |\n| {escape_markdown(name)} | 2 |\n"
    tokens = MarkdownIt("commonmark").enable("table").parse(source)
    cells = [token for token in tokens if token.type == "inline"]
    texts = ["".join(child.content for child in cell.children or ()) for cell in cells]
    kinds = {child.type for cell in cells for child in cell.children or ()}

    assert [plain(name), "1", plain(name), "2"] == texts
    assert kinds <= {"text", "text_special"}


@pytest.mark.parametrize("bad", ["a\x1b[31mb", "a\x00b", "a\u202eb", "a\u200bb"])
@pytest.mark.parametrize("format_name", ["terminal", "latex", "markdown"])
def test_control_characters_are_not_printed(bad: str, format_name: str) -> None:
    """A label cannot move the cursor, change colours or turn the reading direction."""
    records = [record("tiny", label=bad, metrics={"token_perplexity": 5.0})]
    text = render(build_table(records, TableSpec()), format=format_name)  # type: ignore[arg-type]

    assert "a?" in text
    assert not set(text) & set("\x1b\x00\u202e\u200b")


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@x"])
def test_csv_names_are_no_formulas(name: str) -> None:
    """A spreadsheet shows such a name instead of computing it; numbers keep their sign."""
    records = [
        record(name, item, metrics={"token_perplexity": value})
        for item, value in (("fp32", 5.0), ("w8a8", 4.0))
    ]
    table = build_table(records, TableSpec(rows=("model",), baseline="fp32"))
    for format_name in ("csv", "csv-long"):
        rows = list(csv.reader(io.StringIO(render(table, format=format_name))))

        assert {row[0] for row in rows[1:]} == {f"'{name}"}
    assert "-20.0" in render(table, format="csv")


def test_terminal_prints_rich_markup_as_text() -> None:
    """`[bold]` in a name is part of the name."""
    text = render(build_table(gallery(), load_spec("results")), format="terminal")

    assert NASTY in text


def _cells(row: str) -> int:
    """Count the columns of a LaTeX row, spanning ones as many."""
    spans = [int(size) for size in re.findall(r"\\multicolumn\{(\d+)\}", row)]
    return len(re.split(r"(?<!\\)&", row)) + sum(spans) - len(spans)


@pytest.mark.parametrize("name", ["results", "perplexity", "schemes", "gsm8k"])
def test_latex_rows_have_one_number_of_columns(name: str) -> None:
    """No name adds or removes a column."""
    text = render(build_table(gallery(), load_spec(name)), format="latex")
    (shape,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", text)
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]

    assert {len(shape)} == {_cells(row) for row in rows}


def _odd_everywhere() -> str:
    """Return a table with odd text as cell note, column, row, header over columns and caption."""
    odd_scheme = scheme("w4a4", name="W4A4 (%)", description=NASTY)
    records = [
        record(NASTY, odd_scheme, "wiki_ppl", metrics={"token_perplexity": 5.0}, warnings=(NASTY,)),
        record("tiny_llama%v2&co", odd_scheme, "wiki_ppl", status="failed", reason=NASTY),
        record("tiny_llama%v2&co", "fp32", "wiki_ppl", metrics={"new_#metric%": 0.25}),
    ]
    spec = TableSpec(caption=NASTY, metrics=("token_perplexity", "new_#metric%"))
    return render(build_table(records, spec), format="latex")


def test_latex_escapes_odd_text_in_every_place() -> None:
    """Cells, columns, rows, headers over columns, notes and caption are all escaped."""
    text = _odd_everywhere()
    commands = re.sub(
        r"\\makebox\[\\linewidth\]\[c\]|\\(begin|end)\{[a-z]+\}(\{[lr]+\}|\[t\]|\{\\linewidth\})?|\\label\{[^}]*\}|"
        r"\\(caption|cmidrule\(lr\)|textsuperscript|rlap|phantom|setlength|multicolumn)|"
        r"\\(tabcolsep|toprule|midrule|bottomrule|addlinespace|par|medskip|quad|small|scriptsize|"
        r"footnotesize|raggedright|centering)\b|\\\\$|\\,|\$\\[a-z]+\$",
        "",
        text,
        flags=re.MULTILINE,
    )
    body = "\n".join(re.sub(r" & ", " ", line) for line in _TOKEN.sub("", commands).splitlines())

    assert not set(body) & set(r"&%$#_^\<>|")
    assert r"W4A4 (\%)" in text
    assert r"wiki\_ppl" in text


@NEEDS_TEX
def test_latex_compiles_with_booktabs_alone(tmp_path: Path) -> None:
    """Every built-in table and one with odd text everywhere compiles."""
    tables = [
        render(build_table(gallery(), load_spec(name)), format="latex")
        for name in ("results", "perplexity", "schemes", "gsm8k")
    ]
    tables.append((Path(__file__).parent / "golden" / "comparison.tex").read_text(encoding="utf-8"))
    compiled(tmp_path, [*tables, _odd_everywhere()])
