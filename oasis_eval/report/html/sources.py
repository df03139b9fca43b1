"""How the numbers were made: schemes, protocols, data, coverage, machines, warnings, failures.

Many records share these, so each is said once and records link to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oasis_eval.record import DataInfo, Provenance, RunRecord
from oasis_eval.report.comparable import grouped
from oasis_eval.report.footnotes import scheme_note
from oasis_eval.report.html import coverage
from oasis_eval.report.html.markup import Child, Html, details, element, named
from oasis_eval.report.html.selection import Selection
from oasis_eval.report.observations import data_name, shown

_MAX_VALUES = 6
_MAX_CELLS = 30
_FOLDERS = re.compile(r"(?<![\w./:])/(?:[^\s/'\":;,]+/)+(?=[^\s/'\":;,]+/[^\s/'\":;,]+)")
"""All of an absolute path but its last two parts."""


@dataclass(slots=True)
class Anchors:
    """Where each record's explanations are: label and anchor, by record key."""

    links: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, key: str, label: str, anchor: str) -> None:
        """Add a link of a record."""
        self.links.setdefault(key, []).append((label, anchor))


def without_folders(text: str) -> str:
    """Return a message or traceback with absolute paths cut to their last two parts."""
    return _FOLDERS.sub("…/", text)


def render(selection: Selection, anchors: Anchors) -> list[Html]:
    """Return the sections, and fill `anchors`."""
    covered, places = coverage.render(selection)
    for key, anchor in places.items():
        anchors.add(key, "Coverage", anchor)
    sections = [
        ("failures", "Failed and unsupported", _failures(selection, anchors)),
        ("coverage", "Coverage", [covered] if covered else []),
        ("schemes", "Schemes", _schemes(selection)),
        ("protocols", "Protocols", _protocols(selection.records, anchors)),
        ("data", "Data", _data(selection.records, anchors)),
        ("warnings", "Warnings", _warnings(selection)),
        ("machines", "Versions and machines", _machines(selection.records, anchors)),
    ]
    return [
        element("section", element("h2", title), *parts, id=identifier)
        for identifier, title, parts in sections
        if parts
    ]


def definitions(pairs: Sequence[tuple[str, Child]]) -> Html:
    """Return names and what they are."""
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", value)) for name, value in pairs),
        class_="facts",
    )


def _cells(records: Sequence[RunRecord], selection: Selection) -> Html:
    """Return the list of records that something is about."""
    names = dict.fromkeys(
        f"{selection.label(item)} / {item.spec.scheme.name} / {item.spec.task.name}"
        for item in records
    )
    items = [element("li", named(name)) for name in list(names)[:_MAX_CELLS]]
    more = len(names) - len(items)
    if more:
        items.append(element("li", f"and {more} more"))
    return element("ul", *items, class_="cells")


def _failures(selection: Selection, anchors: Anchors) -> list[Html]:
    failed = (item for item in selection.records if item.status != "ok")
    groups = grouped(failed, lambda item: (item.status, item.reason, item.traceback))
    parts = []
    for number, records in enumerate(groups, start=1):
        first, anchor = records[0], f"failure-{number}"
        for record in records:
            anchors.add(record.key, "Failure", anchor)
        reason = without_folders(first.reason or "no reason recorded")
        trace = without_folders(first.traceback) if first.traceback else None
        parts.append(
            element(
                "article",
                element(
                    "p",
                    element("span", first.status, class_=f"status {first.status}"),
                    " ",
                    reason,
                ),
                _cells(records, selection),
                details("Traceback", element("pre", trace, class_="says")) if trace else None,
                class_="entry",
                id=anchor,
            )
        )
    return parts


def _schemes(selection: Selection) -> list[Html]:
    by_scheme = grouped(selection.observations, lambda item: (item.scheme, item.scheme_sha256))
    notes = {group[0].scheme_sha256: (group[0].scheme, scheme_note(group)) for group in by_scheme}
    items = [
        element("li", note, data_scheme=name)
        for scheme in selection.schemes
        for name, note in notes.values()
        if name == scheme
    ]
    return [element("ul", *items, class_="plain")]


