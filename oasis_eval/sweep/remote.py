"""A process that runs cells on a node of a cluster: `python -m oasis_eval.sweep.remote`.

It needs nothing of the sweep's machine but what it is told: it asks for each cell, gets the records
that the cell may read, and says the record that came of it. Checkpoints and texts are its own
node's, and are compared with those of the sweep before anything is measured.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from oasis_eval import checkpoint
from oasis_eval.cells import Cell
from oasis_eval.errors import OasisError, OutputError
from oasis_eval.execution import Observer, Rules, Runner
from oasis_eval.plan import Texts
from oasis_eval.record import RunRecord, record_text
from oasis_eval.spec import ModelCard
from oasis_eval.sweep.request import Answer, Event, Share
from oasis_eval.sweep.worker import OUTPUT_STATUS

_ELSEWHERE = "another one than where the sweep was started"


class _Line:
    """Lines in both directions; the process ends when nobody is at the other end."""

    def __init__(self, stream: TextIO, out: Path) -> None:
        self._stream = stream
        self._out = out
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, event: Event) -> None:
        print(event.model_dump_json(), file=self._stream, flush=True)

    def hear(self) -> str:
        return self._lines.get()

    def _listen(self) -> None:
        rest = b""
        while content := os.read(0, 1 << 16):  # not sys.stdin: see `oasis_eval.sweep.worker`
            *lines, rest = (rest + content).split(b"\n")
            for line in lines:
                self._lines.put(line.decode())
        shutil.rmtree(self._out, ignore_errors=True)
        os._exit(1)


class _Speaker(Observer):
    """Says what happens, records included."""

    def __init__(self, cells: Sequence[Cell], line: _Line, out: Path) -> None:
        self._index = {id(cell): at for at, cell in enumerate(cells)}
        self._line = line
        self._out = out

    def _of(self, cell: Cell) -> tuple[int]:
        return (self._index[id(cell)],)

    def loading(self, cell: Cell) -> None:
        self._line.say(Event(kind="loading", cells=self._of(cell)))

    def preparing(self, cell: Cell) -> None:
        self._line.say(Event(kind="preparing", cells=self._of(cell)))

    def started(self, cell: Cell) -> None:
        self._line.say(Event(kind="started", cells=self._of(cell)))

    def finished(self, cell: Cell, record: RunRecord, *, reused: bool) -> None:
        file = self._out / f"{record.key}.samples.jsonl"
        samples = file.read_text(encoding="utf-8") if file.exists() else ""
        text = record_text(record)
        event = Event(kind="finished", cells=self._of(cell), record=text, samples=samples)
        self._line.say(event)

    def lost(self, cells: Sequence[Cell], error: OasisError) -> None:
        which = tuple(self._index[id(cell)] for cell in cells)
        self._line.say(Event(kind="lost", cells=which, reason=str(error)))


class _Asked:
    """Cells are free if the sweep says so."""

    def __init__(self, keys: Sequence[str], line: _Line, out: Path) -> None:
        self._index = {key: at for at, key in enumerate(keys)}
        self._line = line
        self._out = out

    def claim(self, key: str) -> bool:
        self._line.say(Event(kind="claim", cells=(self._index[key],)))
        answer = Answer.model_validate_json(self._line.hear())
        for name, text in answer.files.items():
            (self._out / name).write_text(text, encoding="utf-8")
        return answer.granted

    def take(self, key: str) -> None:
        self.claim(key)  # what is another's is not kept by the sweep

    def release(self, key: str) -> None:
        """The sweep lets go of a cell when it hears of its end."""

    def close(self) -> None:
        """Nothing is open."""


class Remote:
    """Does one share after the other."""

    def __init__(self, line: _Line, out: Path) -> None:
        self._line = line
        self._out = out
        self._texts = Texts()
        self._digests: dict[ModelCard, str] = {}

    def do(self, share: Share) -> None:
        """Run what the sweep grants of a share.

        Raises:
            OutputError: Nothing can be written here.
        """
        import torch

        torch.set_num_threads(share.num_threads)
        cells = [request.cell(self._texts) for request in share.requests]
        objection = self._objection(cells, share.keys)
        if objection is not None:
            self._line.say(Event(kind="refused", cells=(), reason=objection))
            return
        rules = Rules(retry_failed=False, cell_seconds=share.cell_seconds, quiet=True)
        speaker = _Speaker(cells, self._line, self._out)
        with Runner(self._out, rules, speaker, _Asked(share.keys, self._line, self._out)) as runner:
            runner.run(cells, wait=False)
        self._line.say(Event(kind="done", cells=()))

    def _objection(self, cells: Sequence[Cell], keys: Sequence[str]) -> str | None:
        """Return why these would not be the sweep's cells; None: they are."""
        card = cells[0].card
        if card not in self._digests:
            try:
                self._digests[card] = checkpoint.digest(checkpoint.locate(card))
            except OasisError as error:
                return str(error)
        if self._digests[card] != cells[0].digest:
            return f"its checkpoint {card.name} is {_ELSEWHERE}"
        for cell, key in zip(cells, keys, strict=True):
            if cell.problem is not None or cell.unsupported is not None:
                return str(cell.problem or cell.unsupported)
            if cell.key != key:
                return f"its text of {cell.spec.task.name} or of the calibration is {_ELSEWHERE}"
        return None


def main() -> int:
    """Do the shares that standard input brings; return the exit status."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no event
    out = Path(tempfile.mkdtemp(prefix="oasis-eval-"))
    line = _Line(events, out)
    remote = Remote(line, out)
    try:
        while True:
            remote.do(Share.model_validate_json(line.hear()))
    except OutputError as error:
        sys.stderr.write(f"{error}\n")
        return OUTPUT_STATUS
    finally:
        shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
