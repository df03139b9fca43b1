"""Cells become records: one load a checkpoint, one scheme at a time, whatever fails a record too.

A cell whose record exists is not run again, a cell that another process works on is left to it, and
a cell that fails becomes a record while the others go on. One load serves every scheme of a model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oasis_eval import checkpoint, ranks
from oasis_eval.baseline import Baseline
from oasis_eval.cells import Cell
from oasis_eval.errors import (
    CheckpointError,
    OasisError,
    OutputError,
    QuantizationError,
    RecordError,
    TimeLimitError,
)
from oasis_eval.limits import free_memory, is_out_of_memory, time_limit
from oasis_eval.locks import CellLocks, Locks
from oasis_eval.lookup import find_record, finished_record, keys_with_less
from oasis_eval.measurement import Measurement, Samples
from oasis_eval.record import RunRecord, write_record, write_samples
from oasis_eval.spec import Dtype, ModelCard

if TYPE_CHECKING:
    from oasis_eval.loading import Reference
    from oasis_eval.prepared import PreparedModel

_LEFTOVER = re.compile(r"\.([0-9a-f]{64})\.(json|samples\.jsonl)\..*\.tmp")


@dataclass(frozen=True, slots=True)
class Rules:
    """How cells are run; nothing here changes a number."""

    retry_failed: bool = True
    """Whether a cell whose record has no numbers is run again, if anything can run it."""
    cell_seconds: float | None = None
    """Most seconds that a cell may take, and that putting a scheme on a model may."""
    quiet: bool = False
    """Whether to hide the progress bars of a cell."""


class Observer:
    """Is told what happens to cells; this one does not care."""

    def loading(self, cell: Cell) -> None:
        """A checkpoint is about to be loaded, for this cell and others."""

    def preparing(self, cell: Cell) -> None:
        """A scheme is about to be put on the model, for this cell and others."""

    def started(self, cell: Cell) -> None:
        """A cell is about to be measured."""

    def finished(self, cell: Cell, record: RunRecord, *, reused: bool) -> None:
        """A cell's record is on disk, or was found there."""

    def lost(self, cells: Sequence[Cell], error: OasisError) -> None:
        """Cells can have no record: their checkpoint or their stored record is damaged."""


