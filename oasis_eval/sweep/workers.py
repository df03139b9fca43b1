"""Several processes on one machine: each loads a checkpoint of its own, then helps the others.

Who does what is decided by the locks of the cells alone. The sweep hears of it in events, starts
processes anew where some died, and gives up on a cell with which two of them died.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from oasis_eval.cells import Cell
from oasis_eval.errors import OutputError, RecordError
from oasis_eval.execution import Observer, Runner
from oasis_eval.record import read_record
from oasis_eval.sweep import child
from oasis_eval.sweep.deaths import MOST_DEATHS, Deaths, WorkerError
from oasis_eval.sweep.estimate import num_cores
from oasis_eval.sweep.lastwords import last_words
from oasis_eval.sweep.ledger import Ledger
from oasis_eval.sweep.request import CellRequest, Event, Work
from oasis_eval.sweep.worker import OUTPUT_STATUS


@dataclass(slots=True)
class _Worker:
    """One process and what it was last heard to do."""

    process: subprocess.Popen[str]
    errors: IO[str]
    cell: Cell | None = None
    is_loading: bool = False
    since: float = 0.0
    is_overdue: bool = False

    def last_words(self) -> str:
        """Return the last line that the process wrote, and how it ended."""
        return last_words(self.process.returncode, self.errors)


@dataclass(frozen=True, slots=True)
class Team:
    """Runs the open cells of a ledger in `jobs` processes."""

    ledger: Ledger
    observer: Observer
    runner: Runner
    """Of this process, for cells that are given up."""
    out: Path
    jobs: int
    cell_seconds: float | None

    def run(self) -> None:
        """Run until no cell is open.

        Raises:
            OutputError: A result cannot be written.
            WorkerError: Processes die without running anything.
        """
        deaths = Deaths(self.ledger, self.runner, self.cell_seconds)
        idle = 0
        while self.ledger.open:
            before = len(self.ledger.open)
            dead = self._round([entry.cell for entry in self.ledger.open], deaths)
            for worker in dead:
                deaths.bury(worker, worker.last_words())
            if len(self.ledger.open) < before:
                idle = 0
                continue
            if dead:
                idle += 1
                if idle > MOST_DEATHS * self.jobs:
                    raise WorkerError(f"no cell can be run: {dead[0].last_words()}")
            else:  # what is left is in the hands of other sweeps
                self.runner.wait(self.ledger.open[0].cell)
            self.ledger.look_up(self.out, retry_failed=False)

    def _round(self, cells: Sequence[Cell], deaths: Deaths) -> list[_Worker]:
        """Let processes run what they can of `cells`; return those that died."""
        requests = tuple(CellRequest.of(cell) for cell in cells)
        events: queue.Queue[tuple[_Worker, str | None]] = queue.Queue()
        workers: list[_Worker] = []
        with contextlib.ExitStack() as stack:
            try:
                for first in _firsts(cells, self.jobs):
                    errors = stack.enter_context(tempfile.TemporaryFile("w+"))
                    worker = self._start(requests, first, errors)
                    workers.append(worker)
                    threading.Thread(target=_listen, args=(worker, events), daemon=True).start()
                num_running = len(workers)
                while num_running:
                    try:
                        worker, line = events.get(timeout=1.0)
                    except queue.Empty:
                        _stop_overdue(workers, deaths)
                        continue
                    if line is None:
                        num_running -= 1
                    else:
                        self._hear(worker, _event(line), cells)
            finally:
                for worker in workers:
                    worker.process.kill()
                    worker.process.wait()
                    for pipe in (worker.process.stdin, worker.process.stdout):
                        with contextlib.suppress(OSError):
                            pipe.close()  # type: ignore[union-attr]  # both are pipes
            dead = [worker for worker in workers if worker.process.returncode]
            for worker in dead:
                if worker.process.returncode == OUTPUT_STATUS:
                    raise OutputError(worker.last_words().partition(": ")[2])
                worker.errors = _copy(worker.errors)
            return dead

    def _start(self, requests: tuple[CellRequest, ...], first: int, errors: IO[str]) -> _Worker:
        threads = max(1, num_cores() // self.jobs)
        work = Work(
            out=str(self.out),
            cell_seconds=self.cell_seconds,
            num_threads=threads,
            requests=requests,
            first=first,
        )
        process = subprocess.Popen(  # noqa: S603 - our own command, without a shell
            child.command("oasis_eval.sweep.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            env={**os.environ, **child.threads(threads)},
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once, as will be seen
            process.stdin.write(work.model_dump_json() + "\n")
            process.stdin.flush()
        return _Worker(process, errors)

    def _hear(self, worker: _Worker, event: Event, cells: Sequence[Cell]) -> None:
        concerned = [cells[index] for index in event.cells]
        cell = concerned[0]
        beginnings = {
            "loading": self.observer.loading,
            "preparing": self.observer.preparing,
            "started": self.observer.started,
        }
        if event.kind in beginnings:
            worker.cell, worker.is_loading = cell, event.kind == "loading"
            worker.since = time.monotonic()
            beginnings[event.kind](cell)
            return
        if worker.cell is cell or event.kind == "lost":
            worker.cell = None
        still_open = [item for item in concerned if self.ledger.entry(item).is_open]
        if not still_open:  # another process said so before
            return
        if event.kind == "lost":
            self.observer.lost(still_open, RecordError(event.reason))
            return
        try:
            record = read_record(self.out / f"{event.key}.json")
        except RecordError as error:
            self.observer.lost([cell], error)
            return
        self.observer.finished(cell, record, reused=event.reused)


def _stop_overdue(workers: Sequence[_Worker], deaths: Deaths) -> None:
    for worker in workers:
        if deaths.is_overdue(worker):
            worker.is_overdue = True
            worker.process.kill()


def _event(line: str) -> Event:
    try:
        return Event.model_validate_json(line)
    except ValidationError as error:
        raise WorkerError(
            f"a process of the sweep wrote what is no event: {line[:80]!r}"
        ) from error


def _firsts(cells: Sequence[Cell], jobs: int) -> list[int]:
    """Return where each process begins: at a model of its own while there are enough of them."""
    starts = [at for at, cell in enumerate(cells) if at == 0 or cell.card != cells[at - 1].card]
    if len(starts) >= jobs:
        return [starts[number * len(starts) // jobs] for number in range(jobs)]
    jobs = min(jobs, len(cells))
    return [number * len(cells) // jobs for number in range(jobs)]


def _listen(worker: _Worker, events: queue.Queue[tuple[_Worker, str | None]]) -> None:
    assert worker.process.stdout is not None
    with contextlib.suppress(ValueError):  # closed while it was read: the sweep is ending
        for line in worker.process.stdout:
            events.put((worker, line))
    worker.process.wait()
    events.put((worker, None))


def _copy(errors: IO[str]) -> IO[str]:
    """Return what a file holds, for when it is closed."""
    import io

    errors.seek(0)
    return io.StringIO(errors.read()[-10_000:])
