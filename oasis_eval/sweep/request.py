"""Cells as text, for processes that are to run them."""

from __future__ import annotations

from oasis_eval.cells import Cell
from oasis_eval.parsing import Spec
from oasis_eval.plan import Texts
from oasis_eval.quant.support import unsupported
from oasis_eval.spec import Dtype, ModelCard, RunSpec


class CellRequest(Spec):
    """One cell, as far as it is known without its texts."""

    spec: RunSpec
    card: ModelCard
    fewshot_file: str | None
    calibration_file: str | None
    reference_dtype: Dtype | None
    digest: str | None
    """Of the checkpoint, which is compared with what is loaded."""

    @classmethod
    def of(cls, cell: Cell) -> CellRequest:
        """Return the request for a cell."""
        return cls(
            spec=cell.spec,
            card=cell.card,
            fewshot_file=cell.fewshot_file,
            calibration_file=cell.calibration_file,
            reference_dtype=cell.reference_dtype,
            digest=cell.digest,
        )

    def cell(self, texts: Texts) -> Cell:
        """Return the cell with its texts."""
        cell = Cell(
            self.spec,
            self.card,
            unsupported=unsupported(self.spec.scheme),
            digest=self.digest,
            fewshot_file=self.fewshot_file,
            calibration_file=self.calibration_file,
            reference_dtype=self.reference_dtype,
        )
        texts.give(cell)
        return cell


class Work(Spec):
    """What a worker is told, in one line of JSON."""

    out: str
    cell_seconds: float | None
    num_threads: int
    requests: tuple[CellRequest, ...]
    first: int = 0
    """Request whose model this worker begins with; it goes on with the others afterwards."""


class Share(Spec):
    """What a process on a node is told: cells of one checkpoint, each of which it asks for."""

    cell_seconds: float | None
    num_threads: int
    requests: tuple[CellRequest, ...]
    keys: tuple[str, ...]
    """Of each cell's record, as the sweep has it."""


class Answer(Spec):
    """What a process on a node is told when it asks for a cell."""

    granted: bool
    files: dict[str, str]
    """Name and text of what the cell may read of the folder of records."""


class Event(Spec):
    """What a worker says, one line of JSON each."""

    kind: str
    """`loading`, `preparing`, `started`, `finished` or `lost`.

    On a node also `claim` (it asks for a cell), `refused` (it cannot do the sweep's cells), `done`
    (with its share), and `ended`, which is said for a process that has.
    """
    cells: tuple[int, ...]
    """Which requests."""
    key: str = ""
    """Of the record (`finished`)."""
    reused: bool = False
    reason: str = ""
    """`lost`, `refused`, `ended`."""
    record: str = ""
    """Text of its file, where it is on another machine (`finished`)."""
    samples: str = ""
    """Text of the file beside it; none where there is no such file."""
    status: int = 0
    """Exit status (`ended`)."""
