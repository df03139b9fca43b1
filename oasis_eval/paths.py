"""Where the data folders are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def data_folder(name: Literal["models", "tasks", "results"]) -> Path:
    """Return the folder `models`, `tasks` or `results` of this installation."""
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    return _PACKAGE / "_data" / name


def cache_folder() -> Path:
    """Return where converted checkpoints, reference passes and tokens are kept.

    It is `$OASIS_EVAL_CACHE`, else `oasis-eval` in the user's cache.
    """
    given = os.environ.get("OASIS_EVAL_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "oasis-eval"
