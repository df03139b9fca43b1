"""The list of all records: the first rows as markup, all of them as data for the script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from oasis_eval.record import RunRecord
from oasis_eval.report.comparable import grouped
from oasis_eval.report.footnotes import warning_note
from oasis_eval.report.html.markup import Html, element, island, named, visible
from oasis_eval.report.html.selection import Selection
from oasis_eval.report.html.sources import Anchors, links_of, without_folders
from oasis_eval.report.numbers import MARKS, format_value, metric_style
from oasis_eval.report.observations import Observation, batch_size_of, protocol_info, shown

NUM_FIRST = 100
"""Rows that are there without the script."""
_MAIN = ("pass@1", "word_perplexity", "token_perplexity", "byte_perplexity", "acc", "exact_match")
_MAX_NOTE = 160


class Column(NamedTuple):
    """One column of the list."""

    title: str
    is_number: bool = False


COLUMNS = (
    Column("Status"),
    Column("Model"),
    Column("Scheme"),
    Column("Task"),
    Column("Protocol"),
    Column("Metric"),
    Column("Value", True),
    Column("±", True),
    Column("n", True),
    Column("Seed", True),
    Column("Seconds", True),
    Column("Note"),
)


class Row(NamedTuple):
    """One record: texts of its columns, the numbers that they sort by, and its details."""

    record: RunRecord
    texts: tuple[str, ...]
    numbers: tuple[float | None, ...]
    """Of the number columns; None sorts last."""


class Pool:
    """Texts by number, so that each is written once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def at(self, text: str) -> int:
        """Return the number of a text; hidden characters are made visible here."""
        return self._numbers.setdefault(visible(text), len(self._numbers))

    def texts(self) -> list[str]:
        """Return all texts in the order of their numbers."""
        return list(self._numbers)


def render(selection: Selection, anchors: Anchors) -> tuple[Html, Html]:
    """Return the section and the data behind it."""
    by_key = {group[0].key: group for group in grouped(selection.observations, lambda x: x.key)}
    rows = [_row(record, by_key[record.key], selection) for record in selection.records]
    pool = Pool()
    data = {
        "columns": [[item.title, item.is_number] for item in COLUMNS],
        "rows": [_data(row, by_key[row.record.key], selection, anchors, pool) for row in rows],
        "pool": pool.texts(),
    }
    more = len(rows) - NUM_FIRST
    note = f"The first {NUM_FIRST} of {len(rows)} records; the others are shown with JavaScript."
    section = element(
        "section",
        element("h2", "Records", id="records-title"),
        element(
            "div",
            element(
                "div",
                element(
                    "table",
                    element("thead", element("tr", *(_header(item) for item in COLUMNS))),
                    element("tbody", *(_markup(row) for row in rows[:NUM_FIRST])),
                    class_="records",
                    aria_labelledby="records-title",
                ),
                class_="scroll",
                tabindex=0,
                role="region",
                aria_labelledby="records-title",
            ),
            element("noscript", element("p", note)) if more > 0 else None,
            class_="panel",
        ),
        id="records",
    )
    return section, island("records-data", data)


def _header(column: Column) -> Html:
    kind = "num" if column.is_number else None
    return element("th", column.title, scope="col", class_=kind, data_sort=True)


def _main(record: RunRecord, items: Sequence[Observation]) -> Observation | None:
    """Return the number that stands for a record."""
    by_name = {item.metric: item for item in reversed(items) if item.metric is not None}
    found = next((by_name[name] for name in _MAIN if name in by_name), None)
    own = [item for item in items if item.protocol == record.spec.task.protocol]
    return found or next((item for item in (*own, *items) if item.metric is not None), None)


