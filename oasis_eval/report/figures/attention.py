"""Attention maps of chosen layers and heads, several models side by side on the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from oasis_eval.attention_maps import AttentionMaps
from oasis_eval.errors import RecordError
from oasis_eval.report.figures.heat import HeatPanel, Words, draw_heat
from oasis_eval.report.figures.style import COLUMN_INCHES, TEXT_INCHES, Drawing, stem_of

Item = TypeVar("Item")

MOST_COLUMNS = 4
MOST_ROWS = 4
_MOST_NAMED_TOKENS = 20
"""Tokens up to which each row has its token beside it."""


def attention(maps: Sequence[AttentionMaps]) -> Iterator[Drawing]:
    """Yield figures: a row a layer and head, a column a model and scheme.

    Raises:
        RecordError: The maps are not of the same tokens, layers and heads.
    """
    if not maps:
        return
    first = maps[0].info
    for other in maps[1:]:
        for name in ("tokens", "layers", "heads"):
            if getattr(other.info, name) != getattr(first, name):
                raise RecordError(
                    f"attention maps cannot stand side by side: {first.label} ({first.scheme}) "
                    f"and {other.info.label} ({other.info.scheme}) differ in {name}; capture them "
                    "with one command, or draw them apart"
                )
    places = [(at, head) for at in range(len(first.layers)) for head in range(len(first.heads))]
    pages = [
        (columns, rows)
        for columns in _parts(maps, MOST_COLUMNS)
        for rows in _parts(places, MOST_ROWS)
    ]
    has_null = any(bool(np.any(item.null > 0.0)) for item in maps)
    for number, (columns, rows) in enumerate(pages, start=1):
        panels = [
            _panel(item, place, has_null=has_null, is_top=place is rows[0], is_left=at == 0)
            for place in rows
            for at, item in enumerate(columns)
        ]
        width = {1: COLUMN_INCHES, 2: 5.1}.get(len(columns), TEXT_INCHES)
        figure = draw_heat(
            panels,
            Words("key", "query", "attention weight"),
            columns=len(columns),
            width=width,
            panel_height=min(2.4, 0.35 + width / len(columns) * 0.85),
        )
        stem = "attention" if len(pages) == 1 else f"attention-{number}"
        labels = dict.fromkeys(item.info.label for item in columns)
        yield Drawing(stem_of(stem, *labels), figure)


def _panel(
    maps: AttentionMaps, place: tuple[int, int], *, has_null: bool, is_top: bool, is_left: bool
) -> HeatPanel:
    info = maps.info
    layer, head = place
    weights = maps.weights[layer, head].astype(np.float64)
    number = len(info.tokens)
    names = [f"{at} {token.strip() or repr(token)}" for at, token in enumerate(info.tokens)]
    labels = names if number <= _MOST_NAMED_TOKENS else [str(at) for at in range(number)]
    visible = np.tril(np.ones((number, number), dtype=bool))
    return HeatPanel(
        title=info.label if is_top else "",
        subtitle=info.scheme if is_top else "",
        side=f"layer {info.layers[layer]}, head {info.heads[head]}" if is_left else "",
        values=weights,
        exists=visible | (weights != 0.0),
        row_labels=tuple(labels),
        column_labels=tuple(str(at) for at in range(number)),
        null=maps.null[layer, head].astype(np.float64) if has_null else None,
    )


def _parts(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
