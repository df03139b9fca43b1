"""A sweep from its grid to a ledger in which no cell is open, or to what it would take."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from oasis_eval.errors import SpecError
from oasis_eval.execution import Rules, Runner
from oasis_eval.pipeline import check_folder
from oasis_eval.spec import SweepSpec
from oasis_eval.sweep import cluster
from oasis_eval.sweep.board import Board
from oasis_eval.sweep.cluster import Resources
from oasis_eval.sweep.crew import Crew
from oasis_eval.sweep.estimate import Estimate, Estimator
from oasis_eval.sweep.grid import expand
from oasis_eval.sweep.ledger import Entry, Ledger
from oasis_eval.sweep.workers import Team


@dataclass(frozen=True, slots=True)
class Plan:
    """How a grid is run; nothing here changes a number but the threads of `jobs`."""

    out: Path
    """Folder of records."""
    jobs: int | None = None
    """Processes; None: this one."""
    retry_failed: bool = False
    """Whether cells that have no numbers from an earlier sweep are run again."""
    cell_seconds: float | None = None
    """Most seconds that a cell may take."""
    resources: Resources | None = None
    """Of a cell on a cluster of Ray; None: this machine alone, without Ray."""


def sweep(grid: SweepSpec, plan: Plan, stream: TextIO) -> Ledger:
    """Run every cell of a grid that has no record yet.

    Args:
        grid: What to run.
        plan: Where to and how.
        stream: Where progress is shown.

    Raises:
        SpecError: The grid names something that does not exist; nothing has run then.
        OutputError: A result cannot be written; finished cells are kept.
    """
    _check(plan)
    ledger = Ledger(expand(grid))
    resources = _resources(plan, ledger)
    if resources is not None:
        cluster.require()
    check_folder(plan.out)
    ledger.identify()
    ledger.look_up(plan.out, retry_failed=plan.retry_failed)
    estimates(ledger, plan)
    rules = Rules(retry_failed=False, cell_seconds=plan.cell_seconds, quiet=True)
    with ExitStack() as stack:
        nodes, processes = None, plan.jobs or 1
        if resources is not None and ledger.open:
            where = f"cluster {resources.address}" if resources.address else "this machine alone"
            _say(stream, f"Ray: starts ({where})")
            nodes = stack.enter_context(cluster.session(resources))
            room = nodes.room()
            processes = max(1, sum(room.values()))
            _say(stream, f"Ray: {processes} cells at a time on {len(room)} nodes")
        board = stack.enter_context(Board(ledger, stream, processes=processes))
        runner = stack.enter_context(Runner(plan.out, rules, board))
        crew = None
        if nodes is not None:
            crew = stack.enter_context(Crew(ledger, board, runner, plan.out, nodes))
        runner.remove_leftovers()
        if plan.retry_failed:
            for entry in ledger.open:
                runner.forget_failure(entry.cell)
        if crew is not None or plan.jobs is not None:
            runner.run([entry.cell for entry in ledger.open if not entry.cell.can_run])
        for _ in range(2):
            if crew is not None:
                crew.run(plan.cell_seconds)
            elif plan.jobs is None:
                runner.run([entry.cell for entry in ledger.open])
            else:
                Team(ledger, board, runner, plan.out, plan.jobs, plan.cell_seconds).run()
            if not ledger.reopen(plan.out):
                break
    return ledger


def dry_run(grid: SweepSpec, plan: Plan) -> tuple[Ledger, dict[int, Estimate | None]]:
    """Return the cells of a grid as they stand, and what each open one will probably take.

    Nothing is loaded or written; texts of the hub are read, since keys depend on them.

    Raises:
        SpecError: The grid names something that does not exist.
    """
    _check(plan)
    ledger = Ledger(expand(grid))
    _resources(plan, ledger)
    ledger.identify()
    ledger.look_up(plan.out, retry_failed=plan.retry_failed)
    for entry in ledger.open:
        if entry.cell.unsupported is not None:
            entry.state, entry.reason = "unsupported", entry.cell.unsupported
        elif entry.cell.problem is not None:
            entry.state, entry.reason = "failed", str(entry.cell.problem)
    return ledger, estimates(ledger, plan)


def estimates(ledger: Ledger, plan: Plan) -> dict[int, Estimate | None]:
    """Estimate the open cells and note their seconds; by the `id` of an entry."""
    open_: list[Entry] = [entry for entry in ledger.open if entry.cell.can_run]
    digests = {entry.cell.digest for entry in open_ if entry.cell.digest is not None}
    estimator = Estimator(plan.out, digests, processes=plan.jobs or 1)
    found = {id(entry): estimator.of(entry.cell) for entry in open_}
    for entry in open_:
        estimate = found[id(entry)]
        entry.seconds = estimate.seconds if estimate else None
    return found


def _resources(plan: Plan, ledger: Ledger) -> Resources | None:
    cells = [entry.cell for entry in ledger.entries]
    return None if plan.resources is None else plan.resources.fitting(cells)


def _say(stream: TextIO, text: str) -> None:
    """Say what takes a while before there is a cell to show."""
    stream.write(f"{text}\n")
    stream.flush()


def _check(plan: Plan) -> None:
    if plan.jobs is not None and plan.jobs < 1:
        raise SpecError(f"--jobs {plan.jobs}: expected 1 or more")
    if plan.jobs is not None and plan.resources is not None:
        raise SpecError(
            "--jobs is of the processes of this machine; a cluster runs as many cells as it has "
            "room for: see --cell-cpus"
        )
    if plan.cell_seconds is not None and not plan.cell_seconds > 0:
        raise SpecError(f"--cell-timeout {plan.cell_seconds:g}: expected seconds above 0")
