"""Passkey retrieval: share of keys found by context length and depth, a map a scheme."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from oasis_eval.record import RunRecord
from oasis_eval.report.figures.heat import HeatPanel, Words, draw_heat
from oasis_eval.report.figures.style import TEXT_INCHES, Drawing, stem_of
from oasis_eval.report.html.selection import Selection

MOST_MAPS = 9
_CELL = re.compile(r"exact_match_(\d+)_depth_([\d.]+)")


def passkey(selection: Selection) -> Iterator[Drawing]:
    """Yield figures with a map for each scheme of a model, protocol and limit.

    Each seed has its own where there are several.
    """
    groups: dict[tuple[str, str, int | None, int], list[HeatPanel]] = {}
    for record in selection.records:
        panel = _panel(record)
        if panel is not None:
            task = record.spec.task
            place = (selection.label(record), task.protocol, task.limit, record.spec.seed)
            groups.setdefault(place, []).append(panel)
    for (label, protocol, limit, seed), panels in groups.items():
        is_only = sum(place[:3] == (label, protocol, limit) for place in groups) == 1
        name = label if is_only else f"{label}, seed {seed}"
        pages = range(0, len(panels), MOST_MAPS)
        for number, start in enumerate(pages, start=1):
            part = panels[start : start + MOST_MAPS]
            columns = min(len(part), 3)
            words = Words(
                "context (tokens)", "depth (%)", "share of keys found", f"{name}: keys found (%)"
            )
            width = {1: 3.3, 2: 5.1}.get(columns, TEXT_INCHES)
            figure = draw_heat(part, words, columns=columns, width=width)
            parts = (limit, None if is_only else f"seed-{seed}", number if len(pages) > 1 else None)
            more = [str(item) for item in parts if item]
            yield Drawing(stem_of("passkey", label, protocol, *more), figure)


def _panel(record: RunRecord) -> HeatPanel | None:
    found: dict[tuple[float, int], float] = {}
    counts = set()
    for metric in record.metrics:
        match = _CELL.fullmatch(metric.name)
        if match:
            found[float(match[2]), int(match[1])] = metric.value
            counts.add(metric.count)
    if not found:
        return None
    depths = sorted({depth for depth, _ in found})
    lengths = sorted({length for _, length in found})
    values = np.full((len(depths), len(lengths)), np.nan)
    exists = np.zeros(values.shape, dtype=bool)
    for (depth, length), value in found.items():
        place = depths.index(depth), lengths.index(length)
        values[place], exists[place] = value, True
    each = "n differs" if len(counts) > 1 else f"n = {counts.pop()} a cell"
    return HeatPanel(
        title=record.spec.scheme.name,
        subtitle=each,
        values=values,
        exists=exists,
        row_labels=tuple(f"{100.0 * depth:g}" for depth in depths),
        column_labels=tuple(str(length) for length in lengths),
        is_written=True,
    )
