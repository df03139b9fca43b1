"""What a figure really shows, read back from its artists."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text


def line(axes: Axes, name: str) -> tuple[list[float], list[float]]:
    """Return the points of the series called `name`."""
    (found,) = (item for item in axes.lines if item.get_gid() == name)
    return [float(x) for x in found.get_xdata()], [float(y) for y in found.get_ydata()]


def marks(axes: Axes) -> dict[str, list[float]]:
    """Return where the strip has marks: x by `series:state`."""
    result: dict[str, list[float]] = {}
    for item in axes.lines:
        name = str(item.get_gid())
        if ":" in name:
            result.setdefault(name, []).append(float(item.get_xdata()[0]))
    return result


def texts(figure: Figure) -> list[str]:
    """Return every text of a figure that is not empty."""
    return [text.get_text() for text in all_texts(figure)]


def all_texts(figure: Figure) -> Iterator[Text]:
    """Yield the texts of a figure that is drawn."""
    figure.draw_without_rendering()
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_text() and text.get_visible():
            yield text


def check_nothing_is_clipped(figure: Figure) -> None:
    """Everything drawn lies within the figure, and titles do not run into one another."""
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert box.x0 >= -0.01, box
    assert box.y0 >= -0.01, box
    assert box.x1 <= width + 0.01, box
    assert box.y1 <= height + 0.01, box
    titles = [axes.title.get_window_extent() for axes in figure.axes if axes.get_title()]
    for at, one in enumerate(titles):
        for other in titles[at + 1 :]:
            assert not one.overlaps(other), (one, other)
