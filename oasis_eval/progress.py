"""Progress bars: one kind for all long work."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_SECONDS_IN_A_FILE = 30.0
"""Between two lines where standard error is no terminal: a bar that moves is a line each time."""


def bar(
    work: Iterable[Any] | None = None, *, what: str, quiet: bool | None, **more: Any
) -> tqdm[Any]:
    """Return a bar on standard error.

    Args:
        work: What to go through; None: the caller moves the bar.
        what: Stands before it.
        quiet: Whether to show none; None: none where there is no terminal.
        more: tqdm's `total`, `initial`, `unit`, `leave`.
    """
    return tqdm(
        work,
        desc=what,
        disable=quiet,
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else _SECONDS_IN_A_FILE,
        **more,
    )
