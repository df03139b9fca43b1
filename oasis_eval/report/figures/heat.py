"""Panels of shares as colour: routers over sources, heads over layers, queries over keys.

One colour scale for all panels of a figure. What goes to no source or key (the null) is a column of
its own, set apart by a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from oasis_eval.report.figures.style import SHARES, SMALLEST_POINTS, new_figure, plain, wrapped

Matrix = NDArray[np.float64]

_GAP = 0.6
"""Cells between the sources and the null."""
_LINE_INCHES = 1.25 * SMALLEST_POINTS / 72.0
_CHAR_INCHES = 0.062
_BAR_INCHES = 0.85
_LONGEST_ROW = 16
_MOST_VECTOR_CELLS = 2500
"""Cells of a map from which on it is an image in the PDF, too."""
_TICKS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
_FEW_TICKS = (0.0, 0.05, 0.25, 0.5, 1.0)
_TALL_INCHES = 2.2


@dataclass(frozen=True, slots=True)
class HeatPanel:
    """One map."""

    title: str
    subtitle: str
    """Second line of the title; may be empty."""
    values: Matrix
    """[rows, columns] of shares; NaN is no number."""
    exists: NDArray[np.bool_]
    """[rows, columns]; False: there is no such cell."""
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    null: Matrix | None = None
    """[rows], the column that is set apart; None: there is no null."""
    side: str = ""
    """Left of the map; may be empty."""
    is_written: bool = False
    """Whether every cell also says its share in per cent, for maps of few cells."""


class Words(NamedTuple):
    """What stands around the maps of a figure."""

    x: str
    """Below them."""
    y: str
    """Left of them."""
    bar: str
    """Beside the colour bar."""
    title: str = ""
    """Above them."""


def draw_heat(
    panels: Sequence[HeatPanel],
    words: Words,
    *,
    columns: int,
    width: float,
    panel_height: float | None = None,
) -> Figure:
    """Return a figure of maps with one colour bar.

    Args:
        panels: In reading order.
        words: Around them.
        columns: Panels side by side.
        width: Inches.
        panel_height: Inches of one row; None: as many as the row labels take.
    """
    rows = math.ceil(len(panels) / columns)
    most_rows = max(len(panel.values) for panel in panels)
    if panel_height is None:
        panel_height = min(7.5 / rows, max(1.5, 0.6 + min(most_rows, 28) * _LINE_INCHES))
    figure = new_figure(width, rows * panel_height + 0.35)
    norm = PowerNorm(0.5, vmin=0.0, vmax=1.0)
    grid = figure.subplots(rows, columns, squeeze=False)
    for at, axes in enumerate(grid.flat):
        if at >= len(panels):
            axes.set_axis_off()
            continue
        panel = panels[at]
        _cells(axes, panel, norm)
        room = _axes_width(panel, width=width, columns=columns)
        _labels(axes, panel, height=panel_height - 0.6, width=room)
        lines = [wrapped(line, room) for line in (panel.title, panel.subtitle) if line]
        axes.set_title("\n".join(lines), fontsize=SMALLEST_POINTS)
        axes.set_ylabel(plain(panel.side, 40))
    if words.title:
        figure.suptitle(wrapped(words.title, width), fontsize=8.0)
    figure.supxlabel(plain(words.x), fontsize=8.0)
    figure.supylabel(plain(words.y), fontsize=8.0)
    add_bar(figure, list(grid.flat), norm, words.bar)
    return figure


def _axes_width(panel: HeatPanel, *, width: float, columns: int) -> float:
    """Return about how many inches a map has beside its row labels and the colour bar."""
    longest = max(len(label) for label in panel.row_labels)
    return (width - _BAR_INCHES) / columns - min(longest, _LONGEST_ROW) * _CHAR_INCHES - 0.2


def add_bar(figure: Figure, axes: list[Axes], norm: Normalize, label: str) -> None:
    """Add the colour bar of shares to the right of `axes`."""
    bar = figure.colorbar(
        ScalarMappable(norm=norm, cmap=SHARES), ax=axes, fraction=0.04, pad=0.015, aspect=30
    )
    ticks = _TICKS if figure.get_figheight() > _TALL_INCHES else _FEW_TICKS
    bar.set_ticks(list(ticks), labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    bar.outline.set_linewidth(0.4)
    bar.set_label(plain(label))


def _cells(axes: Axes, panel: HeatPanel, norm: Normalize) -> None:
    num_rows, num_columns = panel.values.shape
    edges_y = np.arange(num_rows + 1) - 0.5
    parts = [(np.arange(num_columns + 1) - 0.5, panel.values, panel.exists, "sources")]
    if panel.null is not None:
        start = num_columns - 0.5 + _GAP
        column = panel.null[:, None]
        parts.append((np.array([start, start + 1.0]), column, np.ones_like(column, bool), "null"))
    for edges_x, values, exists, name in parts:
        shown = np.ma.masked_where(~exists | ~np.isfinite(values), values)
        if values.size > _MOST_VECTOR_CELLS:
            extent = (edges_x[0], edges_x[-1], num_rows - 0.5, -0.5)
            image = axes.imshow(
                shown,
                cmap=colormaps[SHARES],
                norm=norm,
                extent=extent,
                interpolation="none",
                aspect="auto",
            )
            image.set_gid(name)
        else:
            mesh = axes.pcolormesh(edges_x, edges_y, shown, cmap=colormaps[SHARES], norm=norm)
            mesh.set_gid(name)
            mesh.set_edgecolor("face")  # else some viewers show hairlines between the cells
            mesh.set_linewidth(0.1)
        for row, column in np.argwhere(exists & ~np.isfinite(values)):
            corner = (float(edges_x[column]), float(edges_y[row]))
            size = float(edges_x[column + 1] - edges_x[column])
            axes.add_patch(
                Rectangle(corner, size, 1.0, hatch="xxxx", fill=False, edgecolor="0.4", linewidth=0)
            )
    if panel.is_written:
        _write(axes, panel, norm)
    axes.set_ylim(num_rows - 0.5, -0.5)
    axes.set_xlim(-0.5, num_columns - 0.5 + (_GAP + 1.0 if panel.null is not None else 0.0))


def _write(axes: Axes, panel: HeatPanel, norm: Normalize) -> None:
    for row, column in np.argwhere(panel.exists & np.isfinite(panel.values)):
        value = float(panel.values[row, column])
        axes.text(
            column,
            row,
            f"{100.0 * value:.0f}",
            ha="center",
            va="center",
            fontsize=SMALLEST_POINTS,
            color="white" if norm(value) > 0.5 else "black",
        )


def _labels(axes: Axes, panel: HeatPanel, *, height: float, width: float) -> None:
    num_rows, num_columns = panel.values.shape
    every = _round_step(num_rows * _LINE_INCHES / max(height, 0.2))
    rows = range(0, num_rows, every)
    axes.set_yticks(list(rows), [plain(panel.row_labels[row], _LONGEST_ROW) for row in rows])
    longest = max(len(label) for label in panel.column_labels) + 1
    room = max(1, int(width / (longest * _CHAR_INCHES)))
    step = _round_step((num_columns + (2 if panel.null is not None else 0)) / room)
    columns = list(range(0, num_columns, step))
    places = [float(column) for column in columns]
    labels = [plain(panel.column_labels[column], 8) for column in columns]
    if panel.null is not None:
        # Room for the word: columns right before it go without a label.
        near = 0.35 / (width / (num_columns + 1.0 + _GAP))
        null_at = num_columns + _GAP
        kept = [at for at, place in enumerate(places) if place < null_at - near]
        places = [*(places[at] for at in kept), null_at]
        labels = [*(labels[at] for at in kept), "null"]
    axes.set_xticks(places, labels)
    axes.tick_params(length=2.0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _round_step(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, ... that is not below `least`."""
    size = 1
    while True:
        for lead in (1, 2, 5):
            if lead * size >= least:
                return lead * size
        size *= 10
