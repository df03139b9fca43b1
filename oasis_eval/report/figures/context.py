"""Long context: perplexity, sink and null mass over context length and over position.

From records under `context-N` protocols, which score the same tokens whatever N. The left column
shows a point a record, the right one the longest context of each scheme, position by position.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from oasis_eval.positions import last_positions
from oasis_eval.record import RunRecord, perplexity, read_samples
from oasis_eval.report.figures.lines import Panel, Point, Series, draw_panels
from oasis_eval.report.figures.style import TEXT_INCHES, Drawing, stem_of
from oasis_eval.report.html.selection import Selection
from oasis_eval.report.pairs import numbers

_PROTOCOL = re.compile(r"context-(\d+)")
_POSITION = re.compile(r"position\.(\d+)\.(\w+)")
_Z = 1.959963984540054
"""Standard errors to either end of a 95 % interval."""


class _Cell(NamedTuple):
    window: int
    record: RunRecord


def window_of(record: RunRecord) -> int | None:
    """Return N of a record under `context-N`, None under any other protocol."""
    found = _PROTOCOL.fullmatch(record.spec.task.protocol)
    return int(found[1]) if found else None


def context(selection: Selection) -> Iterator[Drawing]:
    """Yield a figure for each model, task and limit, and each seed where there are several."""
    order = {name: at for at, name in enumerate(selection.schemes)}
    groups: dict[tuple[object, ...], dict[str, list[_Cell]]] = {}
    for record in selection.records:
        window = window_of(record)
        if window is not None and record.status == "ok":
            task = record.spec.task
            place = (selection.label(record), task.name, task.limit, record.spec.seed)
            schemes = groups.setdefault(place, {})
            schemes.setdefault(record.spec.scheme.name, []).append(_Cell(window, record))
    for (label, task_name, limit, seed), schemes in groups.items():
        is_only = sum(place[:3] == (label, task_name, limit) for place in groups) == 1
        which = "" if is_only else f", seed {seed}"
        for cells in schemes.values():
            cells.sort(key=lambda cell: cell.window)
        panels = list(_panels(schemes, order, selection))
        title = f"{label}{which}, {task_name}: the same tokens under every context"
        figure = draw_panels(panels, width=TEXT_INCHES, columns=2, title=title)
        more = [] if limit is None else [str(limit)]
        more += [] if is_only else [f"seed-{seed}"]
        yield Drawing(stem_of("context", str(label), str(task_name), *more), figure)


def _panels(
    schemes: Mapping[str, Sequence[_Cell]], order: Mapping[str, int], selection: Selection
) -> Iterator[Panel]:
    windows = sorted({cell.window for cells in schemes.values() for cell in cells})
    longest = {name: cells[-1] for name, cells in schemes.items()}
    over_context = {
        name: tuple(_point(cell, "token_perplexity") for cell in cells)
        for name, cells in schemes.items()
    }
    yield _panel("over context", over_context, order, windows, "perplexity")
    by_position = {name: tuple(_losses(cell, selection)) for name, cell in longest.items()}
    yield _panel("by position, longest context", by_position, order, windows, "perplexity")
    for statistic, label in (
        ("sink_mass", "mass on the first token (%)"),
        ("null_mass", "null mass (%)"),
    ):
        means = {
            name: tuple(_point(c, statistic) for c in cells if c.record.metric(statistic))
            for name, cells in schemes.items()
        }
        if not any(point.y for points in means.values() for point in points):
            continue
        yield _panel("over context", means, order, windows, label)
        along = {name: tuple(_masses(cell, statistic)) for name, cell in longest.items()}
        yield _panel("by position, longest context", along, order, windows, label)


def _panel(
    what: str,
    points: Mapping[str, tuple[Point, ...]],
    order: Mapping[str, int],
    windows: Sequence[int],
    label: str,
) -> Panel:
    is_share = label.endswith("(%)")
    series = tuple(Series(name, order[name], of) for name, of in points.items() if of)
    along = what.startswith("by position")
    most = max(windows)
    ticks = [1 << power for power in range(0, most.bit_length(), 2)] if along else windows
    return Panel(
        title=f"{label.removesuffix(' (%)')} {what}",
        x_label="position (tokens seen)" if along else "context (tokens)",
        y_label=label,
        series=series,
        x_ticks=tuple((float(tick), str(tick)) for tick in ticks),
        log="no" if is_share else "auto",
        log_x=True,
        percent=is_share,
    )


def _point(cell: _Cell, name: str) -> Point:
    metric = cell.record.metric(name)
    if metric is None:
        return Point(float(cell.window), None, state="failed")
    low = high = None
    if metric.stderr is not None and math.isfinite(metric.value):
        reach = _Z * metric.stderr / metric.value  # of the logarithm
        low, high = metric.value * math.exp(-reach), metric.value * math.exp(reach)
    return Point(float(cell.window), metric.value, low, high)


def _losses(cell: _Cell, selection: Selection) -> Iterator[Point]:
    """Yield perplexity by position, from the sums of every window, with its interval over them."""
    rows = read_samples(selection.folder(cell.record.key), cell.record.key)
    # A short last window ends inside of a bucket.
    ends = last_positions(cell.window)
    sums: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        lasts, nats, tokens = (
            [float(value) for value in _listed(row, f"position_{part}")]
            for part in ("last", "nats", "tokens")
        )
        for last, loss, count in zip(lasts, nats, tokens, strict=True):
            bucket = next(end for end in ends if last <= end)
            sums.setdefault(min(bucket, cell.window), []).append((loss, count))
    for last, found in sorted(sums.items()):
        total, count = math.fsum(loss for loss, _ in found), sum(n for _, n in found)
        value = perplexity(total, count)
        low = high = None
        if len(found) > 1 and math.isfinite(value):
            mean, size = total / count, len(found)
            spread = sum((loss - mean * n) ** 2 for loss, n in found) * size / (size - 1)
            reach = _Z * math.sqrt(spread) / count
            low, high = math.exp(mean - reach), math.exp(mean + reach)
        yield Point(float(last), value, low, high)


def _listed(row: Mapping[str, object], column: str) -> list[float]:
    values = row.get(column)
    return (
        numbers([{column: value} for value in values], column) if isinstance(values, list) else []
    )


def _masses(cell: _Cell, statistic: str) -> Iterator[Point]:
    """Yield the mean over layers of a mass by position of the query."""
    layers: dict[int, list[float]] = {}
    for item in cell.record.layers:
        found = _POSITION.fullmatch(item.name)
        if found and found[2] == statistic:
            layers.setdefault(min(int(found[1]), cell.window), []).append(item.value)
    for last, values in sorted(layers.items()):
        yield Point(float(last), math.fsum(values) / len(values))
