"""Which record on disk answers a cell: one of the same scores may have more or less besides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oasis_eval.baseline import Baseline
from oasis_eval.cells import Cell
from oasis_eval.plan import is_question
from oasis_eval.record import RunRecord, read_record


def find_record(out: Path, cell: Cell) -> RunRecord | None:
    """Return the cell's record in a folder, whatever its status; one with numbers if there is one.

    Raises:
        RecordError: The record is damaged.
    """
    if cell.data is None:
        return None
    without = None
    for key in (cell.key, *_keys_with_more(cell)):
        path = out / f"{key}.json"
        if path.exists():
            record = read_record(path)
            if record.status == "ok":
                return record
            without = without or record
    return without


def finished_record(out: Path, cell: Cell, *, retry_failed: bool) -> RunRecord | None:
    """Return the cell's record if nothing is to be done for it.

    Args:
        out: Folder of records.
        cell: With its texts and the digest of its checkpoint.
        retry_failed: Whether an attempt without numbers leaves something to be done.

    Raises:
        RecordError: The record is damaged.
    """
    record = find_record(out, cell)
    if record is None or (record.status != "ok" and cell.can_run and retry_failed):
        return None
    can_add = record.status == "ok" and Baseline(out, quiet=True).can_add(cell, record.metrics)
    return None if can_add else record


def find_scores(out: Path, cell: Cell) -> RunRecord | None:
    """Return the record of the cell's scores, with some but not all that is asked for besides.

    Raises:
        RecordError: It is damaged.
    """
    for key in (cell.key, *keys_with_less(cell)):
        path = out / f"{key}.json"
        if path.exists() and (record := read_record(path)).status == "ok":
            return record
    return None


def _keys_with_more(cell: Cell) -> list[str]:
    """Return the keys of records that have all that the cell asks for, and more."""
    return _keys(cell, lambda wanted, has: wanted <= has)


def keys_with_less(cell: Cell) -> list[str]:
    """Return the keys of records with the cell's scores and less besides, the fullest first."""
    return _keys(cell, lambda wanted, has: has <= wanted)


def _keys(cell: Cell, fits: Callable[[set[str], set[str]], bool]) -> list[str]:
    spec = cell.spec
    dtype = spec.fidelity or cell.reference_dtype
    wanted = {name for name in ("diagnostics", "fidelity") if getattr(spec, name)}
    names = {"diagnostics"} - ({"diagnostics"} if is_question(spec.task) else set())
    names |= {"fidelity"} if dtype is not None else set()
    found = []
    for has in (names, {"diagnostics"} & names, {"fidelity"} & names, set[str]()):
        if has != wanted and fits(wanted, has):
            fidelity = dtype if "fidelity" in has else None
            found.append(cell.key_with(diagnostics="diagnostics" in has, fidelity=fidelity))
    return list(dict.fromkeys(found))
