"""A ranking: one bar a label, longest first, with its interval. Knows nothing of what is ranked."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from oasis_eval.errors import RecordError
from oasis_eval.report.figures.lines import STATES
from oasis_eval.report.figures.style import (
    COLUMN_INCHES,
    SMALLEST_POINTS,
    Drawing,
    new_figure,
    plain,
    stem_of,
    wrapped,
)

MOST_BARS = 40
"""Bars of one figure; the rest is counted in the axis label."""
_BAR_INCHES = 0.145
_COLOUR = "#0072B2"


def ranking(
    labels: Sequence[str],
    values: Sequence[float],
    intervals: Sequence[tuple[float, float] | None],
    *,
    value_label: str,
    title: str = "",
) -> Drawing:
    """Return a bar chart in the order of values, the largest on top.

    Call it inside `style.settings()`.

    Args:
        labels: What each value is of; any text.
        values: A value that is not finite stands on top with a mark in place of a bar.
        intervals: Ends of each value's interval, None where there is none.
        value_label: Below the axis, with the unit.
        title: Above.

    Raises:
        ValueError: The three differ in length, or are empty.
    """
    if not len(labels) == len(values) == len(intervals) or not labels:
        raise ValueError(f"{len(labels)} labels, {len(values)} values, {len(intervals)} intervals")
    order = sorted(range(len(values)), key=lambda at: _rank(values[at]), reverse=True)
    kept = order[:MOST_BARS]
    figure = new_figure(COLUMN_INCHES, 0.75 + _BAR_INCHES * len(kept))
    axes = figure.subplots()
    for row, at in enumerate(kept):
        value, interval = values[at], intervals[at]
        if not math.isfinite(value):
            mark = "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
            axes.plot(
                [0.06],
                [row],
                transform=axes.get_yaxis_transform(),
                marker=STATES[mark][0],
                color="black",
                linestyle="none",
                gid=f"{labels[at]}:{mark}",
            )
            axes.text(
                0.12,
                row,
                STATES[mark][1],
                transform=axes.get_yaxis_transform(),
                verticalalignment="center",
                fontsize=SMALLEST_POINTS,
            )
            continue
        axes.barh([row], [value], height=0.7, color=_COLOUR, gid=labels[at])
        if interval is not None and all(math.isfinite(end) for end in interval):
            axes.plot(list(interval), [row, row], color="black", linewidth=0.9, marker="|")
    axes.axvline(0.0, color="black", linewidth=0.6)
    axes.set_ylim(len(kept) - 0.5, -0.5)
    axes.set_yticks(range(len(kept)), [plain(labels[at], 28) for at in kept])
    axes.tick_params(axis="y", length=0.0)
    more = len(order) - len(kept)
    axes.set_xlabel(plain(value_label) + (f"\n({more} smaller ones left out)" if more else ""))
    if title:
        figure.suptitle(wrapped(title, COLUMN_INCHES), fontsize=SMALLEST_POINTS + 1.0)
    return Drawing(stem_of("ranking", title or value_label), figure)


_KEY = re.compile(r"-[0-9a-f]{8}$")
"""What makes a file's name unique and says nothing to a reader."""


class Ranked(NamedTuple):
    """What a file of sensitivities says."""

    stem: str
    """Name of the file without its suffix."""
    labels: tuple[str, ...]
    values: tuple[float, ...]
    intervals: tuple[tuple[float, float] | None, ...]

    def draw(self) -> Drawing:
        """Return its figure."""
        label = "cost in loss (nats a token)"
        title = _KEY.sub("", self.stem)
        found = ranking(self.labels, self.values, self.intervals, value_label=label, title=title)
        return found._replace(stem=stem_of("sensitivity", self.stem))


def read_ranking(path: Path) -> Ranked:
    """Read the CSV of `oasis-eval sensitivity`: columns name, effect_nats, low and high.

    Raises:
        RecordError: It is missing, or no such table.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        values = tuple(float(row["effect_nats"]) for row in rows)
        ends = [(row["low"], row["high"]) for row in rows]
        intervals = tuple((float(low), float(high)) if low and high else None for low, high in ends)
        labels = tuple(row["name"] for row in rows)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise RecordError(
            f"{path}: not a table of sensitivities; expected what `oasis-eval sensitivity` wrote"
        ) from error
    if not rows:
        raise RecordError(f"{path}: a table of sensitivities without a row")
    return Ranked(path.stem, labels, values, intervals)


def _rank(value: float) -> tuple[int, float]:
    """Order values: what is no number first, then by size."""
    return (1, 0.0) if math.isnan(value) else (0, value)
