"""Progress of a whole sweep: a live table on a terminal, one line a cell elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from oasis_eval.cells import Cell
from oasis_eval.errors import OasisError
from oasis_eval.execution import Observer
from oasis_eval.record import RunRecord
from oasis_eval.sweep.ledger import Entry, Ledger

_MOST_MODELS = 20
_UNKNOWN_SECONDS = 60.0
"""What a cell of unknown length counts for when time left is shared out."""


class Board(Observer):
    """Shows a ledger while it fills; also passes on to it what happens."""

    def __init__(self, ledger: Ledger, stream: TextIO, *, processes: int) -> None:
        """Begin to measure time.

        Args:
            ledger: Whose `seconds` say what each cell will probably take.
            stream: Where to, usually standard error.
            processes: How many cells run at a time.
        """
        self._ledger = ledger
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._processes = processes
        self._live: Live | None = None
        self._start = time.monotonic()
        self._counted = {id(entry) for entry in ledger.open if entry.cell.can_run}

    def __enter__(self) -> Board:
        if self._console.is_terminal and self._ledger.open:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=2,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    # --- what an observer is told -----------------------------------------------------------

    def loading(self, cell: Cell) -> None:
        """Pass it on."""
        self._ledger.loading(cell)

    def preparing(self, cell: Cell) -> None:
        """Pass it on."""
        self._ledger.preparing(cell)

    def started(self, cell: Cell) -> None:
        """Pass it on."""
        self._ledger.started(cell)

    def finished(self, cell: Cell, record: RunRecord, *, reused: bool) -> None:
        """Pass it on and say it."""
        self._ledger.finished(cell, record, reused=reused)
        entry = self._ledger.entry(cell)
        seconds = record.provenance.seconds if record.provenance else None
        took = f", {duration(seconds)}" if seconds is not None and not reused else ""
        why = f": {record.reason}" if record.reason else ""
        found = " (by another process)" if reused else ""
        self._say(f"{entry.name}: {record.status}{took}{found}{why}")

    def lost(self, cells: Sequence[Cell], error: OasisError) -> None:
        """Pass it on and say it."""
        self._ledger.lost(cells, error)
        what = f"{len(cells)} cells" if len(cells) > 1 else self._ledger.entry(cells[0]).name
        self._say(f"{what}: no record: {error}")

    # --- how it is shown --------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self._live is not None:
            return  # the table says it, and the summary names what failed
        done = len(self._ledger.entries) - len(self._ledger.open)
        width = len(str(len(self._ledger.entries)))
        left = self.seconds_left()
        tail = f"; {duration(left)} left" if self._ledger.open and left is not None else ""
        self._console.print(
            f"[{done:>{width}}/{len(self._ledger.entries)}] {text}{tail}", markup=False
        )

    def seconds_left(self) -> float | None:
        """Return what the open cells will take at the pace of those that ran; None before one."""
        counted = [entry for entry in self._ledger.entries if id(entry) in self._counted]
        took = expected = 0.0
        for entry in counted:
            if entry.record is not None and entry.record.provenance and not entry.reused:
                took += entry.record.provenance.seconds or 0.0
                expected += _expected(entry)
        if not expected:
            return None
        rest = sum(_expected(entry) for entry in counted if entry.is_open)
        return took / expected * rest / self._processes

    def _render(self) -> Group:
        ledger = self._ledger
        left = self.seconds_left()
        head = (
            f"{len(ledger.entries) - len(ledger.open)} of {len(ledger.entries)} cells, "
            f"{duration(time.monotonic() - self._start)} so far"
        )
        if left is not None:
            head += f", about {duration(left)} left"
        table = Table(box=None, pad_edge=False)
        table.add_column("model")
        for name in ("ok", "failed", "unsupported", "left", "now"):
            table.add_column(name, justify="left" if name == "now" else "right")
        rows: dict[str, list[Entry]] = {}
        for entry in ledger.entries:
            rows.setdefault(entry.cell.spec.model, []).append(entry)
        busy = sorted(rows, key=lambda name: not any(e.is_open for e in rows[name]))
        for name in busy[:_MOST_MODELS]:
            counts = [
                sum(entry.state == state for entry in rows[name])
                for state in ("ok", "failed", "unsupported")
            ]
            counts[1] += sum(entry.state == "lost" for entry in rows[name])
            now = [
                f"{entry.cell.spec.scheme.name} {entry.cell.spec.task.name}"
                for entry in rows[name]
                if entry.state == "running"
            ]
            num_open = sum(entry.is_open for entry in rows[name])
            table.add_row(Text(name), *map(str, counts), str(num_open), Text(", ".join(now)))
        more = len(rows) - _MOST_MODELS
        return Group(Text(head), table, *([Text(f"and {more} more models")] if more > 0 else []))


def _expected(entry: Entry) -> float:
    return entry.seconds or _UNKNOWN_SECONDS


def duration(seconds: float) -> str:
    """Return a time for reading: `0.4 s`, `12 s`, `3 min`, `2.5 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
