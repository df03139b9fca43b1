"""The records of a report: filtered, each once, in the order of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oasis_eval.errors import RecordError
from oasis_eval.record import RunRecord
from oasis_eval.report.annotations import model_labels
from oasis_eval.report.observations import Observation, chosen
from oasis_eval.report.order import natural_key, ranks


@dataclass(frozen=True, slots=True)
class Selection:
    """Everything that a report is about."""

    observations: tuple[Observation, ...]
    """One a number, and one for each record without numbers."""
    records: tuple[RunRecord, ...]
    folders: tuple[Path, ...]
    """Where samples may lie."""
    labels: Mapping[str, str]
    """What each model is called."""
    models: tuple[str, ...]
    schemes: tuple[str, ...]
    tasks: tuple[str, ...]

    def label(self, record: RunRecord) -> str:
        """Return what a record's model is called."""
        return self.labels[record.card.name]

    def folder(self, key: str) -> Path:
        """Return the folder with the samples of a record, or the current one."""
        name = f"{key}.samples.jsonl"
        return next((item for item in self.folders if (item / name).exists()), Path())


def select(
    records: Sequence[RunRecord],
    *,
    where: Mapping[str, tuple[str, ...]],
    folders: Sequence[Path] = (),
) -> Selection:
    """Keep the records that match, and put them in order.

    Args:
        records: Results of any models, schemes, tasks and seeds.
        where: Filters, as those of a table.
        folders: Where samples may lie.

    Raises:
        RecordError: There are no records, none matches, or two with one key differ.
        SpecError: A filter is on no field.
    """
    if not records:
        raise RecordError(
            "no records: run 'oasis-eval evaluate MODEL' first, or give the folder it wrote to"
        )
    kept = chosen(records, where)
    schemes = {item.scheme: item.record.spec.scheme for item in kept}
    orders = {
        name: ranks(
            name,
            {str(getattr(item, name)) for item in kept},
            first=(),
            schemes=schemes,
        )
        for name in ("model", "scheme", "task", "protocol")
    }

    def key(item: Observation) -> tuple[object, ...]:
        places = [order[str(getattr(item, name))] for name, order in orders.items()]
        return (*places, item.limit or 0, item.seed, item.key)

    ordered = sorted(kept, key=key)  # stable: the metrics of a record stay in its own order
    labels = model_labels(ordered)
    names = sorted(labels, key=lambda name: (natural_key(labels[name]), name))
    return Selection(
        observations=tuple(ordered),
        records=tuple({item.key: item.record for item in ordered}.values()),
        folders=tuple(folders),
        labels=labels,
        models=tuple(names),
        schemes=tuple(orders["scheme"]),
        tasks=tuple(orders["task"]),
    )
