"""Tables of the report: the same grids, marks, footnotes and formats as `oasis-eval table`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from oasis_eval.errors import OasisError
from oasis_eval.record import RunRecord
from oasis_eval.report.comparable import grouped
from oasis_eval.report.grid import Cell, Line, Table
from oasis_eval.report.html.markup import Html, details, element, named
from oasis_eval.report.html.selection import Selection
from oasis_eval.report.html.sources import without_folders
from oasis_eval.report.layout import (
    cell_text,
    dimension_header,
    header_spans,
    label_text,
)
from oasis_eval.report.observations import Observation
from oasis_eval.report.tables import REFERENCE, build_table
from oasis_eval.spec import TableSpec

_PERPLEXITIES = ("word_perplexity", "token_perplexity", "byte_perplexity", "bits_per_byte")
_ANSWERS = (
    "pass@1",
    "pass@1_flexible",
    "answer_nll_per_token",
    "cut",
    "unread",
    "acc",
    "acc_norm",
    "exact_match",
)
_OUTLIERS = (
    "max_inf_norm_outputs",
    "avg_kurtosis_outputs",
    "max_inf_norm_linear_inputs",
    "avg_kurtosis_linear_inputs",
    "massive_per_window",
)
_ATTENTION = ("sink_rate", "sink_rate_renormalised", "sink_mass", "null_mass", "max_logit")
_DEPTH = (
    "depth_entropy",
    "depth_effective_branches",
    "depth_dominant_share",
    "depth_collapse_rate",
    "depth_null_mass",
    "depth_weight_update_correlation",
)
_LISTED = "No table shows these; their numbers are in the list of records"
_ARROWS = "↓ lower is better, ↑ higher is better."
_ROWS = ("model", "scheme")
_COLUMNS = ("task", "protocol", "metric")


class _Notes(NamedTuple):
    """The lettered notes of one table."""

    table: str
    texts: Mapping[str, str]


def specs() -> list[TableSpec]:
    """Return the tables of a report, in its order."""
    common = {"rows": _ROWS, "columns": _COLUMNS, "uncertainty": "all"}
    perplexity = TableSpec.model_validate(
        {
            **common,
            "name": "perplexity",
            "caption": "Perplexity",
            "metrics": _PERPLEXITIES,
            "show": "first",
            "baseline": REFERENCE,
            "change": "columns",
            "change_interval": True,
        }
    )
    others = [
        TableSpec.model_validate({**common, "name": name, "caption": caption, "metrics": metrics})
        for name, caption, metrics in (
            ("answers", "Answers", _ANSWERS),
            ("outliers", "Outliers", _OUTLIERS),
            ("attention", "Attention sinks", _ATTENTION),
            ("depth", "Depth routing", _DEPTH),
        )
    ]
    return [perplexity, *others]


def render(selection: Selection) -> Html:
    """Return the section with every table that the records have numbers for; empty without any."""
    measured = {item.metric for item in selection.observations}
    parts = [
        part
        for spec in specs()
        if not measured.isdisjoint(spec.metrics)
        for part in _tables(spec, selection)
    ]
    if not parts:
        return Html("")
    hint = element("p", _ARROWS, class_="hint")
    return element("section", element("h2", "Tables"), hint, *parts, id="tables")


def _tables(spec: TableSpec, selection: Selection) -> list[Html]:
    """Return one table, or one for each set of alike records where they cannot stand in one."""
    try:
        table = _build(spec, selection.records, selection)
    except OasisError as error:
        first = str(error)
    else:
        return [_figure(table, f"table-{spec.name}")]
    parts = [
        element(
            "p",
            element("strong", f"{spec.caption}: "),
            "these records cannot stand in one table, so they are apart. ",
            first,
            class_="note",
        )
    ]
    for number, records in enumerate(_alike(selection.observations, spec), start=1):
        try:
            table = _build(spec, records, selection)
        except OasisError as error:
            why = "" if str(error) == first else f": {error}"
            parts.append(element("p", _LISTED + why, class_="note"))
        else:
            parts.append(_figure(table, f"table-{spec.name}-{number}"))
    return parts


def _build(spec: TableSpec, records: Sequence[RunRecord], selection: Selection) -> Table:
    if spec.baseline and not any(item.spec.scheme.execution == "none" for item in records):
        spec = spec.model_copy(update={"baseline": None, "change_interval": False})
    return build_table(records, spec, folders=selection.folders)


def _alike(observations: Iterable[Observation], spec: TableSpec) -> list[list[RunRecord]]:
    """Return records apart by what a table refuses to mix."""
    relevant = [item for item in observations if item.metric in (*spec.metrics, None)]
    finished = [item for item in relevant if item.metric is not None]
    groups = grouped(
        finished,
        lambda item: (
            item.task,
            item.protocol,
            item.protocol_sha256,
            item.limit,
            item.data_sha256,
            item.fewshot_sha256,
            item.max_new_tokens,
            item.chat_template,
        ),
    )
    found = []
    for group in groups:
        chosen = {item.key: item.record for item in group}
        place = (group[0].task, group[0].protocol, group[0].limit)
        chosen |= {
            item.key: item.record
            for item in relevant
            if item.metric is None and (item.task, item.protocol, item.limit) == place
        }
        found.append(list(chosen.values()))
    return found


def _figure(table: Table, identifier: str) -> Html:
    tasks = _tasks(table)
    notes = _Notes(identifier, {note.mark: without_folders(note.text) for note in table.footnotes})
    head = [
        element("tr", *_corner(table, level), *(_spans(table, level, notes, tasks)))
        for level in range(len(table.column_dimensions))
    ]
    body = [_row(table, index, notes, tasks) for index in range(len(table.rows))]
    return element(
        "div",
        element("h3", table.caption or "", id=f"{identifier}-title"),
        element(
            "div",
            element(
                "table",
                element("thead", *head),
                element("tbody", *body),
                class_="grid sheet",
                aria_labelledby=f"{identifier}-title",
            ),
            class_="scroll",
            tabindex=0,
            role="region",
            aria_labelledby=f"{identifier}-title",
        ),
        *_notes(table, identifier),
        class_="panel",
        id=identifier,
    )


def _tasks(table: Table) -> list[str]:
    """Return the task of each column."""
    at = table.column_dimensions.index("task")
    return [line.place[at] for line in table.columns]


def _corner(table: Table, level: int) -> list[Html]:
    """Return the headers over the row headers: names at the innermost level, else nothing."""
    if level < len(table.column_dimensions) - 1:
        return [element("td") for _ in table.row_dimensions]
    return [
        element("th", dimension_header(name), scope="col", data_sort=True)
        for name in table.row_dimensions
    ]


def _spans(table: Table, level: int, notes: _Notes, tasks: Sequence[str]) -> list[Html]:
    spans = header_spans(table)[level]
    innermost = level == len(table.column_dimensions) - 1
    return [
        element(
            "th",
            element("bdi", label_text(span.label)),
            _marks(span.label.marks, notes),
            scope="col" if innermost else "colgroup",
            colspan=span.stop - span.start if span.stop - span.start > 1 else None,
            class_="num" if innermost else "over",
            data_sort=innermost,
            data_task=tasks[span.start],
        )
        for span in spans
    ]


def _row(table: Table, index: int, notes: _Notes, tasks: Sequence[str]) -> Html:
    line, cells = table.rows[index], table.cells[index]
    values = dict(zip(table.row_dimensions, line.place, strict=True))
    above = table.rows[index - 1] if index else None
    return element(
        "tr",
        *(_header(line, above, level, notes) for level in range(len(line.labels))),
        *(_cell(cell, notes, task) for cell, task in zip(cells, tasks, strict=True)),
        data_model=values["model"],
        data_scheme=values["scheme"],
        class_="start" if above is not None and above.place[0] != line.place[0] else None,
    )


def _header(line: Line, above: Line | None, level: int, notes: _Notes) -> Html:
    label = line.labels[level]
    repeated = level == 0 and above is not None and above.place[0] == line.place[0]
    return element(
        "th",
        element("span", named(label_text(label)), _marks(label.marks, notes), class_="name"),
        scope="row",
        class_="again" if repeated else None,
    )


def _cell(cell: Cell, notes: _Notes, task: str) -> Html:
    text = cell_text(cell)
    kinds = [
        "num",
        "change" if cell.kind == "change" else "",
        "" if cell.status == "ok" else "mark",
    ]
    return element(
        "td",
        element("strong", text) if cell.best else text,
        _marks(cell.marks, notes),
        class_=" ".join(kind for kind in kinds if kind),
        data_v=None if cell.value is None else repr(cell.value),
        data_task=task,
    )


def _marks(marks: Sequence[str], notes: _Notes) -> Html | None:
    if not marks:
        return None
    links = [
        element("a", mark, href=f"#{notes.table}-{mark}", title=notes.texts[mark]) for mark in marks
    ]
    parts = [part for link in links for part in (link, ",")][:-1]
    return element("sup", *parts)


def _notes(table: Table, identifier: str) -> list[Html | None]:
    """Return what explains the marks, and the lettered notes folded: each mark says its own."""
    lettered = [
        element(
            "li",
            element("span", note.mark, class_="letter"),
            without_folders(note.text),
            id=f"{identifier}-{note.mark}",
        )
        for note in table.footnotes
    ]
    general = [element("li", note) for note in table.notes]
    return [
        element("ul", *general, class_="notes") if general else None,
        details(
            f"Notes {table.footnotes[0].mark} to {table.footnotes[-1].mark}",
            element("ul", *lettered, class_="notes"),
            class_="lettered",
        )
        if lettered
        else None,
    ]
