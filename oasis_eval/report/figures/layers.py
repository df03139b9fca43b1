"""Figures of diagnostics: outliers over layers, depth routing, null and sink mass of heads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from oasis_eval.record import RunRecord
from oasis_eval.report.figures.heat import HeatPanel, Words, draw_heat
from oasis_eval.report.figures.lines import Panel, Point, Series, draw_panels
from oasis_eval.report.figures.style import TEXT_INCHES, Drawing, stem_of
from oasis_eval.report.html.layers import QUANTITIES, Quantity, by_layer, layer_of, layer_order
from oasis_eval.report.html.routing import short_names
from oasis_eval.report.html.selection import Selection

MOST_PANELS = 3
"""Maps side by side; more schemes of a model are further rows."""
MOST_MAPS = 9
"""Maps of one figure; more are further figures."""
_HEAD = re.compile(r"head\.(\d+)\.(.+)")
_SOURCE = re.compile(r"depth\.source\.(\d+)\.(weight|weight_raw)")
_SUBLAYERS = {"attn_res_sa": "attn", "attn_res_mlp": "mlp"}


class Group(NamedTuple):
    """The records of one model on one task: one a scheme, of the seed with most of them."""

    label: str
    task: str
    protocol: str
    records: tuple[RunRecord, ...]
    seed: int | None
    """None where there is no other."""

    @property
    def name(self) -> str:
        """Say what the records are of."""
        which = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.label}{which}, {self.task} ({self.protocol})"

    def stem(self, kind: str) -> str:
        """Return the stem of a file."""
        return stem_of(kind, self.label, self.task, self.protocol)


def groups(selection: Selection) -> list[Group]:
    """Return the records with numbers, model by model and task by task."""
    found: dict[tuple[str, str, str, int | None], dict[int, dict[str, RunRecord]]] = {}
    for record in selection.records:
        if record.status == "ok":
            task, seed = record.spec.task, record.spec.seed
            place = (selection.label(record), task.name, task.protocol, task.limit)
            schemes = found.setdefault(place, {}).setdefault(seed, {})
            schemes.setdefault(record.spec.scheme.name, record)
    order = {selection.labels[name]: at for at, name in enumerate(selection.models)}
    result = []
    for place, by_seed in sorted(found.items(), key=lambda item: order[item[0][0]]):
        seed = min(by_seed, key=lambda seed: (-len(by_seed[seed]), seed))
        shown = seed if len(by_seed) > 1 else None
        result.append(Group(*place[:3], tuple(by_seed[seed].values()), shown))
    return result


# --- outliers ---------------------------------------------------------------------------------


def outliers(selection: Selection) -> Iterator[Drawing]:
    """Yield infinity norm and kurtosis over layers, a line a scheme, for each model and task."""
    numbers = {name: at for at, name in enumerate(selection.schemes)}
    for group in groups(selection):
        wanted = [item for item in QUANTITIES if item.log]
        panels = [
            panel for item in wanted if (panel := _layer_panel(group, item, numbers)) is not None
        ]
        if panels:
            figure = draw_panels(panels, width=TEXT_INCHES, columns=2, title=group.name)
            yield Drawing(group.stem("outliers"), figure)


def _layer_panel(group: Group, quantity: Quantity, numbers: dict[str, int]) -> Panel | None:
    found = {item.spec.scheme.name: by_layer(item.layers, quantity) for item in group.records}
    layers = sorted({v.layer for values in found.values() for v in values}, key=layer_order)
    if not layers:
        return None
    places = {layer: float(at) for at, layer in enumerate(layers)}
    series = tuple(
        Series(name, numbers[name], tuple(Point(places[v.layer], v.value) for v in values))
        for name, values in found.items()
        if values
    )
    ticks = tuple((places[layer], layer) for layer in layers)
    title, _, tensors = quantity.title.partition(", ")
    return Panel(
        title=f"{title} of {tensors}, {quantity.how}",
        x_label="layer",
        y_label=title.lower(),
        series=series,
        x_ticks=ticks,
    )


# --- heads ------------------------------------------------------------------------------------


def null_mass(selection: Selection) -> Iterator[Drawing]:
    """Yield the null mass of every head, a map a scheme, for each model with a null."""
    yield from _heads(selection, "null_mass", "null mass", skip_zero=True)


def sink_mass(selection: Selection) -> Iterator[Drawing]:
    """Yield the mass on the first token of every head, a map a scheme, for each model."""
    yield from _heads(selection, "sink_mass", "mass on the first token", skip_zero=False)


def _heads(
    selection: Selection, statistic: str, label: str, *, skip_zero: bool
) -> Iterator[Drawing]:
    for group in groups(selection):
        panels = []
        for record in group.records:
            panel = _head_panel(record, statistic)
            if panel is not None and not (skip_zero and not np.any(panel.values[panel.exists])):
                panels.append(panel)
        stem = group.stem(statistic.replace("_", "-"))
        yield from _maps(panels, stem, Words("head", "layer", label, group.name))


def _head_panel(record: RunRecord, statistic: str) -> HeatPanel | None:
    heads: dict[str, dict[int, float]] = {}
    for item in record.layers:
        found = _HEAD.fullmatch(item.name)
        if found and found[2] == statistic:
            heads.setdefault(layer_of(item.module), {})[int(found[1])] = item.value
    if not heads:
        return None
    layers = sorted(heads, key=layer_order)
    rows = [heads[layer] for layer in layers]
    return _panel(record.spec.scheme.name, rows, tuple(layers))


# --- depth ------------------------------------------------------------------------------------


def depth_routing(selection: Selection) -> Iterator[Drawing]:
    """Yield the mean weight of each source in each router, a map a scheme, for each model."""
    for group in groups(selection):
        panels: dict[str, list[HeatPanel]] = {}
        for record in group.records:
            panel, kind = _routing_panel(record)
            if panel is not None:
                panels.setdefault(kind, []).append(panel)
        for kind, of_kind in panels.items():
            is_raw = kind == "weight_raw"
            bar = "mean weight" if is_raw else "mean weight (of what the null leaves)"
            name = "depth-routing" if is_raw else "depth-routing-renormalised"
            words = Words("source (0: embedding)", "router", bar, group.name)
            yield from _maps(of_kind, group.stem(name), words)


def _routing_panel(record: RunRecord) -> tuple[HeatPanel | None, str]:
    """Return a map and which weights it shows: raw where the record has them."""
    weights: dict[str, dict[str, dict[int, float]]] = {}
    nulls: dict[str, float] = {}
    for item in record.layers:
        found = _SOURCE.fullmatch(item.name)
        if found:
            of_kind = weights.setdefault(found[2], {})
            of_kind.setdefault(item.module, {})[int(found[1])] = item.value
        elif item.name == "depth.null_mass":
            nulls[item.module] = item.value
    if not weights:
        return None, ""
    kind = "weight_raw" if "weight_raw" in weights else "weight"
    routers = weights[kind]
    null = np.array([nulls.get(name, 0.0) for name in routers])
    labels = tuple(_router_labels(tuple(routers)))
    return _panel(record.spec.scheme.name, list(routers.values()), labels, null), kind


def _router_labels(modules: tuple[str, ...]) -> list[str]:
    """Return layer and sublayer of each router, or names without what all have in common."""
    labels = []
    for module, short in zip(modules, short_names(modules), strict=True):
        parent, _, own = module.rpartition(".")
        if own in _SUBLAYERS:
            labels.append(f"{layer_of(parent)} {_SUBLAYERS[own]}")
        else:
            labels.append("final" if own == "final_res" else short)
    return labels


# --- maps -------------------------------------------------------------------------------------


def _panel(
    title: str,
    rows: Sequence[dict[int, float]],
    row_labels: tuple[str, ...],
    null: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None,
) -> HeatPanel:
    width = 1 + max(max(row) for row in rows)
    values = np.full((len(rows), width), np.nan)
    exists = np.zeros((len(rows), width), dtype=bool)
    for at, row in enumerate(rows):
        for column, value in row.items():
            values[at, column] = value
            exists[at, column] = True
    labels = tuple(str(column) for column in range(width))
    return HeatPanel(title, "", values, exists, row_labels, labels, null)


def _maps(panels: Sequence[HeatPanel], stem: str, words: Words) -> Iterator[Drawing]:
    starts = range(0, len(panels), MOST_MAPS)
    for number, (start, stop) in enumerate(pairwise([*starts, len(panels)]), start=1):
        part = panels[start:stop]
        columns = min(len(part), MOST_PANELS)
        width = {1: 3.3, 2: 5.1}.get(columns, TEXT_INCHES)
        figure = draw_heat(part, words, columns=columns, width=width)
        yield Drawing(stem if len(starts) == 1 else f"{stem}-{number}", figure)
