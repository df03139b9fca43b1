"""One cell on a model that is ready: scores, diagnostics, distance from the unquantized model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from oasis_eval import ranks
from oasis_eval.baseline import NO_ANSWERS, Baseline
from oasis_eval.cells import Cell, provenance
from oasis_eval.harness import run as harness
from oasis_eval.harness.protocols import parse_protocol
from oasis_eval.lookup import find_scores
from oasis_eval.record import RunRecord, read_samples, write_record, write_samples
from oasis_eval.spec import RunSpec

if TYPE_CHECKING:
    from oasis_eval.diagnostics.measure import Diagnostics
    from oasis_eval.prepared import PreparedModel

Samples = list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """How the cells of one scheme are measured."""

    out: Path
    """Folder of records, some of which may have a part of what is asked for."""
    baseline: Baseline
    """What they are compared with."""
    quiet: bool
    """Whether to hide progress bars."""

    def of(
        self, prepared: PreparedModel, cell: Cell, *, batch_size: int
    ) -> tuple[RunRecord, Samples]:
        """Measure what is asked for and is not in a record of the same scores already.

        Args:
            prepared: The model under the cell's scheme.
            cell: With its texts and the digest of its checkpoint.
            batch_size: Sequences of one forward pass, which may be fewer than the cell asks for.

        Returns:
            The record and what is stored beside it.
        """
        run = cell.spec
        record = ranks.current().first(lambda: find_scores(self.out, cell))
        if record is None:
            record, samples = self._scored(prepared, cell, batch_size)
            if run.diagnostics or run.fidelity is not None:
                self._keep(cell, record, samples)
        else:
            samples = read_samples(self.out, record.key)
        clock = time.perf_counter()
        assert record.provenance is not None
        scoring_seconds = record.provenance.seconds or 0.0
        metrics, protocols, layers = record.metrics, record.protocols, record.layers
        warnings = list(record.warnings)
        if run.diagnostics and not _has(record, "diagnostics"):
            found = _diagnose(prepared, cell, batch_size)
            metrics += found.as_metrics(run.task.name)
            protocols += (found.protocol,)
            layers = found.layers
            warnings += found.warnings
            warnings += _smaller_batch(run, batch_size, "diagnostics measured")
        if run.fidelity is not None and not _has(record, "fidelity"):
            compared = self.baseline.compare(prepared, cell, samples)
            if compared.metrics:  # what was missing before
                warnings = [text for text in warnings if not text.startswith(NO_ANSWERS)]
            metrics += compared.metrics
            protocols += compared.protocols
            warnings += compared.warnings
            if len(compared.rows) == len(samples):
                samples = [
                    {**sample, **row} for sample, row in zip(samples, compared.rows, strict=True)
                ]
        return record.model_copy(
            update={
                "key": cell.key,
                "spec": run,
                "metrics": metrics,
                "protocols": protocols,
                "layers": layers,
                "warnings": tuple(dict.fromkeys(warnings)),
                # Who scored, and how long everything took: what comes besides may come later.
                "provenance": record.provenance.model_copy(
                    update={"seconds": round(scoring_seconds + time.perf_counter() - clock, 3)}
                ),
            }
        ), samples

    def _keep(self, cell: Cell, record: RunRecord, samples: Samples) -> None:
        """Store scores before anything besides is measured, whatever becomes of that."""
        key = cell.key_with(diagnostics=False, fidelity=None)
        spec = cell.spec.model_copy(update={"diagnostics": False, "fidelity": None})

        def write() -> None:
            if samples:
                write_samples(self.out, key, samples)
            write_record(self.out, record.model_copy(update={"key": key, "spec": spec}))

        ranks.current().first(write)

    def _scored(
        self, prepared: PreparedModel, cell: Cell, batch_size: int
    ) -> tuple[RunRecord, Samples]:
        """Return the cell's scores and nothing besides."""
        started, clock = datetime.now(UTC), time.perf_counter()
        run = cell.spec
        assert cell.data is not None
        outcome = harness.evaluate(
            prepared, run.task, cell.data, batch_size=batch_size, quiet=self.quiet
        )
        warnings = [*prepared.warnings, *outcome.warnings]
        warnings += _smaller_batch(run, batch_size, "measured")
        data = cell.data.infos
        if cell.calibration is not None and cell.calibration.sha256 == data[0].sha256:
            warnings.append("calibration and evaluation read the same text")
        if cell.calibration is not None:
            data = (*data, cell.calibration)
        record = RunRecord(
            key=cell.key,
            spec=run,
            card=cell.card,
            status="ok",
            metrics=outcome.metrics,
            coverage=prepared.coverage,
            protocols=(outcome.protocol,),
            data=data,
            warnings=tuple(warnings),
            provenance=provenance(prepared, started=started, seconds=time.perf_counter() - clock),
        )
        return record, outcome.samples


def _smaller_batch(run: RunSpec, batch_size: int, what: str) -> list[str]:
    if batch_size == run.batch_size:
        return []
    return [f"out of memory with a batch of {run.batch_size}: {what} with {batch_size}"]


def _diagnose(prepared: PreparedModel, cell: Cell, batch_size: int) -> Diagnostics:
    """Measure on the very windows that were scored."""
    from oasis_eval.diagnostics.measure import measure

    assert cell.data is not None
    windows = harness.input_windows(prepared, cell.spec.task, cell.data)
    by_position = parse_protocol(cell.spec.task.protocol).kind == "context"
    return measure(prepared, windows, batch_size=batch_size, by_position=by_position)


def _has(record: RunRecord, kind: str) -> bool:
    """Tell whether a record has what is measured besides scores."""
    return any(item.name.startswith(f"{kind}-") for item in record.protocols)
