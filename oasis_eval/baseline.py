"""The unquantized model that the cells of a checkpoint are compared with.

Its passes over texts are kept by `references`; its answers to questions are its own record's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from oasis_eval import progress
from oasis_eval.cells import Cell, versions
from oasis_eval.errors import DataError, OasisError, OutputError
from oasis_eval.fidelity import Fidelity, answer_flips, compare
from oasis_eval.harness.protocols import Window, parse_protocol
from oasis_eval.harness.run import scored_windows
from oasis_eval.loading import Reference as Loaded
from oasis_eval.loading import prepare
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant import schemes
from oasis_eval.record import Metric, ProtocolInfo, read_record, read_samples
from oasis_eval.references import Reference

QUANTIZED_ALREADY = (
    "the checkpoint is quantized already: there is no unquantized model to compare it with"
)
NO_REFERENCE = (
    "predictions are not compared with the unquantized model's: the head of this one needs more "
    "than the backbone's hidden states"
)

NO_ANSWERS = "answers are not compared with the unquantized model's, which are not there"


class Compared(NamedTuple):
    """What comes to a cell's record."""

    metrics: tuple[Metric, ...] = ()
    protocols: tuple[ProtocolInfo, ...] = ()
    rows: Sequence[dict[str, object]] = ()
    """What comes to the samples of each window."""
    warnings: tuple[str, ...] = ()


class Baseline:
    """What the cells of one scheme are compared with."""

    def __init__(self, out: Path, *, quiet: bool) -> None:
        """Begin without anything.

        Args:
            out: Folder of records, for answers.
            quiet: Whether to hide the progress of reference passes.
        """
        self._out = out
        self._quiet = quiet
        self._references: dict[str, Reference] = {}
        self._windows: dict[int, list[Window]] = {}
        self._warning: str | None = None

    def run(self, loaded: Loaded, cells: Sequence[Cell]) -> None:
        """Run the unquantized model over the texts of cells, as far as that is not stored.

        Args:
            loaded: The checkpoint; nothing is quantized in it now.
            cells: Those that are not to be compared, or ask questions, are passed over.

        Raises:
            OutputError: A pass cannot be stored.
        """
        for cell in cells:
            dtype = cell.spec.fidelity
            if dtype is None or _asks(cell):
                continue
            if loaded.applied is not None:
                self._warning = QUANTIZED_ALREADY
                return
            with prepare(loaded, schemes.resolve(dtype), dtype=dtype) as prepared:
                reference = self._references.get(dtype) or Reference(prepared, versions=versions())
                if not reference.is_usable:
                    self._warning = NO_REFERENCE
                    return
                self._references[dtype] = reference
                self._fill(prepared, cell, reference)

    def compare(
        self, prepared: PreparedModel, cell: Cell, samples: list[dict[str, object]]
    ) -> Compared:
        """Compare a model under its scheme with the unquantized one.

        Args:
            prepared: The model.
            cell: What `run` has seen.
            samples: The cell's own, for answers.

        Raises:
            OasisError: The text does not fit the model, or a stored pass has gone.
        """
        assert cell.spec.fidelity is not None
        if _asks(cell):
            return self._answers(cell, samples)
        reference = self._references.get(cell.spec.fidelity)
        if self._warning is not None or reference is None:
            return Compared(warnings=(self._warning or NO_REFERENCE,))
        windows = self._windows.get(id(cell))
        if windows is None:
            raise DataError(f"{cell.spec.task.name}: no reference pass; run again")
        found: Fidelity = compare(prepared, windows, reference)
        rows = found.as_rows()
        return Compared(found.as_metrics(cell.spec.task.name), (found.protocol,), rows)

    def can_add(self, cell: Cell, metrics: Sequence[Metric]) -> bool:
        """Tell whether answers can be compared now that could not be when a record was made."""
        lacks = not any(metric.name.startswith("flips_") for metric in metrics)
        return bool(cell.spec.fidelity) and _asks(cell) and lacks and bool(self._reference(cell))

    def _fill(self, prepared: PreparedModel, cell: Cell, reference: Reference) -> None:
        assert cell.data is not None
        try:
            windows = scored_windows(prepared, cell.spec.task, cell.data)
        except OutputError:
            raise
        except OasisError:  # scoring says the same, in the cell's own record
            return
        what = f"unquantized in {reference.dtype} on {cell.spec.task.name}"
        for window in progress.bar(windows, what=what, quiet=self._quiet, leave=False):
            reference.fill(window)
        self._windows[id(cell)] = windows

    def _answers(self, cell: Cell, samples: list[dict[str, object]]) -> Compared:
        before = self._reference(cell)
        if not before:
            return Compared(
                warnings=(f"{NO_ANSWERS}: evaluate {cell.spec.fidelity} too, then this again",)
            )
        task = cell.spec.task
        return Compared(answer_flips(before, samples, task=task.name, protocol=task.protocol))

    def _reference(self, cell: Cell) -> list[dict[str, object]]:
        """Return the answers of the unquantized model, none where they are not on disk."""
        key = answers_key(cell)
        assert key is not None
        path = self._out / f"{key}.json"
        if not path.exists() or read_record(path).status != "ok":
            return []
        return read_samples(self._out, key)


def answers_key(cell: Cell) -> str | None:
    """Return the key of the record whose answers a cell's are compared with; None: of no record."""
    dtype = cell.spec.fidelity
    if dtype is None or not _asks(cell):
        return None
    update = {
        "scheme": schemes.resolve(dtype),
        "dtype": dtype,
        "fidelity": None,
        "diagnostics": False,
    }
    spec = cell.spec.model_copy(update=update)
    return replace(cell, spec=spec, calibration=None, calibration_file=None).key


def _asks(cell: Cell) -> bool:
    return parse_protocol(cell.spec.task.protocol).asks
