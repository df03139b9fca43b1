"""`oasis-eval sweep`: what it prints, and its exit status."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from oasis_eval.sweep.board import Board, duration
from oasis_eval.sweep.grid import expand
from oasis_eval.sweep.ledger import Ledger
from tests.command_line import CommandLine
from tests.sweep.conftest import Grids

Writer = Callable[..., Path]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def write(grid: Grids) -> Callable[..., Path]:
    """Writes `g.yaml` with changes."""

    def write(**changes: object) -> Path:
        value = grid(**changes).model_dump(mode="json", exclude_defaults=True)
        Path("g.yaml").write_text(yaml.safe_dump({"name": "mine", **value}))
        return Path("g.yaml")

    return write


def test_a_sweep_from_a_dry_run_to_a_repeat(call: CommandLine, write: Writer) -> None:
    """Lines of progress, one summary, and status 0 though a backend cannot do a scheme."""
    path = write(schemes=["fp32", "bnb-w4a4"])
    planned = call(["sweep", path, "--out", "runs", "--dry-run"])
    first = call(["sweep", path, "--out", "runs"])
    again = call(["sweep", path, "--out", "runs"])
    done = call(["sweep", path, "--out", "runs", "--dry-run"])

    assert [item.status for item in (planned, first, again, done)] == [0] * 4
    assert planned.out.count("to run  ") == 2
    assert planned.out.count("unsupported  ") == 2
    assert "mine: 4 cells, 2 to run, about" in planned.out
    assert "estimates" in planned.out
    assert not planned.err
    assert re.search(r"^\[3/4\] \./s0 fp32 wikitext2 \(gptq-64\): ok, [\d.]+ s; .* left$",
                     first.err, re.MULTILINE)  # fmt: skip
    assert "mine: 4 cells: 2 ok, 0 failed, 2 unsupported; 0 were there already" in first.out
    assert "2 ok, 0 failed, 2 unsupported; 4 were there already" in again.out
    assert done.out.count(" done\n") == 2


def test_a_failed_cell_is_status_1_with_its_reason(call: CommandLine, write: Writer) -> None:
    """The others are measured."""
    Path("book.txt").write_text("short")

    result = call(["sweep", write(schemes=["fp32"]), "--out", "runs"])

    assert result.status == 1
    assert "failed: ./s0 fp32 bookcorpus (qualcomm-64): " in result.err
    assert "a window needs 64" in result.err
    assert "1 ok, 1 failed" in result.out


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"models": ["./gone"]}, [], "./gone: no such folder"),
        ({"schemes": ["w9a9"]}, [], "w9a9"),
        ({}, ["--jobs", "0"], "--jobs 0: expected 1 or more"),
        ({}, ["--cell-timeout", "-1"], "--cell-timeout -1"),
        ({}, ["--out", "wiki.txt"], "wiki.txt: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    call: CommandLine, write: Writer, changes: dict[str, object], options: list[str], words: str
) -> None:
    """Nothing runs."""
    result = call(["sweep", write(**changes), "--out", "runs", *options])

    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert words in result.err
    assert not list(Path().glob("runs/*.json"))


def test_a_grid_that_is_not_there(call: CommandLine, home: Path) -> None:
    """Named."""
    result = call(["sweep", "gone.yaml"])

    assert (result.status, result.err) == (
        2,
        "error: gone.yaml: cannot be read (No such file or directory)\n",
    )


def test_a_cell_that_will_not_fit_is_said_before_it_starts(
    call: CommandLine, write: Writer
) -> None:
    """In the place of its state, with the reason."""
    result = call(["sweep", write(window=500, tasks=["wikitext2"]), "--dry-run"])

    assert result.status == 0
    assert result.out.count("will not fit") == 2
    assert "a window of 500 tokens, the model has 128 positions" in result.out


def test_progress_on_a_terminal_is_a_table(grid: Grids) -> None:
    """One row a model, with what runs now and how long the rest will take."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    ledger = Ledger(expand(grid(models=["./s0", "./s1"])))
    stream = Terminal()
    with Board(ledger, stream, processes=1) as board:
        board.started(ledger.entries[0].cell)
        board._live.refresh()  # type: ignore[union-attr]
    shown = stream.getvalue()

    assert "0 of 8 cells" in shown
    assert re.search(r"\./s0 +0 +0 +0 +4 +fp32 wikitext2", shown)
    assert re.search(r"\./s1 +0 +0 +0 +4", shown)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (99, "99 s"), (99.6, "2 min"),
     (5940, "99 min"), (7200, "2.0 h")],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    """Two digits or three."""
    assert duration(seconds) == text
