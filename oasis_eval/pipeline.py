"""From what was asked for to records on disk: the only place that decides what runs.

A cell whose record exists is not run again. A cell that fails becomes a record too, and the others
go on; one load serves every scheme of a model.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from oasis_eval import checkpoint, registry
from oasis_eval.cells import Cell, provenance
from oasis_eval.errors import (
    CheckpointError,
    DataError,
    OasisError,
    RecordError,
    SpecError,
    UnknownNameError,
)
from oasis_eval.harness import run as harness
from oasis_eval.harness.protocols import (
    QUESTION_TASKS,
    TASKS,
    Protocol,
    new_tokens,
    parse_protocol,
    with_window,
)
from oasis_eval.quant import schemes
from oasis_eval.quant.support import unsupported
from oasis_eval.record import ProtocolInfo, RunRecord, read_record, write_record, write_samples
from oasis_eval.spec import Dtype, EvaluationSpec, ModelCard, QuantScheme, RunSpec, TaskRef

if TYPE_CHECKING:
    from oasis_eval.diagnostics.measure import Diagnostics
    from oasis_eval.loading import Reference
    from oasis_eval.prepared import PreparedModel

Samples = list[dict[str, object]]


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
    """Run every cell that has no record yet.

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
        RecordError: The output folder cannot be written, or holds a damaged record.
    """
    cards = [registry.resolve(name) for name in spec.models]
    chosen = [schemes.resolve(name) for name in spec.schemes]
    tasks = task_refs(spec)
    if spec.diagnostics and all(is_question(task) for task in tasks):
        raise SpecError(
            "diagnostics are measured on the windows of perplexity tasks; found only "
            f"{', '.join(spec.tasks)}: add one, for example wikitext2"
        )
    _check_data_keys(spec)
    _check_folder(out)
    data = [_read_data(task, spec.data.get(f"{task.name}:train")) for task in tasks]
    run = _Run(spec, out, quiet, on_record, Report())
    for name, card in zip(spec.models, cards, strict=True):
        cells = [
            run.cell(name, card, scheme, task, found)
            for scheme in chosen
            for task, found in zip(tasks, data, strict=True)
        ]
        try:
            run.model(cells)
        except OasisError as error:
            run.report.errors.append(error)
    return run.report


def task_refs(spec: EvaluationSpec) -> list[TaskRef]:
    """Return the tasks of a call with their protocols, in order.

    Raises:
        SpecError: A task or protocol is unknown, or a protocol fits no task.
    """
    protocols = [parse_protocol(name) for name in spec.protocols]
    refs: list[TaskRef] = []
    used: set[str] = set()
    for task in spec.tasks:
        for protocol in harness.protocols_for(task, protocols):
            used.add(protocol.name)
            sized = with_window(protocol, spec.window) if spec.window else protocol
            ref = _task_ref(spec, task, sized)
            if ref not in refs:  # a window makes one of protocols that differ in it alone
                refs.append(ref)
    unused = [protocol.name for protocol in protocols if protocol.name not in used]
    if unused:
        raise SpecError(f"protocol {unused[0]!r} fits none of the tasks {', '.join(spec.tasks)}")
    return refs


def _task_ref(spec: EvaluationSpec, task: str, protocol: Protocol) -> TaskRef:
    asks = protocol.kind == "gsm8k"
    return TaskRef(
        name=task,
        protocol=protocol.name,
        data=spec.data.get(task),
        limit=spec.limit,
        max_new_tokens=(asks and spec.max_new_tokens) or new_tokens(task),
        chat_template=spec.chat_template and asks,
    )


def is_question(task: TaskRef) -> bool:
    """Tell whether a task asks questions; the others score text, and have windows to diagnose."""
    return parse_protocol(task.protocol).kind == "gsm8k"


def _check_data_keys(spec: EvaluationSpec) -> None:
    known = {*TASKS, *(f"{task}:train" for task in QUESTION_TASKS), "calibration"}
    for key in spec.data:
        if key not in known:
            raise UnknownNameError("--data key", key, known)


def _check_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise RecordError(f"{out}: cannot be written ({error.strerror}); choose --out") from error


def _read_data(task: TaskRef, fewshot: str | None) -> harness.TaskData | OasisError:
    try:
        return harness.load_data(task, fewshot=fewshot)
    except OasisError as error:
        return error


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of `evaluate`: where its records go and what has come of it so far."""

    spec: EvaluationSpec
    out: Path
    quiet: bool
    on_record: Callable[[RunRecord], object]
    report: Report

    def cell(
        self,
        name: str,
        card: ModelCard,
        scheme: QuantScheme,
        task: TaskRef,
        data: harness.TaskData | OasisError,
    ) -> Cell:
        """Build a cell, with whatever is known to stand in its way."""
        spec = self.spec
        refusal = unsupported(scheme)
        run = RunSpec(
            model=name,
            scheme=scheme,
            task=task,
            dtype=scheme.dtype or spec.dtype or ("fp32" if spec.device == "cpu" else "bf16"),
            seed=spec.seed,
            batch_size=spec.batch_size,
            device=spec.device,
            diagnostics=spec.diagnostics and not is_question(task) and refusal is None,
        )
        cell = Cell(run, card, None if isinstance(data, OasisError) else data)
        if isinstance(data, OasisError):
            cell.problem = data
        cell.unsupported = refusal
        return cell

    def model(self, cells: list[Cell]) -> None:
        """Run one model's cells, scheme by scheme."""
        digest = checkpoint.digest(checkpoint.locate(cells[0].card))
        for cell in cells:
            cell.digest = digest
            self._read_calibration(cell)
        pending = [cell for cell in cells if cell.can_run and self._finished(cell) is None]
        reference: Reference | None = None
        for group in _by_scheme(cells):
            todo = [cell for cell in group if any(cell is other for other in pending)]
            if todo and reference is None:
                reference = self._load(pending)
            results: Iterator[tuple[RunRecord, Samples]] = iter(())
            if todo and reference is not None:
                results = self._scheme(reference, todo, last=todo[-1] is pending[-1])
            for cell in group:
                if any(cell is other for other in todo):
                    self._store(cell, *next(results))
                else:
                    self._keep_without_running(cell)
            for _ in results:  # lets the scheme be taken off the model
                raise AssertionError("more results than cells")

    def _read_calibration(self, cell: Cell) -> None:
        from oasis_eval.calibration import text_of

        settings = cell.spec.scheme.calibration
        if settings is None or cell.unsupported is not None:
            return
        try:
            text = text_of(settings, self.spec.data.get("calibration"))
            name = f"calibration:{text.name}"
            cell.calibration = text.info.model_copy(update={"name": name})
        except DataError as error:
            cell.problem = cell.problem or error

    def _finished(self, cell: Cell) -> RunRecord | None:
        """Return the cell's record if it needs no run; failed cells are tried again."""
        # A record with diagnostics has the scores too.
        keys = dict.fromkeys((cell.key, cell.key_with(diagnostics=not is_question(cell.spec.task))))
        for key in keys:
            path = self.out / f"{key}.json"
            if cell.data is not None and path.exists():
                record = read_record(path)
                if record.status != "failed":
                    return record
        return None

    def _keep_without_running(self, cell: Cell) -> None:
        record = self._finished(cell)
        if record is not None:
            self.report.num_reused += 1
        elif cell.unsupported is not None:
            record = cell.unsupported_record()
            write_record(self.out, record)
        else:
            assert cell.problem is not None
            record = cell.failed_record(cell.problem)
            write_record(self.out, record)
        self._keep(record)

    def _keep(self, record: RunRecord) -> None:
        self.report.records.append(record)
        self.on_record(record)

    def _load(self, pending: list[Cell]) -> Reference:
        """Load the checkpoint in the one dtype that every pending scheme can start from."""
        import torch

        from oasis_eval.loading import load

        torch.manual_seed(self.spec.seed)
        wanted: set[Dtype] = {cell.spec.scheme.dtype or cell.spec.dtype for cell in pending}
        dtype: Dtype = wanted.pop() if len(wanted) == 1 else "fp32"
        self.report.num_loads += 1
        reference = load(pending[0].card, dtype=dtype, device=self.spec.device)
        if reference.digest != pending[0].digest:
            raise CheckpointError(
                f"{pending[0].card.name}: the checkpoint's files changed while they were read; "
                "run again when they are complete"
            )
        return reference

    def _scheme(
        self, reference: Reference, cells: list[Cell], *, last: bool
    ) -> Iterator[tuple[RunRecord, Samples]]:
        """Put one scheme on the model and run its tasks; whatever fails becomes a record."""
        from oasis_eval.loading import prepare

        run = cells[0].spec
        data = self.spec.data.get("calibration")
        remaining = list(cells)
        try:
            with prepare(
                reference, run.scheme, dtype=run.dtype, calibration_data=data, last=last
            ) as prepared:
                while remaining:
                    yield self._measure(prepared, remaining.pop(0))
        except Exception as error:  # noqa: BLE001 - one bad scheme must not end the grid
            for cell in remaining:
                yield cell.failed_record(error), []

    def _measure(self, prepared: PreparedModel, cell: Cell) -> tuple[RunRecord, Samples]:
        started, clock = datetime.now(UTC), time.perf_counter()
        run = cell.spec
        assert cell.data is not None
        if not self.quiet:
            what = f"{run.scheme.name} on {run.task.name} ({run.task.protocol})"
            tqdm.write(f"{cell.card.label}: {what}", file=sys.stderr)
        try:
            outcome = harness.evaluate(
                prepared, run.task, cell.data, batch_size=run.batch_size, quiet=self.quiet
            )
            found = _diagnose(prepared, cell) if run.diagnostics else None
        except Exception as error:  # noqa: BLE001 - one bad cell must not end the grid
            return cell.failed_record(error), []
        warnings = [*prepared.warnings, *outcome.warnings]
        data = cell.data.infos
        if cell.calibration is not None and cell.calibration.sha256 == data[0].sha256:
            warnings.append("calibration and evaluation read the same text")
        if cell.calibration is not None:
            data = (*data, cell.calibration)
        metrics = outcome.metrics
        protocols: tuple[ProtocolInfo, ...] = (outcome.protocol,)
        if found is not None:
            metrics += found.as_metrics(run.task.name)
            protocols += (found.protocol,)
            warnings += found.warnings
        record = RunRecord(
            key=cell.key,
            spec=run,
            card=cell.card,
            status="ok",
            metrics=metrics,
            layers=found.layers if found is not None else (),
            coverage=prepared.coverage,
            protocols=protocols,
            data=data,
            warnings=tuple(warnings),
            provenance=provenance(prepared, started=started, seconds=time.perf_counter() - clock),
        )
        return record, outcome.samples

    def _store(self, cell: Cell, record: RunRecord, samples: Samples) -> None:
        """Write samples first, then the record that makes them count."""
        if samples:
            write_samples(self.out, record.key, samples)
        write_record(self.out, record)
        if record.status == "ok" and cell.identity != record.key:
            # An earlier failure of the same cell to read its texts is answered now.
            (self.out / f"{cell.identity}.json").unlink(missing_ok=True)
        if record.status == "ok" and cell.spec.diagnostics:
            # The same scores without diagnostics would stand in a table twice.
            plain = cell.key_with(diagnostics=False)
            for suffix in (".json", ".samples.jsonl"):
                (self.out / f"{plain}{suffix}").unlink(missing_ok=True)
        self._keep(record)


def _diagnose(prepared: PreparedModel, cell: Cell) -> Diagnostics:
    """Measure on the very windows that were scored."""
    from oasis_eval.diagnostics.measure import measure

    assert cell.data is not None
    windows = harness.input_windows(prepared, cell.spec.task, cell.data)
    return measure(prepared, windows, batch_size=cell.spec.batch_size)


def _by_scheme(cells: list[Cell]) -> list[list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.spec.scheme.content_hash(), []).append(cell)
    return list(groups.values())
