"""Progress bars on a terminal and in a file."""

from __future__ import annotations

import io
import sys

import pytest

from oasis_eval import progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, quiet: bool | None) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.bar(what="scoring", quiet=quiet, total=500, unit="window") as bar:
        for _ in range(500):
            bar.update()
            bar.refresh() if stream.isatty() else None
    return stream.getvalue()


def test_a_file_gets_two_lines_not_hundreds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning and its end: the work takes no half minute."""
    text = _shown(monkeypatch, io.StringIO(), quiet=False)

    assert text.count("scoring") == 2
    assert "500/500" in text


def test_a_terminal_sees_it_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that is drawn."""
    assert _shown(monkeypatch, _Terminal(), quiet=False).count("scoring") > 100


@pytest.mark.parametrize(("quiet", "terminal"), [(True, True), (True, False), (None, False)])
def test_none(monkeypatch: pytest.MonkeyPatch, quiet: bool | None, terminal: bool) -> None:
    """Where none is wanted, or none without a terminal."""
    stream = _Terminal() if terminal else io.StringIO()

    assert not _shown(monkeypatch, stream, quiet)
