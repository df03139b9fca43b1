"""Small SVG charts: a log or linear axis, markers that differ in shape and colour, heat maps.

Colours are classes (`c0`..`c7`, `h0`..`h9`) that the style sheet fills in for light and dark; every
mark says its value in a `<title>`. Values that are not finite stand in a strip of their own at the
edge of the chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oasis_eval.report.html.markup import Html, element
from oasis_eval.report.numbers import format_number

NUM_COLOURS = 8
_SHAPES = (
    "M0-4.5A4.5 4.5 0 1 1 0 4.5A4.5 4.5 0 1 1 0-4.5Z",
    "M-4-4H4V4H-4Z",
    "M0-5.2L5 4H-5Z",
    "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
    "M0 5.2L5-4H-5Z",
)
HEAT_BOUNDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Edges of the colours of a share: finer where weights over many sources lie."""
_LARGEST = 1e140
"""Where an axis ends whatever the values: its ticks and room stay in floating-point range."""
_EDGE = 34
"""Width of the strip for values that are not finite, pixels."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Numbers to pixels."""

    low: float
    high: float
    start: float
    """Pixel of `low`."""
    stop: float
    log: bool

    def at(self, value: float) -> float:
        """Return the pixel of a finite value, at most at the ends."""
        low, high, here = (self._scaled(item) for item in (self.low, self.high, value))
        share = 0.5 if high == low else (here - low) / (high - low)
        return self.start + min(1.0, max(0.0, share)) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return a few round numbers between the ends."""
        if not self.log:
            return _linear_ticks(self.low, self.high)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        step = max(1, math.ceil((last - first) / 5))
        decades = [10.0**power for power in range(first, last + 1, step)]
        ticks = [value for value in decades if self.low <= value <= self.high]
        if len(ticks) < 3:
            fine = [lead * 10.0**p for p in range(first - 1, last + 1) for lead in (1, 2, 5)]
            ticks = [value for value in fine if self.low <= value <= self.high]
        return ticks if len(ticks) > 2 else _linear_ticks(self.low, self.high)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def axis(values: Iterable[float], *, start: float, stop: float, log: bool) -> Axis:
    """Return an axis with some room around the finite values; log only where all are positive."""
    finite = [max(-_LARGEST, min(_LARGEST, value)) for value in values if math.isfinite(value)]
    log = log and bool(finite) and min(finite) > 0.0
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if log:
        low, high = (max(end, 1.0 / _LARGEST) for end in (low, high))
        room = max((high / low) ** 0.06, 1.02)
        return Axis(low / room, high * room, start, stop, log)
    room = max(0.06 * (high - low), 1e-9 * abs(high)) if high > low else 0.05 * abs(high)
    room = room if room > 1.0 / _LARGEST else 1.0
    return Axis(low - room if low < 0.0 else max(0.0, low - room), high + room, start, stop, log)


def _linear_ticks(low: float, high: float) -> list[float]:
    size = 10.0 ** math.floor(math.log10((high - low) / 2.0))
    step = next(size * lead for lead in (1, 2, 5, 10) if (high - low) / (size * lead) <= 5)
    return [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def px(value: float) -> str:
    """Return a coordinate with one digit, without a trailing zero."""
    return f"{value:.1f}".removesuffix(".0")


def tick_text(value: float) -> str:
    """Return a tick's number."""
    if value == 0.0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.6g}"
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def marker(x: float, y: float, *, series: int, title: str, scheme: str) -> Html:
    """Return a mark that can be focused and says its value."""
    return element(
        "path",
        element("title", title),
        class_=f"mark c{series % NUM_COLOURS}",
        d=_SHAPES[(series + series // NUM_COLOURS) % len(_SHAPES)],
        transform=f"translate({px(x)} {px(y)})",
        data_p=True,
        data_scheme=scheme,
    )


def key(names: Mapping[str, int]) -> Html:
    """Return the legend: the marker and name of each series, from names and their numbers."""
    items = [
        element(
            "li",
            element(
                "svg",
                element(
                    "path",
                    class_=f"mark c{at % NUM_COLOURS}",
                    d=_SHAPES[(at + at // NUM_COLOURS) % len(_SHAPES)],
                    transform="translate(8 8)",
                ),
                viewBox="0 0 16 16",
                width=16,
                height=16,
                aria_hidden="true",
            ),
            element("bdi", name),
            data_scheme=name,
        )
        for name, at in names.items()
    ]
    return element("ul", *items, class_="key")


def text(x: float, y: float, content: str, *, anchor: str = "middle", kind: str = "") -> Html:
    """Return a piece of text; `anchor` is start, middle or end."""
    return element("text", content, x=px(x), y=px(y), text_anchor=anchor, class_=kind or None)


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> Html:
    """Return a straight line."""
    return element("line", x1=px(x1), y1=px(y1), x2=px(x2), y2=px(y2), class_=kind)


def drawing(
    width: float, height: float, *parts: Iterable[Html], title: str, kind: str = ""
) -> Html:
    """Return the whole chart with its name for screen readers."""
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {px(width)} {px(height)}",
        width=px(width),
        height=px(height),
        role="group",
        aria_label=title,
        class_=f"chart {kind}".strip(),
    )


def shortened(name: str, length: int) -> str:
    """Return a name cut to `length` characters."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def value_text(value: float) -> str:
    """Return a number of a diagnosis as titles say it."""
    return format_number(value, None)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a series over categories."""

    at: int
    """Index of the category."""
    value: float
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one scheme."""

    name: str
    number: int
    """Which marker and colour it has."""
    points: tuple[Point, ...]


def over_categories(
    series: Sequence[Series], categories: Sequence[str], *, title: str, log: bool, below: str
) -> Html:
    """Return a chart of lines with markers over categories (layers).

    Args:
        series: One line each.
        categories: Labels under the horizontal axis.
        title: For screen readers.
        log: Whether the vertical axis is logarithmic, if the values allow it.
        below: Title of the horizontal axis.
    """
    width, height, left, right, bottom = 520.0, 230.0, 58.0, 12.0, 40.0
    values = [point.value for item in series for point in item.points]
    has_edge = any(not math.isfinite(value) for value in values)
    top = 14.0 + (_EDGE if has_edge else 0.0)
    scale = axis(values, start=height - bottom, stop=top, log=log)
    step = (width - left - right) / max(len(categories), 1)

    def x(at: int) -> float:
        return left + (at + 0.5) * step

    def y(value: float) -> float:
        return scale.at(value) if math.isfinite(value) else 14.0

    parts: list[Html] = []
    for tick in scale.ticks():
        parts += [
            line(left, scale.at(tick), width - right, scale.at(tick)),
            text(left - 8, scale.at(tick) + 4, tick_text(tick), anchor="end"),
        ]
    if has_edge:
        parts += [
            line(left, top - 12, width - right, top - 12, "edge"),
            text(left - 8, 18, "NaN, inf", anchor="end"),
        ]
    every = math.ceil(len(categories) / 12)
    for at, name in enumerate(categories):
        if at % every == 0:
            parts.append(text(x(at), height - bottom + 17, shortened(name, 9)))
    parts.append(text((left + width - right) / 2, height - 5, below, kind="axis"))
    for item in series:
        finite = [point for point in item.points if math.isfinite(point.value)]
        path = "".join(
            f"{'L' if at else 'M'}{px(x(point.at))} {px(y(point.value))}"
            for at, point in enumerate(finite)
        )
        if path:
            parts.append(
                element(
                    "path",
                    d=path,
                    class_=f"line c{item.number % NUM_COLOURS}",
                    data_scheme=item.name,
                )
            )
        parts += [
            marker(
                x(point.at), y(point.value), series=item.number, title=point.title, scheme=item.name
            )
            for point in item.points
        ]
    return drawing(width, height, parts, title=title)


def heat_step(value: float) -> str:
    """Return the class of a share's colour; `nan` where it is no number."""
    if not math.isfinite(value):
        return "nan"
    value = round(value, 6)  # means of equal weights fall on an edge, on either side of it
    steps = len(HEAT_BOUNDS) - 1
    return f"h{next((at for at in range(steps) if value < HEAT_BOUNDS[at + 1]), steps - 1)}"
