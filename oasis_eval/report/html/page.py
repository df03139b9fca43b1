"""The whole file: sections, style, script, data, and a policy that lets nothing else in.

Nothing is loaded: style and script are inline and allowed by their hashes alone, and the policy
forbids images, fonts, frames, forms and connections. The same records give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from oasis_eval.record import RunRecord
from oasis_eval.report.html import answers, figures, grids, runs, sources, verdict
from oasis_eval.report.html.effects import lines
from oasis_eval.report.html.markup import Html, element
from oasis_eval.report.html.selection import Selection, select

DEFAULT_TITLE = "Quantization report"
_SECTIONS = (
    ("verdict", "Verdict"),
    ("tables", "Tables"),
    ("figures", "Figures"),
    ("answers", "Answers"),
    ("records", "Records"),
    ("failures", "Failures"),
    ("coverage", "Coverage"),
    ("schemes", "Schemes"),
    ("protocols", "Protocols"),
    ("data", "Data"),
    ("warnings", "Warnings"),
    ("machines", "Machines"),
)


def build_report(
    records: Sequence[RunRecord],
    *,
    folders: Sequence[Path] = (),
    where: Mapping[str, tuple[str, ...]] | None = None,
    title: str = DEFAULT_TITLE,
) -> str:
    """Return one self-contained HTML file about records.

    Args:
        records: Results of any models, schemes, tasks and seeds; their order does not matter.
        folders: Where their samples may lie, for intervals and answers.
        where: Filters, as those of a table.
        title: Heading and window title.

    Raises:
        RecordError: There are no records, none matches, or two with one key differ.
        SpecError: A filter is on no field.
    """
    selection = select(records, where=where or {}, folders=folders)
    found = lines(selection)
    anchors = sources.Anchors()
    explained = sources.render(selection, anchors)
    listed, data = runs.render(selection, anchors)
    sections = [
        verdict.render(selection, found),
        grids.render(selection),
        figures.render(selection, found),
        answers.render(selection, found),
        listed,
        *explained,
    ]
    style, script = _asset("page.css"), _asset("page.js")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="generator", content="oasis-eval"),
        element("title", title),
        element("style", style),
    )
    present = {name for name, _ in _SECTIONS if any(_is(item, name) for item in sections)}
    body = element(
        "body",
        element("a", "Skip to the verdict", href="#main", class_="skip"),
        _header(title, present),
        _controls(selection),
        element("main", *sections, id="main", tabindex=-1),
        element("div", id="tip", aria_hidden="true", hidden=True),
        data,
        element("script", script),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _is(section: Html, identifier: str) -> bool:
    """Tell whether a section is the one of that name."""
    return section[: section.find(">") + 1].endswith(f' id="{identifier}">')


def _asset(name: str) -> Html:
    """Return a file of this package as the content of its element."""
    text = (files(__package__) / name).read_text(encoding="utf-8")
    assert "</" not in text, f"{name} would end its own element"
    return Html(text)


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _header(title: str, present: set[str]) -> Html:
    links = [
        element("li", element("a", label, href=f"#{identifier}"))
        for identifier, label in _SECTIONS
        if identifier in present
    ]
    return element(
        "header",
        element("h1", title, dir="auto"),
        element("nav", element("ul", *links), aria_label="Sections"),
    )


def _controls(selection: Selection) -> Html:
    """Return the filters; hidden until the script makes them work."""
    models = [(name, selection.labels[name]) for name in selection.models]
    return element(
        "div",
        element(
            "label",
            element("span", "Find"),
            element("input", type="search", id="find", autocomplete="off", spellcheck="false"),
        ),
        _choice("model", "Model", models),
        _choice("scheme", "Scheme", [(name, name) for name in selection.schemes]),
        _choice("task", "Task", [(name, name) for name in selection.tasks]),
        element(
            "label",
            element("input", type="checkbox", id="flips"),
            element("span", "Flips only"),
            class_="check",
        ),
        element("button", "Reset", type="button", id="reset"),
        element("output", id="count", role="status"),
        class_="controls",
        role="search",
        aria_label="Filters",
        hidden=True,
    )


def _choice(identifier: str, label: str, values: Sequence[tuple[str, str]]) -> Html:
    options = [element("option", text, value=value) for value, text in values]
    return element(
        "label",
        element("span", label),
        element("select", element("option", "all", value=""), *options, id=identifier),
    )
