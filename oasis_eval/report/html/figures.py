"""Figures: what schemes do to perplexity, where outliers are, what depth routing does."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence

from oasis_eval.record import RunRecord
from oasis_eval.report.comparable import grouped
from oasis_eval.report.html import charts
from oasis_eval.report.html.charts import Point, Series
from oasis_eval.report.html.effects import ANSWERS, Effect, Line
from oasis_eval.report.html.layers import QUANTITIES, Quantity, by_layer, layer_order, routing
from oasis_eval.report.html.markup import Html, details, element, markup, named
from oasis_eval.report.html.routing import heat_key, heat_map
from oasis_eval.report.html.selection import Selection
from oasis_eval.report.html.verdict import say
from oasis_eval.report.numbers import format_value, metric_style

MAX_LAYER_BYTES = 1_500_000
"""Size of all charts over layers together; what does not fit is counted and left out."""
MAX_ROUTING_BYTES = 2_500_000
"""Size of all heat maps together."""
MAX_MODELS = 60
"""Rows of one figure of perplexities."""
_ROW = 30.0
_STRIP = 90.0


def render(selection: Selection, found: Sequence[Line]) -> Html:
    """Return the section; empty where there is nothing to draw."""
    parts = [*_perplexities(selection, found), *_layers(selection)]
    if not parts:
        return Html("")
    return element(
        "section",
        element("h2", "Figures"),
        element(
            "p",
            "Point at a mark, or reach a figure with Tab and move through it with the arrow keys, "
            "to read its value.",
            class_="hint screen",
        ),
        *parts,
        id="figures",
    )


def _numbers(selection: Selection, names: Container[str]) -> dict[str, int]:
    """Return the number of each of these schemes, the same in every figure."""
    return {name: at for at, name in enumerate(selection.schemes) if name in names}


# --- perplexity -------------------------------------------------------------------------------


def _perplexities(selection: Selection, found: Sequence[Line]) -> Iterable[Html]:
    compared = [item for item in found if item.metric != ANSWERS and item.reference is not None]
    for group in grouped(compared, lambda item: (item.task, item.protocol, item.limit)):
        lines = [item for item in group if item.reference and _usable(item.reference.value)]
        lines = [item for item in lines if item.effects]
        if not lines:
            continue
        first = lines[0]
        limit = f", first {first.limit}" if first.limit is not None else ""
        title = f"{metric_style(first.metric).header} relative to the unquantized model"
        left_out = len(lines) - MAX_MODELS
        drawn = {effect.result.first.scheme for item in lines for effect in item.effects}
        numbers = _numbers(selection, drawn)
        yield element(
            "figure",
            element(
                "figcaption",
                element("h3", title),
                element("p", named(first.task), f", {first.protocol}{limit}"),
            ),
            charts.key(numbers),
            element(
                "div",
                _ratios(lines[:MAX_MODELS], numbers, selection, title=title),
                class_="scroll",
            ),
            element("p", f"{left_out} more models are left out; keep some with --where model=.")
            if left_out > 0
            else None,
            class_="panel",
            data_task=first.task,
        )


def _usable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0.0


def _ratios(
    lines: Sequence[Line], numbers: Mapping[str, int], selection: Selection, *, title: str
) -> Html:
    width, left, top, bottom = 1000.0, 215.0, 10.0, 42.0
    height = top + bottom + _ROW * len(lines)
    ratios = [ratio for item in lines for ratio in map(_ratio, item.effects) if ratio is not None]
    has_strip = any(_ratio(effect) is None for item in lines for effect in item.effects)
    right = width - 16.0 - (_STRIP if has_strip else 0.0)
    scale = charts.axis([1.0, *ratios], start=left, stop=right, log=True)
    parts: list[Html] = []
    for tick in scale.ticks():
        x = scale.at(tick)
        parts += [
            charts.line(x, top, x, height - bottom),
            charts.text(x, height - bottom + 17, f"{charts.tick_text(tick)}×"),
        ]
    parts.append(charts.line(scale.at(1.0), top, scale.at(1.0), height - bottom, "one"))
    label = "times the unquantized perplexity (log scale)"
    parts.append(charts.text((left + right) / 2, height - 6, label, kind="axis"))
    if has_strip:
        parts += [
            charts.line(right + 8, top, right + 8, height - bottom, "edge"),
            charts.text(right + 12 + _STRIP / 2, height - bottom + 17, "no finite value"),
        ]
    for at, item in enumerate(lines):
        y = top + _ROW * (at + 0.5)
        label = selection.labels[item.model]
        row = [charts.text(left - 12, y + 4, charts.shortened(label, 26), anchor="end")]
        aside = 0
        for effect in item.effects:
            scheme = effect.result.first.scheme
            series = numbers[scheme]
            words = say(effect, item)
            status = "" if words.status == "ok" else f"{words.status}: "
            said = f"{label}, {scheme}: {status}{words.text}"
            ratio = _ratio(effect)
            if ratio is None:
                x = right + 24 + 16 * (aside % 4)
                aside += 1
            else:
                x = scale.at(ratio)
                row += _whisker(effect, scale, y, series)
            row.append(charts.marker(x, y, series=series, title=said, scheme=scheme))
        parts.append(element("g", *row, data_model=item.model))
    return charts.drawing(width, height, parts, title=title)


def _ratio(effect: Effect) -> float | None:
    if effect.percent is None or effect.percent <= -100.0:
        return None
    return 1.0 + effect.percent / 100.0


def _whisker(effect: Effect, scale: charts.Axis, y: float, series: int) -> list[Html]:
    if effect.low is None or effect.high is None:
        return []
    ends = [1.0 + end / 100.0 for end in (effect.low, effect.high)]
    if ends[0] <= 0.0 or not math.isfinite(ends[1]):
        return []
    kind = f"whisker c{series % charts.NUM_COLOURS}"
    return [charts.line(scale.at(ends[0]), y, scale.at(ends[1]), y, kind)]


# --- layers -----------------------------------------------------------------------------------


def _layers(selection: Selection) -> Iterable[Html]:
    """Yield what diagnostics say layer by layer, for one model and task at a time."""
    records = [record for record in selection.records if record.layers]
    order = {name: at for at, name in enumerate(selection.models)}
    groups = sorted(grouped_records(records), key=lambda items: order[items[0].card.name])
    panels: list[Html] = []
    size = routing_size = 0
    for group in groups:
        maps = _routing(group, selection, MAX_ROUTING_BYTES - routing_size)
        panel = _layer_panel(group, selection, maps, is_open=not panels)
        routing_size += len(maps)
        size += len(panel) - len(maps)
        if size > MAX_LAYER_BYTES:
            break
        panels.append(panel)
    left_out = len(groups) - len(panels)
    if not groups:
        return
    yield element("h3", "Layer by layer")
    yield from panels
    if left_out:
        yield element(
            "p",
            f"The layers of {left_out} of {len(groups)} pairs of model and task are left out to "
            "keep this file small; keep some models with --where model=.",
            class_="note",
        )


def grouped_records(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return the records of one model, task, protocol and limit, the first seed of a scheme."""
    found: dict[tuple[object, ...], dict[str, RunRecord]] = {}
    for record in records:
        task = record.spec.task
        place = (record.card.name, task.name, task.protocol, task.limit)
        found.setdefault(place, {}).setdefault(record.spec.scheme.name, record)
    return [list(group.values()) for group in found.values()]