def _protocols(records: Sequence[RunRecord], anchors: Anchors) -> list[Html]:
    pairs = ((info, record) for record in records for info in record.protocols)
    groups = grouped(pairs, lambda pair: (pair[0].name, pair[0].version, pair[0].sha256))
    parts = []
    for number, group in enumerate(groups, start=1):
        anchor, info = f"protocol-{number}", group[0][0]
        for _, record in group:
            anchors.add(record.key, f"Protocol {info.name}", anchor)
        values: dict[str, dict[str, None]] = {}
        for each, _ in group:
            for name, value in each.details.items():
                values.setdefault(name, {})[shown(value)] = None
        parts.append(
            details(
                [
                    named(info.name),
                    element("small", f" version {info.version}, sha256 {info.sha256[:12]}"),
                ],
                element("p", info.summary),
                definitions(
                    [
                        (name.replace("_", " "), _some(list(of)))
                        for name, of in sorted(values.items())
                    ]
                ),
                id=anchor,
                class_="entry",
            )
        )
    return parts


def _some(values: Sequence[str]) -> str:
    more = len(values) - _MAX_VALUES
    return ", ".join(values[:_MAX_VALUES]) + (f" and {more} more" if more > 0 else "")


def _data(records: Sequence[RunRecord], anchors: Anchors) -> list[Html]:
    groups: dict[tuple[str, DataInfo], list[RunRecord]] = {}
    for record in records:
        for info in record.data:
            groups.setdefault((data_name(record, info), info), []).append(record)
    parts = []
    for number, ((origin, info), of) in enumerate(groups.items(), start=1):
        anchor = f"data-{number}"
        for record in of:
            anchors.add(record.key, f"Data {info.name}", anchor)
        split = f", split {info.split}" if info.split else ""
        parts.append(
            element(
                "li",
                element("strong", named(info.name)),
                ": ",
                named(origin),
                f"{split}, {info.num_rows} rows, sha256 ",
                element("code", info.sha256[:16]),
                id=anchor,
            )
        )
    return [element("ul", *parts, class_="plain")] if parts else []


def _warnings(selection: Selection) -> list[Html]:
    groups: dict[str, list[RunRecord]] = {}
    for record in selection.records:
        for warning in record.warnings:
            groups.setdefault(warning, []).append(record)
    return [
        details(
            [without_folders(warning), element("small", f" {len(records)} records")],
            _cells(records, selection),
            class_="entry",
        )
        for warning, records in groups.items()
    ]


def _machines(records: Sequence[RunRecord], anchors: Anchors) -> list[Html]:
    pairs = ((item.provenance, item) for item in records if item.provenance is not None)
    parts = []
    for number, group in enumerate(grouped(pairs, lambda pair: _machine(pair[0])), start=1):
        anchor, first = f"machine-{number}", group[0][0]
        for _, record in group:
            anchors.add(record.key, "Machine", anchor)
        started = sorted(item.started for item, _ in group if item.started is not None)
        seconds = [item.seconds for item, _ in group if item.seconds is not None]
        facts: list[tuple[str, Child]] = [
            (name, value)
            for name, value in (
                ("commit", first.git_commit),
                ("attention", first.attention),
                ("threads", None if first.num_threads is None else str(first.num_threads)),
                ("started", " to ".join(dict.fromkeys((started[0], started[-1]))))
                if started
                else ("started", None),
                ("seconds in all", f"{sum(seconds):.1f}" if seconds else None),
                *sorted(first.versions.items()),
            )
            if value is not None
        ]
        title = ", ".join(shown(item) for item in (first.device, first.dtype))
        count = f" {len(group)} record{'s' if len(group) > 1 else ''}"
        parts.append(
            details([title, element("small", count)], definitions(facts), id=anchor, class_="entry")
        )
    return parts


def _machine(found: Provenance) -> str:
    """Return everything about a run but when, how long and on which checkpoint."""
    return found.model_dump_json(exclude={"started", "seconds", "checkpoint_sha256"})


def links_of(anchors: Anchors, key: str) -> Mapping[str, str]:
    """Return label and anchor of everything that explains a record."""
    return dict(anchors.links.get(key, ()))
