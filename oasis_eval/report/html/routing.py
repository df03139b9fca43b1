"""Depth routing as a heat map: which router gives how much weight to which source."""

from __future__ import annotations

import itertools
import math

from oasis_eval.record import RunRecord
from oasis_eval.report.html import charts
from oasis_eval.report.html.charts import HEAT_BOUNDS, heat_step
from oasis_eval.report.html.layers import Routing
from oasis_eval.report.html.markup import Html, element, named

_MAX_TEXT_COLUMNS = 14
"""Sources up to which each cell has its number in it."""
_LABEL = 150.0
_NARROW = 520.0
"""Width up to which two figures stand side by side."""


def heat_map(found: Routing, *, title: str, record: RunRecord) -> Html:
    """Return the figure of one record.

    Args:
        found: Mean weights.
        title: For screen readers.
        record: Whose weights they are.
    """
    columns = len(found.weights[0])
    has_text = columns <= _MAX_TEXT_COLUMNS
    size, tall = (40.0, 22.0) if has_text else (max(8.0, float(560 // columns)), 14.0)
    width, height = _LABEL + size * columns + 10.0, tall * len(found.routers) + 46.0
    labels = short_names(found.routers)
    parts = [
        charts.text(_LABEL + size * (at + 0.5), 14, str(at))
        for at in range(0, columns, 1 if has_text else math.ceil(columns / 16))
    ]
    parts.append(charts.text(_LABEL + size * columns / 2, height - 8, "source", kind="axis"))
    for row, weights in enumerate(found.weights):
        y = 22.0 + tall * row
        parts.append(charts.text(_LABEL - 8, y + tall / 2 + 4, labels[row], anchor="end"))
        for at, weight in enumerate(weights):
            if weight is None:
                continue
            x = _LABEL + size * at
            said = f"{labels[row]}, source {at}: {charts.value_text(weight)}"
            parts.append(
                element(
                    "rect",
                    element("title", said),
                    x=charts.px(x),
                    y=charts.px(y),
                    width=charts.px(size - 1),
                    height=charts.px(tall - 1),
                    class_=f"cell {heat_step(weight)}",
                    data_p=True,
                )
            )
            if has_text:
                shown = f"{weight:.2f}" if math.isfinite(weight) else charts.value_text(weight)
                kind = f"in {heat_step(weight)}"
                parts.append(charts.text(x + size / 2 - 0.5, y + tall / 2 + 4, shown, kind=kind))
    scheme = record.spec.scheme.name
    return element(
        "figure",
        element("figcaption", element("strong", named(scheme))),
        element(
            "div", charts.drawing(width, height, parts, title=title, kind="heat"), class_="scroll"
        ),
        class_="wide" if width > _NARROW else None,
        data_scheme=scheme,
    )


def heat_key() -> Html:
    """Return the legend of the colours."""
    bounds = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(HEAT_BOUNDS)]
    items = [
        element(
            "li",
            element(
                "svg",
                element("rect", width=16, height=16, class_=f"cell h{at}"),
                viewBox="0 0 16 16",
                width=16,
                height=16,
                aria_hidden="true",
            ),
            label,
        )
        for at, label in enumerate(bounds)
    ]
    return element("ul", *items, class_="key")


def short_names(modules: tuple[str, ...]) -> list[str]:
    """Return module names without the parts that all of them begin with."""
    parts = [module.split(".") for module in modules]
    same = 0
    while all(len(item) > same + 1 for item in parts) and len({item[same] for item in parts}) == 1:
        same += 1
    return [charts.shortened(".".join(item[same:]), 22) for item in parts]
