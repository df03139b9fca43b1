"""Bits against perplexity: a line a method, the unquantized model as a dashed line.

The interval of a point is that of the paired difference to the unquantized run on the same windows,
as in `compare`, put around the unquantized perplexity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from oasis_eval.report.figures.lines import Level, Panel, Point, Series, State, draw_panels
from oasis_eval.report.figures.style import COLUMN_INCHES, TEXT_INCHES, Drawing, stem_of
from oasis_eval.report.html.effects import ANSWERS, Effect, Line, lines
from oasis_eval.report.html.selection import Selection
from oasis_eval.report.numbers import metric_style
from oasis_eval.spec import QuantScheme

MOST_MODELS = 6
"""Models of one figure."""
_NAME = re.compile(r"(?P<library>[a-z]+-)?w(?P<weights>\d+)a(?P<activations>\d+)(?P<rest>-.*)?")
_UNQUANTIZED = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a scheme stands: on which line, at how many bits."""

    method: str
    bits: int


def place_of(scheme: QuantScheme) -> Place | None:
    """Return where a scheme stands; None for one without bits of its own (unquantized).

    `wXaX` is on the line `RTN` (round to nearest) at X bits; a suffix is another line, other
    activation bits another still, and any other name is a line by itself.
    """
    bits = scheme.weights or scheme.activations
    if bits is None:
        return None
    found = _NAME.fullmatch(scheme.name)
    if found is None:
        return Place(scheme.name, bits.bits)
    weights, activations = int(found["weights"]), int(found["activations"])
    parts = [(found["library"] or "").rstrip("-"), (found["rest"] or "").lstrip("-")]
    method = " ".join(part for part in parts if part) or "RTN"
    if weights == _UNQUANTIZED:
        return Place(f"{method}, activations only", activations)
    if activations == _UNQUANTIZED:
        return Place(f"{method}, weights only", weights)
    return Place(method if activations == weights else f"{method}, a{activations}", weights)


def perplexity(selection: Selection) -> Iterator[Drawing]:
    """Yield a figure for each task, protocol and limit, with a panel a model."""
    found = [item for item in lines(selection) if item.metric != ANSWERS]
    places = {
        name: place_of(scheme)
        for item in selection.observations
        for name, scheme in ((item.scheme, item.record.spec.scheme),)
    }
    methods = dict.fromkeys(place.method for place in places.values() if place is not None)
    # Black is the unquantized model's.
    numbers = {method: at for at, method in enumerate(methods, start=1)}
    by_text: dict[tuple[object, ...], list[Line]] = {}
    for item in found:
        if any(places[effect.result.first.scheme] for effect in item.effects):
            by_text.setdefault((item.task, item.protocol, item.limit, item.metric), []).append(item)
    for (task, protocol, limit, metric), models in by_text.items():
        for start in range(0, len(models), MOST_MODELS):
            part = models[start : start + MOST_MODELS]
            panels = [_panel(item, selection, places, numbers) for item in part]
            columns = min(len(panels), 3)
            width = {1: COLUMN_INCHES, 2: 5.1}.get(columns, TEXT_INCHES)
            title = f"{task} ({protocol})"
            figure = draw_panels(
                panels,
                width=width,
                columns=columns,
                panel_height=2.3,
                title=title,
                same_scale=True,
            )
            name = (f"perplexity-{task}-{protocol}", *((f"{limit}",) if limit else ()))
            more = (str(start // MOST_MODELS + 1),) if len(models) > MOST_MODELS else ()
            kind = () if metric == "token_perplexity" else (str(metric),)
            yield Drawing(stem_of(*name, *kind, *more), figure)


def _panel(
    line: Line,
    selection: Selection,
    places: dict[str, Place | None],
    numbers: dict[str, int],
) -> Panel:
    points: dict[str, list[Point]] = {}
    base = line.reference.value if line.reference is not None else None
    for effect in line.effects:
        place = places[effect.result.first.scheme]
        if place is not None:
            points.setdefault(place.method, []).append(_point(effect, place.bits, base))
    series = tuple(
        Series(method, numbers[method], tuple(sorted(of, key=lambda point: point.x)))
        for method, of in points.items()
    )
    bits = sorted({-point.x for item in series for point in item.points})
    level = None
    if base is not None and line.reference is not None:
        level = Level(f"unquantized ({line.reference.first.scheme})", base)
    return Panel(
        title=selection.labels[line.model],
        x_label="bits",
        y_label=metric_style(line.metric).header.lower(),
        series=series,
        # Towards the right the bits become fewer, as damage grows.
        x_ticks=tuple((-float(item), f"{item:g}") for item in bits),
        level=level,
    )


def _point(effect: Effect, bits: int, base: float | None) -> Point:
    value = effect.result.value
    state: State | None = None
    if value is None:
        state = "unsupported" if effect.result.first.status == "unsupported" else "failed"
    low = high = None
    if base is not None and effect.low is not None and effect.high is not None:
        low, high = (base * (1.0 + end / 100.0) for end in (effect.low, effect.high))
    return Point(
        -float(bits), value, low=low, high=high, state=None if value is not None else state
    )
