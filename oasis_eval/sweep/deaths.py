"""What becomes of the cells that a process died with: tried once more, then a failed cell."""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol

from oasis_eval.cells import Cell
from oasis_eval.errors import OasisError, TimeLimitError
from oasis_eval.execution import Runner
from oasis_eval.sweep.ledger import Ledger

GRACE_SECONDS = 30.0
"""After its time limit a cell that is stuck inside one operation is killed with its process."""
MOST_DEATHS = 2


class WorkerError(OasisError):
    """A process that ran cells ended before its time."""


class Busy(Protocol):
    """Whoever runs cells, and what it was last heard to do."""

    cell: Cell | None
    is_loading: bool
    since: float
    is_overdue: bool


class Deaths:
    """Counts with which cells processes died, and gives up on a cell after the second."""

    def __init__(self, ledger: Ledger, runner: Runner, cell_seconds: float | None) -> None:
        """Begin without any.

        Args:
            ledger: Of the sweep.
            runner: Of this process, which stores the failures.
            cell_seconds: Most seconds that a cell may take.
        """
        self._ledger = ledger
        self._runner = runner
        self._cell_seconds = cell_seconds
        self._counts: Counter[int] = Counter()

    def is_overdue(self, worker: Busy) -> bool:
        """Tell whether a cell has to be stopped from outside."""
        if self._cell_seconds is None or worker.cell is None or worker.is_loading:
            return False
        return time.monotonic() - worker.since > self._cell_seconds + GRACE_SECONDS

    def bury(self, worker: Busy, how: str) -> None:
        """See to the cell that a process died with.

        Args:
            worker: The process.
            how: Its last words.
        """
        cell = worker.cell
        if cell is None or not self._ledger.entry(cell).is_open:
            return
        self._ledger.entry(cell).state = "open"
        self._counts[id(cell)] += 1
        if worker.is_overdue:
            limit = f"the time limit of {self._cell_seconds:g} s for a cell was reached"
            self._runner.fail(cell, TimeLimitError(limit))
        elif self._counts[id(cell)] >= MOST_DEATHS:
            what = "twice" if MOST_DEATHS == 2 else f"{MOST_DEATHS} times"
            error = WorkerError(f"{how} ({what} in a row)")
            alike = [
                entry.cell
                for entry in self._ledger.open
                if entry.cell is cell or (worker.is_loading and entry.cell.card == cell.card)
            ]
            for item in alike:
                self._runner.fail(item, error)
