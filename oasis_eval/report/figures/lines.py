"""Panels of lines with markers: values over layers, bits or positions.

A value that is no finite number is never dropped: it stands in a strip at the top of its panel,
each series on a line of its own, with a mark that says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from oasis_eval.report.figures.style import look, new_figure, plain, wrapped
from oasis_eval.report.html.charts import axis, tick_text

State = Literal["failed", "unsupported"]
LOG_SPREAD = 10.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
STATES: dict[str, tuple[str, str]] = {
    "inf": ("^", "infinite"),
    "-inf": ("v", "minus infinite"),
    "nan": ("x", "not a number"),
    "failed": ("s", "failed"),
    "unsupported": ("o", "not supported"),
}
"""Marker and meaning of what has no place on an axis."""

_STRIP = 0.055
"""Height of one series in the strip, as a share of the panel."""
_LEGEND_ROW = 0.17
_LEGEND_CHAR = 0.062
_LEGEND_HANDLE = 0.45
_MOST_TICKS = 6


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a series."""

    x: float
    y: float | None
    """None where there is no number, for the reason that `state` gives."""
    low: float | None = None
    """Lower end of an interval."""
    high: float | None = None
    state: State | None = None

    @property
    def mark(self) -> str | None:
        """Return which of `STATES` it is; None for a finite value."""
        if self.y is None:
            return self.state or "failed"
        if math.isnan(self.y):
            return "nan"
        return None if math.isfinite(self.y) else ("inf" if self.y > 0 else "-inf")


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

    name: str
    number: int
    """Which look it has: the same in every panel."""
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """A dashed line across a panel: what the others are measured against."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()
    """Where the horizontal axis has labels; empty: whole numbers."""
    log: Literal["yes", "no", "auto"] = "auto"
    """Whether the vertical axis is logarithmic; `auto`: if values differ by 10 times."""
    log_x: bool = False
    level: Level | None = None
    percent: bool = False
    """Whether values are shares, shown in percent from 0 on."""


def draw_panels(  # noqa: PLR0913 - how a figure is laid out
    panels: Sequence[Panel],
    *,
    width: float,
    columns: int,
    panel_height: float = 1.9,
    title: str = "",
    same_scale: bool = False,
) -> Figure:
    """Return a figure of panels with one legend below.

    Args:
        panels: In reading order.
        width: Inches.
        columns: Panels side by side.
        panel_height: Inches of one row.
        title: Above all panels.
        same_scale: Whether all vertical axes are the same: where panels show one quantity of
            several models, heights are compared across them.
    """
    shared = panels if same_scale else ()
    rows = math.ceil(len(panels) / columns)
    handles, names = _legend(panels)
    per_row = _legend_columns(names, width)
    height = rows * panel_height + math.ceil(len(names) / per_row) * _LEGEND_ROW
    height += _LEGEND_ROW if title else 0.0
    figure = new_figure(width, height)
    grid = figure.subplots(rows, columns, squeeze=False)
    for at, axes in enumerate(grid.flat):
        if at < len(panels):
            _draw(axes, panels[at], shared or (panels[at],))
            axes.set_title(wrapped(panels[at].title, width / columns - 0.55))
        else:
            axes.set_axis_off()
    if title:
        figure.suptitle(wrapped(title, width), fontsize=8.0)
    legend = figure.legend(
        handles,
        [str(at) for at in range(len(names))],  # a name may begin with an underscore
        loc="outside lower center",
        ncols=per_row,
        frameon=False,
        handlelength=2.4,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)
    return figure


def _draw(axes: Axes, panel: Panel, scaled: Sequence[Panel]) -> None:
    """Draw a panel on the scale of all of `scaled`."""
    level = panel.level
    if level is not None and math.isfinite(level.value):
        axes.axhline(level.value, color="black", linewidth=0.9, linestyle=(0, (5, 2)), zorder=1.5)
    drawn = [value for item in scaled for value in _heights(item)]
    ends = [end for item in scaled for end in _ends(item)]
    strips = max(len(_marked(item)) for item in scaled)
    has_log = _is_log(panel, drawn)
    _scale(axes, [*drawn, *ends], has_log=has_log, percent=panel.percent, strips=strips)
    for series in panel.series:
        _line(axes, series, factor=_factor(panel))
    _strip(axes, _marked(panel))
    if panel.log_x:
        axes.set_xscale("log", base=2)
    _ticks(axes, panel, [point for series in panel.series for point in series.points])
    axes.set_xlabel(plain(panel.x_label))
    axes.set_ylabel(plain(panel.y_label))


def _factor(panel: Panel) -> float:
    return 100.0 if panel.percent else 1.0


def _heights(panel: Panel) -> list[float]:
    """Return the finite values of a panel, its level among them."""
    points = (point for series in panel.series for point in series.points)
    found = [p.y * _factor(panel) for p in points if p.mark is None and p.y is not None]
    if panel.level is not None and math.isfinite(panel.level.value):
        found.append(panel.level.value)
    return found


def _ends(panel: Panel) -> list[float]:
    points = (point for series in panel.series for point in series.points)
    bounds = (end for point in points for end in (point.low, point.high))
    return [end * _factor(panel) for end in bounds if end is not None and math.isfinite(end)]


def _marked(panel: Panel) -> list[Series]:
    """Return the series with a value that has no place on the axis."""
    return [s for s in panel.series if any(point.mark for point in s.points)]


def _usable(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _is_log(panel: Panel, values: Sequence[float]) -> bool:
    positive = bool(values) and min(values) > 0.0
    if panel.log == "auto":
        return positive and max(values) >= LOG_SPREAD * min(values)
    return positive and panel.log == "yes"


def _scale(
    axes: Axes, values: Sequence[float], *, has_log: bool, percent: bool, strips: int
) -> None:
    """Set the vertical axis so that the strip at the top holds no finite value."""
    found = axis(values, start=0.0, stop=1.0, log=has_log)
    low, high = found.low, found.high
    if percent and values:
        low, high = 0.0, max(high, 1.06 * max(values))
    share = 1.0 - min(0.5, _STRIP * (strips + 0.5)) if strips else 1.0
    axes.set_yscale("log" if found.log else "linear")
    top = low * (high / low) ** (1.0 / share) if found.log else low + (high - low) / share
    axes.set_ylim(low, top)
    locator = MaxNLocator(5, steps=[1, 2, 5, 10])
    ticks = log_ticks(low, high) if found.log else list(locator.tick_values(low, high))
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(ticks if values else [], [tick_text(t) for t in ticks] if values else [])
    axes.minorticks_off()
    if strips:
        corner = (0.0, share)
        band = Rectangle(corner, 1.0, 1.0 - share, transform=axes.transAxes, color="0.93", zorder=0)
        band.set_linewidth(0)
        axes.add_patch(band)


def log_ticks(low: float, high: float) -> list[float]:
    """Return two to six round numbers between the ends of a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for leads in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [lead * 10.0**power for power in range(first, last + 1) for lead in leads]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) <= _MOST_TICKS:
            return found if len(found) > 1 else [low, high]
    return found[:: math.ceil(len(found) / _MOST_TICKS)]


