"""Which cell of A is compared with which cell of B, and their samples side by side.

Cells meet by task and protocol, and by model, scheme and seed where both sides have several of
them. What was not measured alike is refused, field by name, before a number is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from oasis_eval.errors import NoMatchError, RecordError
from oasis_eval.record import RunRecord, read_samples
from oasis_eval.report.comparable import check_names, check_pair, grouped
from oasis_eval.report.observations import Observation, chosen
from oasis_eval.report.store import find_records

Samples = list[dict[str, object]]

_LOSS_TOLERANCE = 1e-6
_TEXT_PLACE = ("document", "window", "num_tokens")
_QUESTION_PLACE = ("question", "text", "reference")


@dataclass(frozen=True, slots=True)
class Cell:
    """One record of one side: its numbers, and where its samples lie."""

    folder: Path
    numbers: tuple[Observation, ...]
    """Those that the side's filters keep; the one line of a record without numbers."""

    @property
    def record(self) -> RunRecord:
        """Return the record behind the numbers."""
        return self.numbers[0].record

    @property
    def name(self) -> str:
        """Return what messages call it."""
        first = self.numbers[0]
        return f"record {first.key[:16]} ({first.model}, {first.scheme}, {first.task})"

    def number(self, metric: str) -> Observation | None:
        """Return the number called `metric`, or None."""
        return next((item for item in self.numbers if item.metric == metric), None)


class Pair(NamedTuple):
    """Two cells to compare."""

    first: Cell
    second: Cell


class Pairing(NamedTuple):
    """All pairs, and which cells have no partner."""

    pairs: list[Pair]
    alone: list[str]
    """One sentence each."""


class PairedSamples(NamedTuple):
    """Values of the same windows, or of answers to the same questions, row by row."""

    kind: str
    """`text` or `questions`."""
    first: Samples
    second: Samples


def read_side(path: Path, where: Mapping[str, tuple[str, ...]], *, name: str) -> list[Cell]:
    """Read one side of a comparison.

    Args:
        path: A folder of records or one record.
        where: Filters, as those of a table.
        name: `A` or `B`, for messages.

    Raises:
        RecordError: There are no records, or none matches.
        SpecError: A filter is on no field.
    """
    try:
        records = find_records([path], where=where)
        if not records:
            raise NoMatchError("no records there")
        kept = chosen(records, where)
    except NoMatchError as error:
        raise NoMatchError(f"{name} ({path}): {error}") from None
    folder = path if path.is_dir() else path.parent
    return [Cell(folder, tuple(items)) for items in grouped(kept, lambda item: item.key)]


def pair_cells(first: Sequence[Cell], second: Sequence[Cell]) -> Pairing:
    """Match the cells of two sides.

    A side with one cell for a task and protocol is compared with each cell of the other; the same
    record is not compared with itself.

    Raises:
        RecordError: Nothing can be paired, or several cells could be the partner of one.
    """
    for side in (first, second):
        check_names([item for cell in side for item in cell.numbers])
    sides = [_by_task(first), _by_task(second)]
    pairs: list[Pair] = []
    alone: list[str] = []
    for task in dict.fromkeys((*sides[0], *sides[1])):
        if task not in sides[0] or task not in sides[1]:
            alone.append(f"Only in {'A' if task in sides[0] else 'B'}: {task}.")
            continue
        protocols = [_by_protocol(side[task]) for side in sides]
        common = [name for name in protocols[0] if name in protocols[1]]
        if not common:
            check_pair(sides[0][task][0].numbers[0], sides[1][task][0].numbers[0])
        for name in dict.fromkeys((*protocols[0], *protocols[1])):
            if name in common:
                found = _match(protocols[0][name], protocols[1][name])
                pairs += found.pairs
                alone += found.alone
            else:
                alone.append(f"Only in {'A' if name in protocols[0] else 'B'}: {task} by {name}.")
    if not pairs:
        tasks = [", ".join(sorted(side)) for side in sides]
        raise RecordError(
            f"nothing to compare: A has {len(first)} records ({tasks[0]}), B has {len(second)} "
            f"({tasks[1]}), and none differs from its partner; choose the two sides with "
            "--where-a and --where-b, for example scheme=fp32 and scheme=w8a8"
        )
    return Pairing(pairs, alone)


def _by_task(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.numbers[0].task, []).append(cell)
    return found


