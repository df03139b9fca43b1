"""Maps: cells, the null set apart, one colour scale, marks for what is no number."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.axes import Axes

from oasis_eval.attention_maps import AttentionMaps, MapInfo
from oasis_eval.errors import RecordError
from oasis_eval.report.figures.attention import attention
from oasis_eval.report.figures.heat import HeatPanel, Words, draw_heat
from oasis_eval.report.figures.style import SMALLEST_POINTS, settings
from tests.report.figures.drawn import all_texts, check_nothing_is_clipped, texts

WORDS = Words("source", "router", "weight", "title")


def heat_panel(rows: int = 3, columns: int = 4, *, has_null: bool = True) -> HeatPanel:
    values = np.linspace(0.0, 1.0, rows * columns).reshape(rows, columns)
    exists = np.tril(np.ones((rows, columns), dtype=bool))
    null = np.linspace(0.5, 0.9, rows) if has_null else None
    names = tuple(f"router {at}" for at in range(rows))
    return HeatPanel("w8a8", "", values, exists, names, tuple(map(str, range(columns))), null)


def cells(axes: Axes, name: str) -> np.ma.MaskedArray:
    """Return the values of the mesh or image called `name`."""
    (found,) = (i for i in (*axes.collections, *axes.images) if i.get_gid() == name)
    return np.ma.asarray(found.get_array())


def test_cells_have_their_values() -> None:
    """What exists is drawn as given, what does not is left white, the null is its own column."""
    given = heat_panel()
    with settings():
        figure = draw_heat([given], WORDS, columns=1, width=3.3)
        axes = figure.axes[0]
        sources, null = cells(axes, "sources"), cells(axes, "null")

        assert np.array_equal(np.ma.getmaskarray(sources), ~given.exists)
        assert np.allclose(sources[given.exists], given.values[given.exists])
        assert given.null is not None
        assert np.allclose(null.ravel(), given.null)
        (mesh,) = (item for item in axes.collections if item.get_gid() == "null")
        left = mesh.get_coordinates()[..., 0].min()
        assert left > 4 - 0.5  # the right edge of the sources: there is a gap
        assert [t.get_text() for t in axes.get_xticklabels()][-1] == "null"
        assert [t.get_text() for t in axes.get_yticklabels()] == list(given.row_labels)
        check_nothing_is_clipped(figure)


def test_rows_and_columns_keep_their_direction() -> None:
    """The first row is on top, the first column left."""
    with settings():
        axes = draw_heat([heat_panel()], WORDS, columns=1, width=3.3).axes[0]

    assert axes.get_ylim() == (2.5, -0.5)
    assert axes.get_xlim()[0] < axes.get_xlim()[1]


def test_one_scale_for_all_panels() -> None:
    """The same share has the same colour wherever it is, also in an image."""
    small, large = heat_panel(), heat_panel(60, 60)
    with settings():
        figure = draw_heat([small, large], WORDS, columns=2, width=6.9)
        drawn = [item for axes in figure.axes[:2] for item in (*axes.collections, *axes.images)]

        assert {type(item).__name__ for item in drawn} == {"QuadMesh", "AxesImage"}
        assert {(item.norm.vmin, item.norm.vmax) for item in drawn} == {(0.0, 1.0)}
        assert {item.get_cmap().name for item in drawn} == {"magma_r"}
        check_nothing_is_clipped(figure)


def test_what_is_no_number_is_hatched() -> None:
    """And not given the colour of zero."""
    given = heat_panel(has_null=False)
    given.values[1, 0] = np.nan
    with settings():
        axes = draw_heat([given], WORDS, columns=1, width=3.3).axes[0]
        (patch,) = axes.patches

        assert patch.get_hatch() == "xxxx"
        assert patch.get_xy() == (-0.5, 0.5)
        assert np.ma.getmaskarray(cells(axes, "sources"))[1, 0]


def test_many_rows_are_labelled_as_far_as_they_fit() -> None:
    """In print no label may lie on the next one or be smaller than seven points."""
    with settings():
        figure = draw_heat([heat_panel(64, 64) for _ in range(3)], WORDS, columns=3, width=6.9)
        figure.draw_without_rendering()
        for axes in figure.axes[:3]:
            boxes = [text.get_window_extent() for text in axes.get_yticklabels()]
            assert len(boxes) > 4
            assert not any(a.overlaps(b) for a, b in pairwise(boxes))
            across = [text.get_window_extent() for text in axes.get_xticklabels()]
            assert not any(a.overlaps(b) for a, b in pairwise(across))

        assert min(text.get_fontsize() for text in all_texts(figure)) >= SMALLEST_POINTS
        check_nothing_is_clipped(figure)


def maps(label: str, *, tokens: int = 5, null: float = 0.0) -> AttentionMaps:
    info = MapInfo(
        label=label,
        scheme="fp32",
        layers=(0, 3),
        heads=(1,),
        tokens=tuple(f"t{at}" for at in range(tokens)),
        token_ids=tuple(range(tokens)),
        checkpoint_sha256="0",
        text_sha256="1",
    )
    weights = np.tril(np.ones((tokens, tokens))) / np.arange(1, tokens + 1)[:, None]
    shape = (2, 1, tokens, tokens)
    given = np.broadcast_to(weights * (1 - null), shape).astype(np.float32).copy()
    return AttentionMaps(info, given, np.full(shape[:3], null, dtype=np.float32))


def test_attention_maps_side_by_side() -> None:
    """A row a layer and head, a column a model, each map as captured, the null beside it."""
    given = [maps("plain"), maps("with $null_1$", null=0.25)]
    with settings():
        (drawing,) = attention(given)
        axes = drawing.figure.axes[:4]
        for at, panel in enumerate(axes):
            item, row = given[at % 2], at // 2
            shown = cells(panel, "sources")
            assert np.allclose(shown.filled(0.0), item.weights[row, 0])
            assert np.allclose(cells(panel, "null").ravel(), item.null[row, 0])
        assert axes[0].get_ylabel() == "layer 0, head 1"
        assert axes[2].get_ylabel() == "layer 3, head 1"
        assert "with $null_1$\nfp32" in texts(drawing.figure)
        check_nothing_is_clipped(drawing.figure)


def test_maps_without_a_null_have_no_column_for_it() -> None:
    """Plain softmax leaves nothing."""
    with settings():
        (drawing,) = attention([maps("plain")])

        assert "null" not in texts(drawing.figure)


def test_maps_of_other_tokens_are_refused() -> None:
    """Side by side means the same text."""
    with pytest.raises(RecordError, match="differ in tokens"):
        list(attention([maps("a"), maps("b", tokens=6)]))


def test_many_maps_are_several_figures() -> None:
    """Four models side by side, and no map twice or left out."""
    with settings():
        drawings = list(attention([maps(f"model {at}") for at in range(6)]))

        assert [len(item.figure.axes) - 1 for item in drawings] == [8, 4]
        assert len({item.stem for item in drawings}) == 2