def _line(axes: Axes, series: Series, *, factor: float) -> None:
    style = look(series.number)
    finite = [point for point in series.points if point.mark is None and point.y is not None]
    # A line is broken where a value is missing between two others.
    x = [point.x for point in series.points]
    y = [
        math.nan if point.mark is not None or point.y is None else point.y * factor
        for point in series.points
    ]
    every = max(1, math.ceil(len(x) / 10))
    (line,) = axes.plot(
        x,
        y,
        color=style.colour,
        marker=style.marker,
        linestyle=style.dashes,
        markerfacecolor="white",
        markeredgewidth=0.8,
        markevery=(series.number % every, every),  # apart where lines lie on one another
    )
    line.set_gid(series.name)
    banded = [point for point in finite if _usable(point.low) and _usable(point.high)]
    if banded:
        lows = [(point.low or 0.0) * factor for point in banded]
        highs = [(point.high or 0.0) * factor for point in banded]
        at = [point.x for point in banded]
        axes.fill_between(at, lows, highs, color=style.colour, alpha=0.18, linewidth=0)
        axes.vlines(at, lows, highs, color=style.colour, linewidth=0.8)


def _strip(axes: Axes, marked: Sequence[Series]) -> None:
    for row, series in enumerate(marked):
        for point in series.points:
            if point.mark is None:
                continue
            axes.plot(
                [point.x],
                [1.0 - _STRIP * (row + 0.75)],
                transform=axes.get_xaxis_transform(),
                color=look(series.number).colour,
                marker=STATES[point.mark][0],
                markerfacecolor="none",
                markersize=4.0,
                linestyle="none",
                gid=f"{series.name}:{point.mark}",
            )


def _ticks(axes: Axes, panel: Panel, points: Sequence[Point]) -> None:
    if panel.x_ticks:
        every = max(1, math.ceil(len(panel.x_ticks) / 9))
        kept = panel.x_ticks[::every]
        axes.set_xticks([x for x, _ in kept], [plain(label, 12) for _, label in kept])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.minorticks_off()
    if not panel.log_x and points:
        low, high = min(p.x for p in points), max(p.x for p in points)
        room = 0.04 * (high - low) or 0.5
        axes.set_xlim(low - room, high + room)


def _legend(panels: Sequence[Panel]) -> tuple[list[Line2D], list[str]]:
    """Return handles and names: series, dashed lines, and the marks that occur."""
    series = {item.number: item for panel in panels for item in panel.series}
    handles, names = [], []
    for number, item in sorted(series.items()):
        style = look(number)
        handles.append(
            Line2D(
                [],
                [],
                color=style.colour,
                marker=style.marker,
                linestyle=style.dashes,
                markerfacecolor="white",
                markeredgewidth=0.8,
            )
        )
        names.append(plain(item.name, 40))
    for name in dict.fromkeys(panel.level.name for panel in panels if panel.level is not None):
        handles.append(Line2D([], [], color="black", linewidth=0.9, linestyle=(0, (5, 2))))
        names.append(plain(name, 40))
    marks = {p.mark for panel in panels for s in panel.series for p in s.points}
    for state, (marker, meaning) in STATES.items():
        if state in marks:
            handles.append(
                Line2D([], [], color="0.3", marker=marker, markerfacecolor="none", linestyle="none")
            )
            names.append(meaning)
    return handles, names


def _legend_columns(names: Sequence[str], width: float) -> int:
    longest = max((len(name) for name in names), default=1)
    return max(1, min(len(names), int(width / (_LEGEND_HANDLE + _LEGEND_CHAR * longest))))
