"""The command that runs grids."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from oasis_eval.cli import options, output

if TYPE_CHECKING:
    from oasis_eval.spec import SweepSpec
    from oasis_eval.sweep.cluster import Resources
    from oasis_eval.sweep.ledger import Ledger
    from oasis_eval.sweep.run import Plan

_MOST_REASONS = 20

Executor = Literal["local", "ray"]


def sweep(
    grid: Annotated[Path, typer.Argument(metavar="GRID.yaml", help="Models, schemes, tasks.")],
    out: Annotated[Path, typer.Option(help="Folder of records.")] = options.RECORDS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells and what they would take; run none.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes that share the cores; default: all in this process."),
    ] = None,
    cell_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Most seconds that a cell may take.")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run cells again, too, that have no numbers.")
    ] = False,
    executor: Annotated[
        Executor, typer.Option(help="Where cells run: here, or on the nodes of a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Of the Ray cluster, or auto; default: of this machine alone."
        ),
    ] = None,
    cell_cpus: Annotated[
        int | None, typer.Option(help="Cores of a cell on Ray, and its threads; default: 1.")
    ] = None,
    cell_gpus: Annotated[
        float | None,
        typer.Option(help="GPUs of a cell on Ray; default: 1 where the device is cuda, else 0."),
    ] = None,
) -> None:
    """Run a grid of models, schemes, tasks and seeds, and go on with it after anything.

    A cell that has its record in --out is not run again. Exit status: 0, every cell has its numbers
    or its scheme cannot be done on its model; 1, some cell failed; 2, nothing ran or nothing more
    can be written; 130, interrupted.

    Example: oasis-eval sweep results/sweeps/smollm2.yaml --dry-run
    """
    from oasis_eval.sweep.grid import read_grid
    from oasis_eval.sweep.run import Plan
    from oasis_eval.sweep.run import sweep as run

    spec = read_grid(grid)
    plan = Plan(
        out,
        jobs=jobs,
        retry_failed=retry_failed,
        cell_seconds=cell_timeout,
        resources=_resources(executor, address, cell_cpus, cell_gpus),
    )
    if dry_run:
        _show_plan(spec, plan)
        return
    try:
        ledger = run(spec, plan, sys.stderr)
    except KeyboardInterrupt:
        output.say("interrupted; finished cells are kept, run the same command again to go on")
        raise typer.Exit(130) from None
    _summarize(spec, ledger, out)
    if ledger.count("failed") or ledger.count("lost"):
        raise typer.Exit(1)


def _resources(
    executor: Executor, address: str | None, cpus: int | None, gpus: float | None
) -> Resources | None:
    from oasis_eval.errors import SpecError
    from oasis_eval.sweep.cluster import Resources

    if executor == "ray":
        return Resources(address, cpus=1 if cpus is None else cpus, gpus=gpus)
    given = {"--address": address, "--cell-cpus": cpus, "--cell-gpus": gpus}
    for name, value in given.items():
        if value is not None:
            raise SpecError(f"{name} {value}: only with --executor ray")
    return None


def _summarize(spec: SweepSpec, ledger: Ledger, out: Path) -> None:
    entries = ledger.entries
    output.say_of_cells(
        (entry.record, "warning", text)
        for entry in entries
        if entry.record is not None
        for text in entry.record.warnings
    )
    bad = [entry for entry in entries if entry.state in ("failed", "unsupported")]
    for entry in bad[:_MOST_REASONS]:
        output.say(f"{entry.state}: {entry.name}: {entry.reason}")
    if len(bad) > _MOST_REASONS:
        output.say(f"... and {len(bad) - _MOST_REASONS} more, in the records")
    for error in ledger.errors:
        output.say(f"error: {error}")
    num_failed = ledger.count("failed") + ledger.count("lost")
    num_reused = sum(entry.reused for entry in entries)
    print(  # noqa: T201 - the command's output
        f"{spec.name}: {len(entries)} cells: {ledger.count('ok')} ok, {num_failed} failed, "
        f"{ledger.count('unsupported')} unsupported; {num_reused} were there already\n"
        f"Table: oasis-eval table {out}"
    )


def _show_plan(spec: SweepSpec, plan: Plan) -> None:
    """Print every cell as it stands, and what the sweep would take."""
    from oasis_eval.sweep.board import duration
    from oasis_eval.sweep.estimate import gib
    from oasis_eval.sweep.run import dry_run

    ledger, estimates = dry_run(spec, plan)
    rows = []
    states = {"open": "to run", "ok": "done", "lost": "cannot run"}
    for entry in ledger.entries:
        run = entry.cell.spec
        estimate = estimates.get(id(entry))
        seconds = duration(entry.seconds) if entry.seconds is not None else ""
        memory = gib(estimate.num_bytes) if estimate else ""
        state = states.get(entry.state, entry.state)
        note = entry.reason or (f"from {estimate.source}" if estimate and entry.seconds else "")
        if estimate is not None and estimate.obstacle:
            state, note = "will not fit", estimate.obstacle
        task = f"{run.task.name} ({run.task.protocol})"
        name = f"{run.model} (seed {run.seed})" if run.seed else run.model
        rows.append((name, run.scheme.name, task, state, seconds, memory, note))
    header = ("model", "scheme", "task", "state", "time", "memory", "")
    output.print_rows(header, rows)
    open_ = ledger.open
    seconds_in_all = sum(entry.seconds or 0.0 for entry in open_) / (plan.jobs or 1)
    unknown = sum(entry.seconds is None for entry in open_)
    most = max((item.num_bytes for item in estimates.values() if item), default=0)
    text = f"\n{spec.name}: {len(ledger.entries)} cells, {len(open_)} to run"
    if open_:
        share = f" in {plan.jobs} processes" if plan.jobs else ""
        text += f", about {duration(seconds_in_all)}{share}, at most {gib(most)} a process"
    if unknown:
        text += f"; nothing is known of {unknown}"
    print(f"{text}. Times and memory are estimates.")  # noqa: T201 - the command's output
