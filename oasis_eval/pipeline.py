"""From what was asked for to records on disk: one call of `evaluate`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from oasis_eval import ranks
from oasis_eval.cells import Cell
from oasis_eval.errors import OasisError, OutputError, SpecError
from oasis_eval.execution import Observer, Rules, Runner
from oasis_eval.plan import Texts, cells_of
from oasis_eval.record import RunRecord
from oasis_eval.spec import EvaluationSpec


@dataclass(slots=True)
class Report:
    """What a call of `evaluate` did."""

    records: list[RunRecord] = field(default_factory=list)
    errors: list[OasisError] = field(default_factory=list)
    """Errors that left no record (a checkpoint that cannot be loaded)."""
    num_reused: int = 0
    num_loads: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every cell has its numbers."""
        return not self.errors and all(record.status == "ok" for record in self.records)


def evaluate(
    spec: EvaluationSpec,
    out: Path,
    *,
    quiet: bool = False,
    on_record: Callable[[RunRecord], object] = lambda record: None,
) -> Report:
    """Run every cell that has no record yet; failed ones are tried again.

    Args:
        spec: Models, schemes, tasks and how to run them.
        out: Folder of records.
        quiet: Whether to hide progress bars.
        on_record: Called with each record as soon as it is on disk or found there.

    Returns:
        All records of the call, found or made, in the order models, schemes, tasks.

    Raises:
        SpecError: Something named in `spec` does not exist; nothing has run then.
        UnsupportedSchemeError: The parts of a scheme's name contradict each other.
        OutputError: The output folder cannot be written.
    """
    cells = cells_of(spec)
    group = ranks.join(spec.device)
    if group.count > 1 and spec.diagnostics:
        raise SpecError(
            "--diagnostics with several processes: expected one, which measures on whole batches; "
            "scores that are there already are not measured again"
        )
    group.first(lambda: check_folder(out))
    texts = Texts()
    for cell in cells:
        texts.give(cell)
    quiet = quiet or not group.is_first
    seen = _Seen(on_record if group.is_first else lambda record: None, is_shown=not quiet)
    with Runner(out, Rules(quiet=quiet), seen) as runner:
        try:
            runner.run(cells)
        except OutputError as error:
            seen.errors.append(error)
    records = [seen.records[id(cell)] for cell in cells if id(cell) in seen.records]
    return Report(records, seen.errors, seen.num_reused, seen.num_loads)


def check_folder(out: Path) -> None:
    """Make the folder of records, and see whether it can be written.

    Raises:
        OutputError: It cannot.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OutputError(
            f"{out}: cannot be written ({error.strerror}); choose another folder with --out"
        ) from error


class _Seen(Observer):
    """Remembers what came of each cell."""

    def __init__(self, on_record: Callable[[RunRecord], object], *, is_shown: bool) -> None:
        self.records: dict[int, RunRecord] = {}
        self.errors: list[OasisError] = []
        self.num_reused = 0
        self.num_loads = 0
        self._on_record = on_record
        self._is_shown = is_shown

    def loading(self, cell: Cell) -> None:
        self.num_loads += 1

    def started(self, cell: Cell) -> None:
        if self._is_shown:
            run = cell.spec
            what = f"{run.scheme.name} on {run.task.name} ({run.task.protocol})"
            tqdm.write(f"{cell.card.label}: {what}", file=sys.stderr)

    def finished(self, cell: Cell, record: RunRecord, *, reused: bool) -> None:
        self.records[id(cell)] = record
        self.num_reused += reused
        self._on_record(record)

    def lost(self, cells: Sequence[Cell], error: OasisError) -> None:
        self.errors.append(error)
