"""LaTeX documents as TeX sees them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

NEEDS_TEX = pytest.mark.skipif(
    shutil.which("pdflatex") is None,
    reason="pdflatex is missing: install texlive-latex-recommended (Debian) or another TeX",
)


def compiled(folder: Path, tables: Sequence[str]) -> str:
    """Set tables in an article that loads booktabs alone, and return what TeX said."""
    head = r"\documentclass{article}" + "\n" + r"\usepackage{booktabs}"
    body = "\n".join([head, r"\begin{document}", *tables, r"\end{document}"])
    (folder / "table.tex").write_text(body, encoding="utf-8")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert (folder / "table.pdf").stat().st_size > 0
    return done.stdout
