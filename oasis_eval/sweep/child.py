"""Processes that a sweep starts: of this very package, whatever lies in the current folder."""

from __future__ import annotations

import sys
from pathlib import Path

import oasis_eval


def threads(number: int) -> dict[str, str]:
    """Return the environment variables that give a process so many threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(number))


def command(module: str) -> list[str]:
    """Return the command that runs `main` of a module of this package.

    `python -m` would look into the current folder first, where another copy, or something else of
    that name, may lie.

    Args:
        module: `oasis_eval.sweep.worker`, say.
    """
    root = str(Path(oasis_eval.__file__).resolve().parent.parent)
    code = (
        f"import sys; root = {root!r}; root in sys.path or sys.path.insert(0, root); "
        f"from {module} import main; sys.exit(main())"
    )
    return [sys.executable, "-P", "-c", code]