class Runner:
    """Runs cells into a folder of records."""

    def __init__(
        self, out: Path, rules: Rules, observer: Observer, locks: Locks | None = None
    ) -> None:
        """Open the folder, which must be there.

        Args:
            out: The folder.
            rules: How cells are run.
            observer: Is told what happens.
            locks: Who says which cells are free; None: the folder's own.

        Raises:
            OutputError: It cannot be written.
        """
        self._out = out
        self._rules = rules
        self._observer = observer
        self._locks = locks or CellLocks(out)
        self._keys: dict[int, str] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._locks.close()

    def run(self, cells: Sequence[Cell], *, wait: bool = True) -> list[Cell]:
        """Run cells, model by model; those without their texts are not run.

        Args:
            cells: Each with its texts; the digest of a checkpoint is found where it is not known.
            wait: Whether to wait for the cells that other processes work on, and to run them after
                all if those processes end without a record.

        Returns:
            Cells that another process has; none after waiting.

        Raises:
            OutputError: A result cannot be written; what was written before stays.
        """
        queue = by_model(cells)
        while True:
            held = [self._model(group) for group in queue]
            queue = [group for group in held if group]
            if not queue or not wait:
                return [cell for group in queue for cell in group]
            self.wait(queue[0][0])

    def forget_failure(self, cell: Cell) -> None:
        """Remove the record of a cell that failed, unless another process is at it."""
        key = self._key(cell)
        if not self._locks.claim(key):
            return
        record = find_record(self._out, cell)
        if record is not None and record.status != "ok":
            (self._out / f"{record.key}.json").unlink(missing_ok=True)
        self._locks.release(key)

    def remove_leftovers(self) -> None:
        """Remove files that a process was writing when it was killed."""
        for file in self._out.glob(".*.tmp"):
            match = _LEFTOVER.match(file.name)
            if match is not None and self._locks.claim(match[1]):
                file.unlink(missing_ok=True)
                self._locks.release(match[1])

    def wait(self, cell: Cell) -> None:
        """Return once no other evaluation works on a cell."""

        def take() -> None:
            self._locks.take(self._key(cell))
            self._locks.release(self._key(cell))

        ranks.current().first(take)

    def fail(self, cell: Cell, error: Exception) -> None:
        """Store the failure of a cell.

        Raises:
            OutputError: It cannot be written.
        """
        self._store_alone(cell, cell.failed_record(error))

    def reserve(self, cell: Cell) -> bool:
        """Lock a cell that is to be measured elsewhere.

        Returns:
            Whether it is to be measured; False where another evaluation has it, and where it has a
            record by now, of which the observer is told.
        """
        if not self._claim([cell]):
            return False
        if self._settle(cell):
            self._release(cell)
            return False
        return True

    def keep(self, cell: Cell, record: RunRecord, samples: Samples) -> None:
        """Store what was measured elsewhere of a cell that is reserved, and let go of it.

        Raises:
            OutputError: It cannot be written.
        """
        self._store(cell, record, samples)
        self._release(cell)

    def let_go(self, cell: Cell) -> None:
        """Let others have a cell that was reserved."""
        self._release(cell)

    def _key(self, cell: Cell) -> str:
        if id(cell) not in self._keys:
            self._keys[id(cell)] = cell.key
        return self._keys[id(cell)]

    # --- one model --------------------------------------------------------------------------

    def _model(self, cells: list[Cell]) -> list[Cell]:
        """Run the cells of one model; return those that another process has."""
        try:
            known = {cell.digest for cell in cells} - {None}
            digest = known.pop() if known else checkpoint.digest(checkpoint.locate(cells[0].card))
        except OasisError as error:
            self._observer.lost(cells, error)
            return []
        for cell in cells:
            cell.digest = digest
        pending = _by_scheme([cell for cell in cells if not self._settle(cell)])
        reference: Reference | None = None
        held: list[Cell] = []
        while pending:
            group = pending.pop(0)
            later = [cell for rest in pending for cell in rest]
            claimed = self._claim(group)
            held += [cell for cell in group if not any(cell is other for other in claimed)]
            todo = [cell for cell in claimed if not self._settle(cell)]
            try:
                if todo:
                    reference = reference or self._load([*todo, *later])
                    left = self._scheme(reference, todo, last=not pending)
                    if left is not None:
                        reference = None
                        pending[:0] = [left] if left else []
            except OutputError:
                raise
            except OasisError as error:
                self._observer.lost([*todo, *later], error)
                break
            except Exception as error:  # noqa: BLE001 - one bad checkpoint must not end the grid
                for cell in todo:
                    self._store(cell, cell.failed_record(error), [])
                for cell in later:
                    self.fail(cell, error)
                break
            finally:
                for cell in claimed:
                    self._release(cell)
        return held

    def _claim(self, cells: Sequence[Cell]) -> list[Cell]:
        """Lock the cells that no other evaluation works on, and return them."""
        free = ranks.current().first(lambda: [self._locks.claim(self._key(c)) for c in cells])
        return [cell for cell, is_free in zip(cells, free, strict=True) if is_free]

    def _release(self, cell: Cell) -> None:
        if ranks.current().is_first:
            self._locks.release(self._key(cell))

    def _settle(self, cell: Cell) -> bool:
        """Do what needs no model; False where the cell has to be measured."""
        if cell.problem is None:
            try:
                record = ranks.current().first(lambda: self._finished_record(cell))
            except (RecordError, ranks.RankError) as error:
                self._observer.lost([cell], error)
                return True
            if record is not None:
                self._observer.finished(cell, record, reused=True)
                return True
        if cell.unsupported is not None:
            self._store_alone(cell, cell.unsupported_record())
        elif cell.problem is not None:
            self.fail(cell, cell.problem)
        return not cell.can_run

    def _finished_record(self, cell: Cell) -> RunRecord | None:
        return finished_record(self._out, cell, retry_failed=self._rules.retry_failed)

    def _load(self, cells: Sequence[Cell]) -> Reference:
        """Load the checkpoint in the one dtype that the schemes of all `cells` can start from."""
        import torch

        from oasis_eval.loading import load

        run = cells[0].spec
        self._observer.loading(cells[0])
        torch.manual_seed(run.seed)
        wanted: set[Dtype] = {cell.spec.scheme.dtype or cell.spec.dtype for cell in cells}
        wanted |= {cell.spec.fidelity for cell in cells if cell.spec.fidelity is not None}
        dtype: Dtype = wanted.pop() if len(wanted) == 1 else "fp32"
        with ranks.current().together():
            reference = load(cells[0].card, dtype=dtype, device=run.device)
            if reference.digest != cells[0].digest:
                raise CheckpointError(
                    f"{cells[0].card.name}: the checkpoint's files changed while they were read; "
                    "run again when they are complete"
                )
        return reference

    def _scheme(
        self, reference: Reference, cells: Sequence[Cell], *, last: bool
    ) -> list[Cell] | None:
        """Put one scheme on the model and run its tasks; whatever fails becomes a record.

        Returns:
            None where the reference is as it was; else what is left to do with it loaded again.
        """
        from oasis_eval.loading import prepare

        run = cells[0].spec
        block = prepare(
            reference,
            run.scheme,
            dtype=run.dtype,
            calibration_data=cells[0].calibration_file,
            last=last,
        )
        undo, left = ExitStack(), list(cells)
        baseline = Baseline(self._out, quiet=self._rules.quiet)
        measurement = Measurement(self._out, baseline, self._rules.quiet)
        self._observer.preparing(cells[0])
        try:
            with time_limit(self._rules.cell_seconds), ranks.current().together():
                baseline.run(reference, cells)
                prepared = undo.enter_context(block)
        except Exception as error:  # noqa: BLE001 - one bad scheme must not end the grid
            for cell in left:
                self._store(cell, cell.failed_record(error), [])
            return [] if last or isinstance(error, TimeLimitError) else None
        is_sound = not last
        try:
            with undo:
                while left:
                    result = self._measure(prepared, left[0], measurement)
                    if isinstance(result, TimeLimitError):
                        is_sound = False
                        failed = left.pop(0)
                        self._store(failed, failed.failed_record(result), [])
                        break
                    self._store(left.pop(0), *result)
        except QuantizationError:  # the scheme could not be taken off; what was measured stands
            return left
        return None if is_sound else left

    # --- one cell ---------------------------------------------------------------------------

    def _measure(
        self, prepared: PreparedModel, cell: Cell, measurement: Measurement
    ) -> tuple[RunRecord, Samples] | TimeLimitError:
        """Measure a cell, with half the batch wherever memory does not suffice."""
        self._observer.started(cell)
        batch_size = cell.spec.batch_size
        try:
            with time_limit(self._rules.cell_seconds):
                while True:
                    try:
                        with ranks.current().together():
                            return measurement.of(prepared, cell, batch_size=batch_size)
                    except Exception as error:
                        if batch_size == 1 or not is_out_of_memory(error):
                            raise
                    free_memory()
                    batch_size //= 2
        except TimeLimitError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one bad cell must not end the grid
            return cell.failed_record(error), []

    def _store_alone(self, cell: Cell, record: RunRecord) -> None:
        """Store a record of a cell whose lock is not held."""
        if ranks.current().is_first:
            self._locks.take(self._key(cell))
        self._store(cell, record, [])
        self._release(cell)

    def _store(self, cell: Cell, record: RunRecord, samples: Samples) -> None:
        """Write samples first, then the record that makes them count."""
        if ranks.current().is_first:
            self._write(cell, record, samples)
        self._observer.finished(cell, record, reused=False)

    def _write(self, cell: Cell, record: RunRecord, samples: Samples) -> None:
        if samples:
            write_samples(self._out, record.key, samples)
        write_record(self._out, record)
        if record.status == "ok" and cell.identity != record.key:
            # An earlier failure of the same cell to read its texts is answered now.
            (self._out / f"{cell.identity}.json").unlink(missing_ok=True)
        if record.status == "ok":
            # The same scores with less besides would stand in a table twice.
            for key in keys_with_less(cell):
                for suffix in (".json", ".samples.jsonl"):
                    (self._out / f"{key}{suffix}").unlink(missing_ok=True)


def by_model(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group what one load can serve."""
    groups: dict[tuple[ModelCard, str, int], list[Cell]] = {}
    for cell in cells:
        key = (cell.card, cell.spec.device, cell.spec.seed)
        groups.setdefault(key, []).append(cell)
    return list(groups.values())


def _by_scheme(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group what one quantization can serve."""
    groups: dict[tuple[str, Dtype, str | None], list[Cell]] = {}
    for cell in cells:
        run = cell.spec
        key = (run.scheme.content_hash(), run.dtype, cell.calibration_file)
        groups.setdefault(key, []).append(cell)
    return list(groups.values())