def _by_protocol(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.numbers[0].protocol, []).append(cell)
    return found


def _match(first: Sequence[Cell], second: Sequence[Cell]) -> Pairing:
    """Match cells of one task and protocol by the dimensions that both sides have several of."""
    by = [
        name
        for name in ("model", "scheme", "seed")
        if min(len({_at(cell, name) for cell in side}) for side in (first, second)) > 1
    ]

    def groups(cells: Sequence[Cell]) -> dict[tuple[str, ...], list[Cell]]:
        found: dict[tuple[str, ...], list[Cell]] = {}
        for cell in cells:
            found.setdefault(tuple(_at(cell, name) for name in by), []).append(cell)
        return found

    ours, theirs = groups(first), groups(second)
    pairs, alone = [], []
    for key in dict.fromkeys((*ours, *theirs)):
        ones, others = ours.get(key, []), theirs.get(key, [])
        if not ones or not others:
            alone += [f"Only in {'A' if ones else 'B'}: {cell.name}." for cell in ones or others]
        elif min(len(ones), len(others)) > 1:
            names = "; ".join(cell.name for cell in ones[:2])
            raise RecordError(
                f"A and B each have several records of {ones[0].numbers[0].task} to pair, for "
                f"example {names}; keep one of them with --where-a or --where-b"
            )
        else:
            pairs += [
                Pair(one, other)
                for one in ones
                for other in others
                if one.record.key != other.record.key
            ]
    return Pairing(pairs, alone)


def _at(cell: Cell, name: str) -> str:
    return str(getattr(cell.numbers[0], name))


def paired_samples(pair: Pair) -> PairedSamples:
    """Read the samples of two finished cells and check that they are of the same text, in order.

    Raises:
        RecordError: Samples are missing, damaged, not those of their record, or do not line up.
    """
    first, second = (_own_samples(cell) for cell in pair)
    kinds = ["questions" if "question" in rows[0] else "text" for rows in (first, second)]
    place = _QUESTION_PLACE if kinds[0] == "questions" else _TEXT_PLACE
    names = f"{pair.first.name} and {pair.second.name}"
    if len(first) != len(second):
        raise RecordError(
            f"{names} do not line up: {len(first)} and {len(second)} {_unit(kinds[0])}; "
            "compare runs on the same text with the same tokenizer"
        )
    for one, other in zip(first, second, strict=True):
        for key in place:
            if one.get(key) != other.get(key):
                where = ", ".join(f"{name} {one.get(name)}" for name in place[:2] if name != "text")
                raise RecordError(
                    f"{names} do not line up at {where}: {key} is {str(one.get(key))[:60]} in A "
                    f"and {str(other.get(key))[:60]} in B; compare runs on the same text with the "
                    "same tokenizer"
                )
    return PairedSamples(kinds[0], first, second)


def _unit(kind: str) -> str:
    return "questions" if kind == "questions" else "windows"


def _own_samples(cell: Cell) -> Samples:
    rows = read_samples(cell.folder, cell.record.key)
    if not rows:
        raise RecordError(
            f"{cell.name} has no samples beside it in {cell.folder}, and without them nothing is "
            "paired (imported results have none); evaluate again, or copy "
            f"{cell.record.key[:16]}*.samples.jsonl there too"
        )
    for metric, column in (("nll_nats", "nll_nats"), ("num_tokens", "num_tokens")):
        stored = cell.record.metric(metric)
        if stored is None or "question" in rows[0]:
            continue
        if not _close(stored.value, math.fsum(numbers(rows, column))):
            raise RecordError(
                f"{cell.name}: its samples do not add up to its {metric}; one of the two files "
                "was changed, evaluate again"
            )
    return rows


def _close(stored: float, summed: float) -> bool:
    if not math.isfinite(stored) or not math.isfinite(summed):
        return math.isfinite(stored) == math.isfinite(summed)
    return math.isclose(stored, summed, rel_tol=_LOSS_TOLERANCE)


def numbers(rows: Iterable[Mapping[str, object]], column: str) -> list[float]:
    """Return a column of samples as numbers; NaN and infinity are stored as their names.

    Raises:
        RecordError: A row has no number there.
    """
    try:
        return [float(row[column]) for row in rows]  # type: ignore[arg-type]  # checked by float
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"samples without a number {column!r}; evaluate again") from error
