"""Records that another one makes superfluous.

Scores are stored as soon as they are there, diagnostics and the distance from the unquantized
model in a record of the same scores that then takes the first one's place. A run that is killed
between the two steps leaves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from oasis_eval.record import RunRecord
from oasis_eval.spec import ImportedRun, RunSpec


class _HasRecord(Protocol):
    @property
    def record(self) -> RunRecord: ...


Item = TypeVar("Item", bound=_HasRecord)


def without_lesser(items: Sequence[Item]) -> list[Item]:
    """Leave out whatever is of a record whose scores, and all besides, another has too."""
    records = {item.record.key: item.record for item in items}
    cells: dict[tuple[object, ...], list[RunRecord]] = {}
    for record in records.values():
        spec = record.spec
        if record.status == "ok" and not isinstance(spec, ImportedRun):
            place = (record.card.name, spec.scheme.name, spec.task, spec.seed)
            cells.setdefault(place, []).append(record)
    lesser = {
        one.key
        for group in cells.values()
        if len(group) > 1
        for one in group
        if any(_has_all_of(other, one) for other in group)
    }
    return [item for item in items if item.record.key not in lesser]


def _has_all_of(full: RunRecord, part: RunRecord) -> bool:
    """Tell whether a record is another one with more measured besides."""
    assert isinstance(full.spec, RunSpec)
    besides = {"diagnostics": full.spec.diagnostics, "fidelity": full.spec.fidelity}
    return (
        full.key != part.key
        and full.spec == part.spec.model_copy(update=besides)
        and _of(full) == _of(part)
        and len(full.metrics) > len(part.metrics)
        and set(map(repr, part.metrics)) <= set(map(repr, full.metrics))
    )


def _of(record: RunRecord) -> object:
    """Return what was measured, and on what."""
    checkpoint = record.provenance.checkpoint_sha256 if record.provenance else None
    return checkpoint, record.card, record.data
