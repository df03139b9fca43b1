"""The command line called in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from oasis_eval import cli

# A shell starts background jobs with SIGINT ignored, and their children inherit that.
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from oasis_eval.cli import main; main()"
)


class Result(NamedTuple):
    """What a call of the command line left."""

    status: int
    out: str
    err: str


class CommandLine:
    """Runs `oasis-eval ARGUMENTS`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.delenv("OASIS_EVAL_DEBUG", raising=False)
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, arguments: Sequence[object]) -> Result:
        """Return status and output of one call."""
        self._monkeypatch.setattr(sys, "argv", ["oasis-eval", *map(str, arguments)])
        self._capsys.readouterr()
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        captured = self._capsys.readouterr()
        return Result(status, captured.out, captured.err)