def _routing(group: Sequence[RunRecord], selection: Selection, budget: int) -> Html:
    """Return the heat maps of a group that fit; empty without routing over depth."""
    found = [(record, weights) for record in group if (weights := routing(record.layers))]
    if not found:
        return Html("")
    label = selection.label(group[0])
    maps: list[Html] = []
    for record, weights in found:
        title = f"Depth weights, {label}, {record.spec.scheme.name}"
        drawn = heat_map(weights, title=title, record=record)
        budget -= len(drawn)
        if budget < 0:
            break
        maps.append(drawn)
    left_out = len(found) - len(maps)
    more = f"{left_out} of {len(found)} schemes are left out; keep some with --where scheme=."
    return markup(
        [
            element("h4", "Depth routing: mean weight of each source"),
            heat_key(),
            element("div", *maps, class_="multiples"),
            element("p", more, class_="hint") if left_out else None,
        ]
    )


def _layer_panel(
    group: Sequence[RunRecord], selection: Selection, maps: Html, *, is_open: bool
) -> Html:
    task = group[0].spec.task
    label = selection.label(group[0])
    numbers = _numbers(selection, {record.spec.scheme.name for record in group})
    drawn = [chart for item in QUANTITIES if (chart := _chart(group, item, numbers)) is not None]
    return details(
        [named(label), ", ", named(task.name), element("small", f" {task.protocol}")],
        charts.key(numbers),
        element("div", *drawn, class_="multiples"),
        maps,
        class_="panel",
        open=is_open,
        data_model=group[0].card.name,
        data_task=task.name,
    )


def _chart(
    group: Sequence[RunRecord], quantity: Quantity, numbers: Mapping[str, int]
) -> Html | None:
    values = [(record.spec.scheme.name, by_layer(record.layers, quantity)) for record in group]
    layers = sorted({item.layer for _, items in values for item in items}, key=layer_order)
    if not layers or _is_all_zero(value.value for _, items in values for value in items):
        return None
    places = {name: at for at, name in enumerate(layers)}
    series = [
        Series(
            name,
            numbers[name],
            tuple(
                Point(
                    places[item.layer],
                    item.value if quantity.log else item.value * 100.0,
                    f"{name}, layer {item.layer}: {_said(item.value, quantity)} ({item.where})",
                )
                for item in items
            ),
        )
        for name, items in values
    ]
    return element(
        "figure",
        element("figcaption", element("strong", quantity.title), f", {quantity.how}"),
        element(
            "div",
            charts.over_categories(
                series, layers, title=quantity.title, log=quantity.log, below="layer"
            ),
            class_="scroll",
        ),
    )


def _said(value: float, quantity: Quantity) -> str:
    if quantity.log:
        return charts.value_text(value)
    return f"{format_value(value, 'sink_mass')} %"


def _is_all_zero(values: Iterable[float]) -> bool:
    return all(value == 0.0 for value in values)
