"""The cells of a sweep and what has come of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oasis_eval import checkpoint
from oasis_eval.cells import Cell
from oasis_eval.errors import OasisError, RecordError
from oasis_eval.execution import Observer
from oasis_eval.lookup import finished_record
from oasis_eval.plan import Texts
from oasis_eval.record import RunRecord
from oasis_eval.spec import ModelCard

State = Literal["open", "running", "ok", "failed", "unsupported", "lost"]
"""`lost`: it can have no record, since its checkpoint or its stored record is damaged."""


@dataclass(slots=True)
class Entry:
    """One cell and what has come of it."""

    cell: Cell
    state: State = "open"
    reason: str | None = None
    """Why it has no numbers, in one line."""
    record: RunRecord | None = None
    reused: bool = False
    """Whether its record was there before."""
    seconds: float | None = None
    """What it is expected to take; None: not known."""

    @property
    def is_open(self) -> bool:
        """Whether it is still to be done."""
        return self.state in ("open", "running")

    @property
    def name(self) -> str:
        """Model, scheme, task and protocol in one line."""
        run = self.cell.spec
        seed = f" (seed {run.seed})" if run.seed else ""
        return f"{run.model}{seed} {run.scheme.name} {run.task.name} ({run.task.protocol})"


class Ledger(Observer):
    """Keeps the entries of a sweep up to date; whoever shows them is told of changes."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.entries = [Entry(cell) for cell in cells]
        self.errors: list[OasisError] = []
        """Each once, though several cells are lost by it."""
        self.num_loads = 0
        self._by_cell = {id(entry.cell): entry for entry in self.entries}

    def entry(self, cell: Cell) -> Entry:
        """Return a cell's entry."""
        return self._by_cell[id(cell)]

    def count(self, state: State) -> int:
        """Return how many cells are in a state."""
        return sum(entry.state == state for entry in self.entries)

    @property
    def open(self) -> list[Entry]:
        """Return what is still to be done, in order."""
        return [entry for entry in self.entries if entry.is_open]

    def identify(self) -> None:
        """Give each cell its texts and the digest of its checkpoint."""
        texts = Texts()
        digests: dict[ModelCard, str | OasisError] = {}
        for entry in self.entries:
            cell = entry.cell
            texts.give(cell)
            if cell.card not in digests:
                try:
                    digests[cell.card] = checkpoint.digest(checkpoint.locate(cell.card))
                except OasisError as error:
                    digests[cell.card] = error
                    self.errors.append(error)
            found = digests[cell.card]
            if isinstance(found, OasisError):
                entry.state, entry.reason = "lost", str(found)
            else:
                cell.digest = found

    def look_up(self, out: Path, *, retry_failed: bool) -> None:
        """Find the cells that have their record already; failed ones may stay open."""
        for entry in self.open:
            try:
                found = self._finished(out, entry, retry_failed=retry_failed)
            except RecordError as error:
                self.lost([entry.cell], error)
                continue
            if found is not None:
                self.finished(entry.cell, found, reused=True)

    def reopen(self, out: Path) -> bool:
        """Open cells again that can be compared with what was not there before; tell whether any.

        Answers to questions are compared with those of the unquantized model, which may have been
        measured after them.
        """
        incomplete = [
            entry
            for entry in self.entries
            if entry.state == "ok" and self._finished(out, entry, retry_failed=False) is None
        ]
        for entry in incomplete:
            entry.state = "open"
        return bool(incomplete)

    @staticmethod
    def _finished(out: Path, entry: Entry, *, retry_failed: bool) -> RunRecord | None:
        if entry.cell.problem is not None:
            return None
        return finished_record(out, entry.cell, retry_failed=retry_failed)

    # --- what an observer is told -----------------------------------------------------------

    def loading(self, cell: Cell) -> None:
        """Count a load."""
        self.num_loads += 1

    def preparing(self, cell: Cell) -> None:
        """Note that a scheme is being put on."""
        self.entry(cell).state = "running"

    def started(self, cell: Cell) -> None:
        """Note that a cell is being measured."""
        self.entry(cell).state = "running"

    def finished(self, cell: Cell, record: RunRecord, *, reused: bool) -> None:
        """Note a cell's record."""
        entry = self.entry(cell)
        entry.state, entry.reason = record.status, record.reason
        entry.record, entry.reused = record, reused

    def lost(self, cells: Sequence[Cell], error: OasisError) -> None:
        """Note that cells can have no record."""
        self.errors.append(error)
        for cell in cells:
            entry = self.entry(cell)
            entry.state, entry.reason = "lost", str(error)
