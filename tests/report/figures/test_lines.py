"""Panels of lines: what is drawn is what was given, and what cannot be drawn is marked."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from oasis_eval.report.figures.lines import (
    Level,
    Panel,
    Point,
    Series,
    draw_panels,
    log_ticks,
)
from oasis_eval.report.figures.style import SMALLEST_POINTS, look, settings
from tests.report.figures.drawn import all_texts, check_nothing_is_clipped, line, marks, texts


def panel(*series: Series, **changes: object) -> Panel:
    base: dict[str, object] = {"title": "t", "x_label": "x", "y_label": "y", "series": series}
    return Panel(**(base | changes))  # type: ignore[arg-type]


def test_values_are_drawn_as_given() -> None:
    """A line has its points, its interval and its level at their numbers."""
    series = Series("a", 1, (Point(8.0, 10.0, 9.0, 12.0), Point(4.0, 30.0, 20.0, 40.0)))
    with settings():
        figure = draw_panels([panel(series, level=Level("base", 9.5))], width=3.3, columns=1)
        (axes,) = figure.axes

        assert line(axes, "a") == ([8.0, 4.0], [10.0, 30.0])
        assert [float(y) for y in axes.lines[0].get_ydata()] == [9.5, 9.5]
        band, whiskers = axes.collections
        corners = {(round(x, 9), round(y, 9)) for x, y in band.get_paths()[0].vertices}
        assert {(8.0, 9.0), (8.0, 12.0), (4.0, 20.0), (4.0, 40.0)} <= corners
        ends = [path.vertices.tolist() for path in whiskers.get_paths()]
        assert ends == [[[8.0, 9.0], [8.0, 12.0]], [[4.0, 20.0], [4.0, 40.0]]]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "base"]


def test_what_is_not_finite_stands_in_the_strip() -> None:
    """NaN, infinities, failed and unsupported cells have marks above every finite value."""
    series = Series(
        "a",
        0,
        (
            Point(0.0, math.nan),
            Point(1.0, math.inf),
            Point(2.0, -math.inf),
            Point(3.0, None, state="failed"),
            Point(4.0, None, state="unsupported"),
            Point(5.0, 2.0),
            Point(6.0, 3.0),
        ),
    )
    with settings():
        figure = draw_panels([panel(series)], width=3.3, columns=1)
        (axes,) = figure.axes
        found = marks(axes)

        assert found == {
            "a:nan": [0.0],
            "a:inf": [1.0],
            "a:-inf": [2.0],
            "a:failed": [3.0],
            "a:unsupported": [4.0],
        }
        figure.draw_without_rendering()
        strip = min(
            item.get_transform().transform(item.get_xydata())[0][1]
            for item in axes.lines
            if ":" in str(item.get_gid())
        )
        assert strip > axes.transData.transform((6.0, 3.0))[1] + 5.0
        names = [text.get_text() for text in figure.legends[0].get_texts()]
        assert names == [
            "a",
            "infinite",
            "minus infinite",
            "not a number",
            "failed",
            "not supported",
        ]
        assert all(math.isnan(y) for y in line(axes, "a")[1][:5])


@pytest.mark.parametrize(
    ("values", "log", "scale"),
    [
        ((1.0, 9.9), "auto", "linear"),
        ((1.0, 10.0), "auto", "log"),
        ((0.0, 10.0), "auto", "linear"),
        ((1.0, 2.0), "yes", "log"),
        ((-1.0, 2.0), "yes", "linear"),
        ((1.0, 1000.0), "no", "linear"),
        ((math.nan, math.inf), "auto", "linear"),
    ],
)
def test_the_axis_is_logarithmic_where_the_spread_demands(
    values: tuple[float, ...], log: str, scale: str
) -> None:
    """From ten times on, and never with a value that has no logarithm."""
    points = tuple(Point(float(at), value) for at, value in enumerate(values))
    with settings():
        figure = draw_panels([panel(Series("a", 0, points), log=log)], width=3.3, columns=1)

        assert figure.axes[0].get_yscale() == scale
        check_nothing_is_clipped(figure)


def test_shares_are_percent_from_zero() -> None:
    """0.25 is drawn at 25, above an axis that begins at 0."""
    series = Series("a", 0, (Point(0.0, 0.2, 0.1, 0.3), Point(1.0, 0.25)))
    with settings():
        figure = draw_panels([panel(series, percent=True)], width=3.3, columns=1)
        (axes,) = figure.axes

        assert line(axes, "a")[1] == [20.0, 25.0]
        assert axes.get_ylim()[0] == 0.0
        assert axes.get_ylim()[1] >= 30.0


@pytest.mark.parametrize(
    ("low", "high"), [(2.0, 4e5), (3.0, 8.0), (1e-9, 1e12), (9.5, 1200.0), (1.01, 1.02)]
)
def test_ticks_of_a_logarithmic_axis(low: float, high: float) -> None:
    """Two to six, all between the ends."""
    ticks = log_ticks(low, high)

    assert 2 <= len(ticks) <= 6
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(ticks)


def test_names_are_text_and_nothing_else() -> None:
    """Dollars, underscores and what the font lacks neither become mathematics nor vanish."""
    name = "_a$x_1$ 50% #1 \\frac 中\x1b"
    with settings():
        series = Series(name, 0, (Point(0.0, 1.0),))
        figure = draw_panels(
            [panel(series, title=name, x_label=name, y_label=name)],
            width=6.9,
            columns=1,
            title=name,
        )
        shown = "_a$x_1$ 50% #1 \\frac ��"

        assert texts(figure).count(shown) == 5
        assert all(not text.get_parse_math() for text in all_texts(figure))


def test_nothing_is_smaller_than_seven_points_or_clipped() -> None:
    """With twenty series of long names, four panels and a long title."""
    series = [
        Series(f"scheme-with-a-long-name-{at}", at, (Point(0.0, 1.0 + at), Point(29.0, 1e5)))
        for at in range(20)
    ]
    ticks = tuple((float(at), f"{at}") for at in range(30))
    panels = [panel(*series, title="word " * 40, x_ticks=ticks) for _ in range(4)]
    with settings():
        figure = draw_panels(panels, width=6.9, columns=2, title="long " * 60)

        assert min(text.get_fontsize() for text in all_texts(figure)) >= SMALLEST_POINTS
        check_nothing_is_clipped(figure)


def test_series_differ_in_more_than_colour() -> None:
    """Two of the first hundred never look alike; neighbours differ in all three."""
    looks = [look(at) for at in range(100)]

    assert len(set(looks)) == 100
    for one, other in pairwise(looks):
        assert one.colour != other.colour
        assert one.marker != other.marker
        assert one.dashes != other.dashes


def test_panels_can_share_a_scale() -> None:
    """The same ends, ticks and kind of axis, strip included, so heights are compared across."""
    points = ((Point(1.0, 2.0), Point(2.0, 3.0)), (Point(1.0, 40.0), Point(2.0, math.inf)))
    panels = [panel(Series("a", 0, of)) for of in points]
    apart, same = (
        [axes for axes in figure.axes if axes.has_data()]
        for figure in (
            draw_panels(panels, width=6.9, columns=2),
            draw_panels(panels, width=6.9, columns=2, same_scale=True),
        )
    )

    assert len({axes.get_ylim() for axes in apart}) == 2
    assert len({axes.get_ylim() for axes in same}) == 1
    assert {axes.get_yscale() for axes in same} == {"log"}
    assert same[0].get_ylim()[0] <= 2.0
    assert same[0].get_ylim()[1] > 40.0
