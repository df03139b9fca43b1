"""A process that runs cells for a sweep: `python -m oasis_eval.sweep.worker`.

It reads one line of work from standard input, writes events to standard output, and ends when its
standard input is closed, so that it never outlives the sweep however that ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from oasis_eval.cells import Cell
from oasis_eval.errors import OasisError, OutputError
from oasis_eval.execution import Observer, Rules, Runner
from oasis_eval.plan import Texts
from oasis_eval.record import RunRecord
from oasis_eval.sweep.request import Event, Work

OUTPUT_STATUS = 3
"""Results cannot be written: no other process need try."""


class _Speaker(Observer):
    """Writes what happens as events."""

    def __init__(self, cells: Sequence[Cell], stream: TextIO) -> None:
        self._index = {id(cell): at for at, cell in enumerate(cells)}
        self._stream = stream

    def _say(self, event: Event) -> None:
        print(event.model_dump_json(), file=self._stream, flush=True)

    def loading(self, cell: Cell) -> None:
        self._say(Event(kind="loading", cells=(self._index[id(cell)],)))

    def preparing(self, cell: Cell) -> None:
        self._say(Event(kind="preparing", cells=(self._index[id(cell)],)))

    def started(self, cell: Cell) -> None:
        self._say(Event(kind="started", cells=(self._index[id(cell)],)))

    def finished(self, cell: Cell, record: RunRecord, *, reused: bool) -> None:
        cells = (self._index[id(cell)],)
        self._say(Event(kind="finished", cells=cells, key=record.key, reused=reused))

    def lost(self, cells: Sequence[Cell], error: OasisError) -> None:
        which = tuple(self._index[id(cell)] for cell in cells)
        self._say(Event(kind="lost", cells=which, reason=str(error)))


def main() -> int:
    """Do the work that standard input brings; return the exit status."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no event
    work = Work.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(work.num_threads)
    texts = Texts()
    cells = [request.cell(texts) for request in work.requests]
    rules = Rules(retry_failed=False, cell_seconds=work.cell_seconds, quiet=True)
    try:
        with Runner(Path(work.out), rules, _Speaker(cells, events)) as runner:
            runner.run(cells[work.first :] + cells[: work.first], wait=False)
    except OutputError as error:
        sys.stderr.write(f"{error}\n")
        return OUTPUT_STATUS
    return 0


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os._exit(1)  # records are written whole, so any moment is a good one


if __name__ == "__main__":
    sys.exit(main())
