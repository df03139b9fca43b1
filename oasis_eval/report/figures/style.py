"""How every figure looks, and how it becomes files: sizes of print, safe colours, stable bytes.

Names come from users, so no text is ever read as mathematics (`$`, `_`, `%` and `#` are characters
like others) and a character that the font lacks becomes a replacement character. Series differ in
colour, marker and line style at once. Colours: Okabe and Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from oasis_eval.errors import RecordError, SpecError

FileFormat = Literal["pdf", "png"]
FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)

COLUMN_INCHES = 3.3
"""Width of a column of print."""
TEXT_INCHES = 6.9
"""Width of a page of two columns."""
SMALLEST_POINTS = 7.0
"""Font size below which nothing is set."""
TITLE_CHAR_INCHES = 0.07
"""Mean width of a character of a title."""
SHARES = "magma_r"
"""Colour map of shares: perceptually uniform, light for little, dark for much, also in grey."""
PNG_DOTS = 300
"""Dots an inch."""

_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_DASHES: tuple[tuple[int, tuple[float, ...]], ...] = (
    (0, ()),
    (0, (4, 1.5)),
    (0, (1, 1)),
    (0, (4, 1, 1, 1)),
    (0, (6, 1, 1, 1, 1, 1)),
)
_REPLACEMENT = "\ufffd"
_SETTINGS: dict[str, Any] = {  # by matplotlib's own names
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.labelsize": 8.0,
    "xtick.labelsize": SMALLEST_POINTS,
    "ytick.labelsize": SMALLEST_POINTS,
    "legend.fontsize": SMALLEST_POINTS,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "text.usetex": False,
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": False,
    "pdf.fonttype": 42,  # TrueType, not the type 3 that journals refuse
    "pdf.compression": 6,
    "svg.hashsalt": "oasis-eval",
    "savefig.dpi": PNG_DOTS,
    "figure.dpi": 100,
    "path.simplify": False,
}


class Look(NamedTuple):
    """Colour, marker and line style of a series."""

    colour: str
    marker: str
    dashes: tuple[int, tuple[float, ...]]


class Drawing(NamedTuple):
    """A finished figure and the stem of its files."""

    stem: str
    figure: Figure


def look(number: int) -> Look:
    """Return what series `number` looks like; no two of the first 280 are alike."""
    return Look(
        _COLOURS[number % len(_COLOURS)],
        _MARKERS[number % len(_MARKERS)],
        _DASHES[number % len(_DASHES)],
    )


@contextmanager
def settings() -> Iterator[None]:
    """Hold the settings of print for the length of the block, whatever the user's own are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)  # type: ignore[arg-type]  # its keys are literals
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that size in inches; its parts make room for each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(text: str, length: int = 60) -> str:
    """Return a name as one line of characters that the font has, cut to `length`."""
    shown = "".join(
        char if char.isprintable() and _has_glyph(char) else _REPLACEMENT
        for char in " ".join(text.split())
    )
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"


def wrapped(text: str, inches: float, *, lines: int = 2) -> str:
    """Return a title as at most that many lines that are not wider than `inches`, cut to fit."""
    room = max(4, int(inches / TITLE_CHAR_INCHES))
    found = textwrap.wrap(plain(text, 200), room, break_long_words=True)
    kept = found[:lines]
    if len(found) > lines:
        kept[-1] = f"{kept[-1][: room - 1]}…"
    return "\n".join(kept)


def stem_of(*parts: str) -> str:
    """Return a file name without its ending: letters, digits, dots and dashes."""
    text = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") for part in parts)
    return text[:150] or "figure"


def save(drawing: Drawing, folder: Path, formats: tuple[FileFormat, ...]) -> list[Path]:
    """Write a figure, the same bytes for the same content, and return the files.

    Raises:
        RecordError: A file cannot be written.
    """
    paths = []
    for kind in formats:
        content = encoded(drawing.figure, kind)
        path = folder / f"{drawing.stem}.{kind}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise RecordError(f"{path}: cannot be written ({error.strerror})") from error
        paths.append(path)
    return paths


def encoded(figure: Figure, kind: FileFormat) -> bytes:
    """Return the content of a figure's file: no time stamp, no name of a program version."""
    absent: dict[FileFormat, dict[str, None]] = {
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        "png": {"Software": None},
    }
    buffer = io.BytesIO()
    with settings():
        figure.savefig(buffer, format=kind, metadata=absent[kind], dpi=PNG_DOTS)
    return buffer.getvalue()


def formats_named(names: tuple[str, ...]) -> tuple[FileFormat, ...]:
    """Return the file formats of these names.

    Raises:
        SpecError: There is no such format.
    """
    for name in names:
        if name not in FORMATS:
            raise SpecError(f"--format {name!r}: expected some of {', '.join(FORMATS)}")
    return names  # type: ignore[return-value]  # checked above


@cache
def _characters() -> frozenset[int]:
    path = font_manager.findfont("DejaVu Sans", fallback_to_default=False)
    return frozenset(font_manager.get_font(path).get_charmap())


def _has_glyph(char: str) -> bool:
    return ord(char) in _characters()
