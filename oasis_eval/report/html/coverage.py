"""What each scheme really quantized, module by module, as short as it can be said."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from oasis_eval.record import Coverage, ModuleCoverage, RunRecord
from oasis_eval.report.html.markup import Html, details, element, named
from oasis_eval.report.html.selection import Selection

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_UNITS = ("B", "kB", "MB", "GB", "TB")


class Alike(NamedTuple):
    """Modules that differ in layer numbers alone."""

    pattern: str
    """Name with `*` for numbers; the name itself where there is one module."""
    num_modules: int
    what: str


def bytes_text(count: int) -> str:
    """Return a size with three significant digits: 1.23 GB."""
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000.0, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def alike(modules: Sequence[ModuleCoverage]) -> list[Alike]:
    """Return modules in groups, in the order of their first member."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in modules:
        pattern = _NUMBER.sub("*", item.module)
        groups.setdefault((pattern, _what(item)), []).append(item.module)
    return [
        Alike(pattern if len(names) > 1 else names[0], len(names), what)
        for (pattern, what), names in groups.items()
    ]


def _what(item: ModuleCoverage) -> str:
    if not item.quantized:
        return f"left alone: {item.reason or 'no reason recorded'}"
    parts = []
    if item.weight_bits is not None:
        sharing = _sharing(item.weight_granularity, item.weight_group_size)
        parts.append(f"weights {item.weight_bits} bit{sharing}")
    if item.activation_bits is not None:
        sharing = _sharing(item.activation_granularity, item.activation_group_size)
        ranges = {True: ", static", False: ", dynamic", None: ""}[item.activation_static]
        parts.append(f"activations {item.activation_bits} bit{sharing}{ranges}")
    text = "; ".join(parts) or "quantized"
    if item.region is not None:
        text = f"{item.region}: {text}"
    return f"{text} ({item.note})" if item.note else text


def _sharing(granularity: str | None, group_size: int | None) -> str:
    if granularity is None:
        return ""
    return f" per group of {group_size}" if group_size else f" per {granularity}"


def summary(found: Coverage) -> str:
    """Return the numbers of a coverage as a sentence."""
    sites = f", {found.num_sites} other places" if found.num_sites else ""
    return (
        f"{found.num_quantized} of {found.num_linear} Linear layers quantized{sites}, "
        f"{found.effective_weight_bits:.2f} bits per parameter, "
        f"{bytes_text(found.bytes_before)} to {bytes_text(found.bytes_after)}"
    )


def render(selection: Selection) -> tuple[Html, Mapping[str, str]]:
    """Return the list of coverages, each once, and the anchor of each record's by key."""
    groups: dict[tuple[str, str, Coverage], list[RunRecord]] = {}
    for record in selection.records:
        if record.coverage is not None and record.spec.scheme.execution != "none":
            place = (record.card.name, record.spec.scheme.name, record.coverage)
            groups.setdefault(place, []).append(record)
    anchors: dict[str, str] = {}
    items: list[Html] = []
    for number, ((model, scheme, found), records) in enumerate(groups.items(), start=1):
        anchors |= {record.key: f"coverage-{number}" for record in records}
        regions = f"Activations at: {', '.join(records[0].spec.scheme.regions)}."
        if found.absent_regions:
            regions += f" The model has no {', '.join(found.absent_regions)}."
        items.append(
            details(
                [
                    named(selection.labels[model]),
                    ", ",
                    named(scheme),
                    element("small", f" {summary(found)}"),
                ],
                element("p", regions) if records[0].spec.scheme.activations is not None else None,
                element(
                    "div",
                    element(
                        "table",
                        element(
                            "thead",
                            element(
                                "tr",
                                element("th", "Modules", scope="col"),
                                element("th", "Count", scope="col", class_="num"),
                                element("th", "What happened", scope="col"),
                            ),
                        ),
                        element("tbody", *(_row(group) for group in alike(found.modules))),
                    ),
                    class_="scroll",
                ),
                id=f"coverage-{number}",
                class_="entry",
                data_model=model,
                data_scheme=scheme,
            )
        )
    return Html("".join(items)), anchors


def _row(group: Alike) -> Html:
    return element(
        "tr",
        element("th", element("code", group.pattern), scope="row"),
        element("td", str(group.num_modules), class_="num"),
        element("td", group.what),
    )
