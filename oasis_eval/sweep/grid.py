"""From a grid to its cells: the product, less what it excludes, and what it includes besides."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from oasis_eval import registry
from oasis_eval.cells import Cell
from oasis_eval.errors import OasisError, SpecError, named
from oasis_eval.harness.protocols import TASKS, fits, parse_protocol
from oasis_eval.parsing import parse, read_yaml
from oasis_eval.plan import cells_of, name_clashes
from oasis_eval.spec import SEED, EvaluationSpec, Exclusion, Inclusion, Settings, SweepSpec

MAX_CELLS = 100_000

Place = tuple[str, str, str, str, int]
"""Model, scheme, task, protocol and seed of a cell; a grid has one cell a place."""


def read_grid(path: Path) -> SweepSpec:
    """Read a grid; paths in it are relative to where the program runs, as in `evaluate`.

    Raises:
        SpecError: The file is missing or not a grid.
    """
    value = read_yaml(path)
    if isinstance(value, dict):
        value = {"name": path.stem} | value
    return parse(SweepSpec, value, origin=str(path))


def expand(grid: SweepSpec) -> list[Cell]:
    """Return the cells of a grid, those of one model together; no text or weight is read.

    Raises:
        SpecError: Something named does not exist, an exclusion is of no cell, or there are no
            cells or too many.
        CheckpointError: A model's folder holds none.
        UnsupportedSchemeError: The parts of a scheme's name contradict each other.
    """
    own = list(_calls(grid))
    besides = [part for inclusion in grid.include for part in _included(grid, inclusion)]
    num_cells = sum(map(_size, [*own, *besides]))
    if num_cells > MAX_CELLS:
        raise SpecError(f"{grid.name}: {num_cells:,} cells; a grid has at most {MAX_CELLS:,}")
    found: dict[Place, Cell] = {}
    for part in own:
        found |= _cells(grid, part)
    for number, exclusion in enumerate(grid.exclude, 1):
        out = [place for place in found if _matches(place, exclusion)]
        if not out:
            fields = exclusion.model_dump(exclude_defaults=True)
            shown = ", ".join(f"{name}: {' '.join(map(str, fields[name]))}" for name in fields)
            raise SpecError(
                f"{grid.name}: exclude {number} ({shown}) matches no cell of the grid; correct it "
                "or leave it out"
            )
        for place in out:
            del found[place]
    for part in besides:
        cells = _cells(grid, part)
        together = [cell.spec.scheme for cell in (*found.values(), *cells.values())]
        if clashes := name_clashes({id(scheme): scheme for scheme in together}.values()):
            raise SpecError(f"{grid.name}: {clashes[0]}")
        found |= cells
    if not found:
        raise SpecError(f"{grid.name}: its exclusions leave no cell")
    order = list(dict.fromkeys(place[0] for place in found))
    return sorted(found.values(), key=lambda cell: order.index(cell.spec.model))


def _calls(grid: SweepSpec) -> Iterator[EvaluationSpec]:
    """Yield one call a seed, as `evaluate` would have it; a seed that no model asks for is none."""
    settings = grid.model_dump(include=set(Settings.model_fields))
    for place, asked in enumerate(grid.seeds):
        models = [
            (asked if SEED in name else _own_seed(name, grid), name.replace(SEED, str(asked)))
            for name in grid.models
            if SEED in name or place == 0
        ]
        for seed, group in groupby(models, key=itemgetter(0)):
            names = tuple(name for _, name in group)
            yield EvaluationSpec(
                models=names, schemes=grid.schemes, tasks=grid.tasks, seed=seed, **settings
            )


def _own_seed(name: str, grid: SweepSpec) -> int:
    """Return the seed of a model that is in the grid once."""
    try:
        known = registry.resolve(name).seed
    except OasisError:  # said with everything else that does not exist
        known = None
    return grid.seeds[0] if known is None else known


def _included(grid: SweepSpec, inclusion: Inclusion) -> Iterator[EvaluationSpec]:
    """Yield the calls of an inclusion: the grid's own settings where it has none."""
    given = inclusion.model_fields_set
    changes = {name: getattr(inclusion, name) for name in given}
    tasks = inclusion.tasks if "tasks" in given else grid.tasks
    kinds = {parse_protocol(TASKS[task]).asks for task in tasks if task in TASKS}
    # What is inherited and fits none of these tasks is not meant for them.
    if "protocols" not in given:
        changes["protocols"] = tuple(
            name
            for name in grid.protocols
            if any(fits(parse_protocol(name), task) for task in tasks if task in TASKS)
        )
    if "diagnostics" not in given and kinds == {True}:
        changes["diagnostics"] = False
    return _calls(grid.model_copy(update=changes))


def _cells(grid: SweepSpec, part: EvaluationSpec) -> dict[Place, Cell]:
    """Return the cells of one call by their places."""
    with named(grid.name):
        return {_place(cell): cell for cell in cells_of(part)}


def _size(part: EvaluationSpec) -> int:
    return len(part.models) * len(part.schemes) * len(part.tasks) * max(1, len(part.protocols))


def _place(cell: Cell) -> Place:
    run = cell.spec
    return (run.model, run.scheme.name, run.task.name, run.task.protocol, run.seed)


def _matches(place: Place, exclusion: Exclusion) -> bool:
    model, scheme, task, protocol, seed = place
    models = [pattern.replace(SEED, str(seed)) for pattern in exclusion.models]
    return all(
        not patterns or any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
        for name, patterns in (
            (model, models),
            (scheme, exclusion.schemes),
            (task, exclusion.tasks),
            (protocol, exclusion.protocols),
        )
    ) and (not exclusion.seeds or seed in exclusion.seeds)
