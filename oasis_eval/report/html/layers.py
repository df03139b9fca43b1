"""Per-layer numbers of a record's diagnostics, reduced to what a chart shows.

Names are those that the diagnostics store: `outputs.max_inf_norm`, `linear_inputs.kurtosis`,
`head.H.sink_mass`, `depth.source.S.weight`. A layer is the first number in a module's name; modules
without one (the final norm) come last under their own names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from oasis_eval.record import LayerStat
from oasis_eval.report.html.charts import value_text

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_HEAD = re.compile(r"head\.(\d+)\.(.+)")
_SOURCE = re.compile(r"depth\.source\.(\d+)\.weight")


class Quantity(NamedTuple):
    """One chart over layers."""

    name: str
    """Name of the statistic; that of a head without `head.H.`."""
    title: str
    how: str
    """How a layer's numbers become one."""
    log: bool
    """Whether the axis is logarithmic; else it is a share in percent."""


QUANTITIES = (
    Quantity("outputs.max_inf_norm", "Infinity norm, outputs", "largest tensor", True),
    Quantity("outputs.kurtosis", "Kurtosis, outputs", "largest tensor", True),
    Quantity("linear_inputs.max_inf_norm", "Infinity norm, Linear inputs", "largest tensor", True),
    Quantity("linear_inputs.kurtosis", "Kurtosis, Linear inputs", "largest tensor", True),
    Quantity("sink_mass", "Mass on the first token (%)", "mean over heads", False),
    Quantity("null_mass", "Null mass (%)", "mean over heads", False),
)


class LayerValue(NamedTuple):
    """One layer's number."""

    layer: str
    value: float
    where: str
    """Which module (or head) it is of."""


class Routing(NamedTuple):
    """Mean weights of a record's depth routers."""

    routers: tuple[str, ...]
    weights: tuple[tuple[float | None, ...], ...]
    """Router by router; None where a source does not exist yet."""


def layer_of(module: str) -> str:
    """Return the layer's number in a module's name, or the name's last part."""
    found = _LAYER.search(module)
    return found[1] if found else module.rsplit(".", 1)[-1]


def layer_order(layer: str) -> tuple[int, int, str]:
    """Return a key: layers by number, then everything else."""
    return (0, int(layer), "") if layer.isdecimal() else (1, 0, layer)


def by_layer(stats: Sequence[LayerStat], quantity: Quantity) -> list[LayerValue]:
    """Return one value a layer, in order; empty where the record has no such statistic."""
    if "." not in quantity.name:
        return _means_over_heads(stats, quantity.name)
    largest: dict[str, LayerValue] = {}
    for item in stats:
        if item.name != quantity.name:
            continue
        layer = layer_of(item.module)
        before = largest.get(layer)
        if before is None or _exceeds(item.value, before.value):
            largest[layer] = LayerValue(layer, item.value, item.module)
    return sorted(largest.values(), key=lambda item: layer_order(item.layer))


def _exceeds(value: float, other: float) -> bool:
    """Tell whether a value is worse; NaN is the worst there is."""
    return not math.isnan(other) and (math.isnan(value) or value > other)


def _means_over_heads(stats: Sequence[LayerStat], name: str) -> list[LayerValue]:
    heads: dict[str, list[tuple[str, float]]] = {}
    for item in stats:
        found = _HEAD.fullmatch(item.name)
        if found and found[2] == name:
            heads.setdefault(item.module, []).append((found[1], item.value))
    values = []
    for module, items in heads.items():
        head, most = max(items, key=lambda item: (math.isnan(item[1]), item[1]))
        mean = sum(value for _, value in items) / len(items)
        where = f"{module}, {len(items)} heads, most in head {head}: {value_text(most)}"
        values.append(LayerValue(layer_of(module), mean, where))
    return sorted(values, key=lambda item: layer_order(item.layer))


def routing(stats: Sequence[LayerStat]) -> Routing | None:
    """Return the weights of every router over its sources, None where there are none."""
    routers: dict[str, dict[int, float]] = {}
    for item in stats:
        found = _SOURCE.fullmatch(item.name)
        if found:
            routers.setdefault(item.module, {})[int(found[1])] = item.value
    if not routers:
        return None
    width = 1 + max(max(weights) for weights in routers.values())
    rows = tuple(
        tuple(weights.get(source) for source in range(width)) for weights in routers.values()
    )
    return Routing(tuple(routers), rows)