def _row(record: RunRecord, items: Sequence[Observation], selection: Selection) -> Row:
    main = _main(record, items)
    task, scheme, provenance = record.spec.task, record.spec.scheme, record.provenance
    seconds = provenance.seconds if provenance else None
    value = main.value if main else None
    error = main.stderr if main else None
    metric = main.metric or "" if main else ""
    texts = (
        record.status,
        selection.label(record),
        scheme.name,
        task.name,
        task.protocol + (f", first {task.limit}" if task.limit is not None else ""),
        metric_style(metric).header if metric else "",
        MARKS.get(record.status, "") if value is None else format_value(value, metric),
        "" if error is None else format_value(error, metric),
        "" if main is None or main.count is None else str(main.count),
        str(record.spec.seed),
        "" if seconds is None else f"{seconds:.1f}",
        _note(record),
    )
    scale = 100.0 if metric_style(metric).percent else 1.0  # so that they sort as they read
    shown_numbers = (None if number is None else number * scale for number in (value, error))
    numbers = (*shown_numbers, main.count if main else None, record.spec.seed, seconds)
    return Row(record, texts, tuple(map(_sortable, numbers)))


def _sortable(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _note(record: RunRecord) -> str:
    text = " ".join((record.reason or "").split())
    if not text and record.warnings:
        text = warning_note(record.warnings[0])
        if len(record.warnings) > 1:
            text += f" And {len(record.warnings) - 1} more."
    text = without_folders(text)
    return text if len(text) <= _MAX_NOTE else f"{text[: _MAX_NOTE - 1]}…"


def _markup(row: Row) -> Html:
    numbers = iter(row.numbers)
    cells = []
    for column, text in zip(COLUMNS, row.texts, strict=True):
        if column.is_number:
            number = next(numbers)
            value = None if number is None else repr(number)
            cells.append(element("td", text, class_="num", data_v=value))
        elif column.title == "Status":
            cells.append(element("td", element("span", text, class_=f"status {text}")))
        else:
            kind = "long" if column.title == "Note" else None
            cells.append(element("td", named(text), class_=kind))
    return element("tr", *cells)


# --- details ----------------------------------------------------------------------------------


def _data(
    row: Row,
    items: Sequence[Observation],
    selection: Selection,
    anchors: Anchors,
    pool: Pool,
) -> list[object]:
    """Return a record as the script reads it: texts, numbers, filters, details."""
    record = row.record
    filters = (record.card.name, record.spec.scheme.name, record.spec.task.name)
    return [
        [pool.at(text) for text in row.texts],
        list(row.numbers),
        [pool.at(text) for text in filters],
        [[pool.at(name), pool.at(value)] for name, value in _settings(record)],
        [_metric(item, pool) for item in items if item.metric is not None],
        [pool.at(without_folders(text)) for text in record.warnings],
        [[pool.at(label), pool.at(to)] for label, to in links_of(anchors, record.key).items()],
    ]


def _settings(record: RunRecord) -> list[tuple[str, str]]:
    spec, card, provenance = record.spec, record.card, record.provenance
    pairs: list[tuple[str, object]] = [
        ("model", card.name),
        ("family", card.family),
        ("variant", card.variant),
        ("dtype", spec.scheme.dtype or spec.dtype),
        ("seed", spec.seed),
        ("batch size", batch_size_of(record, protocol_info(record, spec.task.protocol))),
        ("device", spec.device),
        ("limit", spec.task.limit),
        ("new tokens at most", spec.task.max_new_tokens if _is_generated(record) else None),
        ("chat template", spec.task.chat_template if _is_generated(record) else None),
    ]
    if provenance is not None:
        pairs += [
            ("checkpoint sha256", (provenance.checkpoint_sha256 or "")[:16] or None),
            ("commit", provenance.git_commit),
            ("attention", provenance.attention),
            ("threads", provenance.num_threads),
            ("processes", provenance.num_processes if provenance.num_processes > 1 else None),
            ("started", provenance.started),
            ("seconds", None if provenance.seconds is None else f"{provenance.seconds:.1f}"),
        ]
    pairs.append(("record", record.key))
    return [(name, shown(value)) for name, value in pairs if value is not None]


def _is_generated(record: RunRecord) -> bool:
    return any(item.name.startswith(("pass@", "exact_match")) for item in record.metrics)


def _metric(item: Observation, pool: Pool) -> list[int]:
    """Return header, value, standard error, count and protocol of a number."""
    name = item.metric or ""
    texts = (
        metric_style(name).header,
        "" if item.value is None else format_value(item.value, name),
        "" if item.stderr is None else format_value(item.stderr, name),
        "" if item.count is None else str(item.count),
        item.protocol,
    )
    return [pool.at(text) for text in texts]
