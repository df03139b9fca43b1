"""What may stand together: one protocol a column or pair, one meaning a name, one run a seed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from oasis_eval.errors import RecordError
from oasis_eval.report.observations import Observation, protocol_info, shown

Item = TypeVar("Item")

_EXACT = ("filter", "limit", "max_new_tokens", "chat_template")
_WHERE_KNOWN = ("protocol_version", "window", "protocol_sha256", "data_sha256", "fewshot_sha256")
"""Not compared with records that do not state them, for example imported ones."""
_CELL_FIELDS = (
    "model",
    "family",
    "variant",
    "scheme",
    "task",
    "protocol",
    "metric",
    "filter",
    "dtype",
    "device",
    "batch_size",
)
"""Alike in a cell; checkpoints are those of its seeds, one each (`check_names`)."""


def check_columns(observations: Sequence[Observation], *, protocols_apart: bool) -> None:
    """Refuse to compare numbers of one task and metric that were not measured alike.

    Args:
        observations: Everything that the table shows.
        protocols_apart: Whether the protocol is a dimension of the table.

    Raises:
        RecordError: Two protocols, limits, data sets or other settings would be in one column.
    """

    def column(item: Observation) -> Hashable:
        return (item.task, item.metric, item.protocol if protocols_apart else None)

    for group in grouped((item for item in observations if item.status == "ok"), column):
        what = f"column {group[0].task}/{group[0].metric}"
        if not protocols_apart:
            advice = "add 'protocol' to the columns of the table spec, or keep one"
            _one_value(group, "protocol", what, advice)
        for name in _EXACT:
            _one_value(group, name, what, "keep one")
        for name in _WHERE_KNOWN:
            known = [item for item in group if getattr(item, name) is not None]
            _one_value(known, name, what, "keep one")


def check_pair(first: Observation, second: Observation) -> None:
    """Refuse to pair two numbers that were not measured alike.

    Under dynamic activation ranges the batch size belongs to how a number is measured.

    Raises:
        RecordError: Naming the first field that differs, and both values.
    """
    dynamic = any(_has_dynamic_ranges(item) for item in (first, second))
    for name in ("protocol", *_EXACT, *_WHERE_KNOWN, *(("batch_size",) if dynamic else ())):
        one, other = getattr(first, name), getattr(second, name)
        if one == other or (name in _WHERE_KNOWN and None in (one, other)):
            continue
        reason = " under dynamic activation ranges" if name == "batch_size" else ""
        raise RecordError(
            f"{first.task} was not measured alike: {name} is {shown(one)[:16]} in "
            f"A ({first.model}, {first.scheme}) and {shown(other)[:16]} in B ({second.model}, "
            f"{second.scheme}){reason}{_protocol_details(name, [first, second])}; compare records "
            f"with one {name}"
        )


def check_names(observations: Sequence[Observation]) -> None:
    """Refuse two schemes under one name, and checkpoints that are not the seeds they pass for.

    Raises:
        RecordError: Naming both and what to do.
    """
    for group in grouped(observations, lambda item: item.scheme):
        _one_value(group, "scheme_sha256", f"scheme {group[0].scheme!r}", "keep one")
    known = [item for item in observations if item.checkpoint_sha256 is not None]
    for group in grouped(known, lambda item: (item.model, item.seed)):
        advice = "if these are seeds of one model, measure each with its own --seed; else keep one"
        _one_value(group, "checkpoint_sha256", f"model {group[0].model!r}", advice)
    for group in grouped(known, lambda item: (item.model, item.checkpoint_sha256)):
        seeds = sorted({item.seed for item in group})
        if len(seeds) > 1:
            raise RecordError(
                f"model {group[0].model!r}: seeds {seeds[0]} and {seeds[1]} are one checkpoint "
                f"({shown(group[0].checkpoint_sha256)[:16]}), and a mean over it would be of one "
                f"seed; keep one with '--where seed={seeds[0]}'"
            )


def check_cell(observations: Sequence[Observation]) -> list[Observation]:
    """Return the observations of one cell, one a seed, in the order of the seeds.

    A failed attempt is left out where another attempt of the same seed finished.

    Raises:
        RecordError: The cell has two results for a seed, or its seeds differ in more than that.
    """
    by_seed = list(grouped(observations, lambda item: item.seed))
    finished = [item for item in observations if item.status == "ok"]
    for name in _CELL_FIELDS:
        _one_value(finished, name, _cell_name(observations[0]), _cell_advice(name))
    kept = []
    for group in by_seed:
        best = [item for item in group if item.status == "ok"] or group
        if best[0].status == "ok" and len({item.key for item in best}) > 1:
            keys = ", ".join(sorted(item.key for item in best))
            raise RecordError(
                f"{_cell_name(best[0])} has several results for seed {best[0].seed}: records "
                f"{keys}; keep one of them, for example with 'where: {{key: [{best[0].key}]}}'"
            )
        kept.append(min(best, key=lambda item: (item.status, item.reason or "", item.key)))
    return sorted(kept, key=lambda item: item.seed)


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> Iterable[list[Item]]:
    """Return `items` in lists of equal `key`, in order of first appearance."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups.values()


def _one_value(group: Sequence[Observation], name: str, what: str, advice: str) -> None:
    first_of: dict[str, Observation] = {}
    for item in group:
        first_of.setdefault(shown(getattr(item, name)), item)
    if len(first_of) < 2:
        return
    values = sorted(first_of)
    found = " and ".join(
        f"{value[:16]} ({first_of[value].model}, {first_of[value].scheme})" for value in values[:3]
    )
    raise RecordError(
        f"{what} mixes {name} {found}{_protocol_details(name, list(first_of.values()))}; "
        f"{advice} with '--where {name}={values[0]}', or 'where: {{{name}: [\"{values[0]}\"]}}' in "
        "the table spec"
    )


def _protocol_details(name: str, items: Sequence[Observation]) -> str:
    """Say which decisions of a protocol differ where its hash does."""
    if name not in ("protocol_sha256", "protocol_version"):
        return ""
    infos = [protocol_info(item.record, item.protocol) for item in items]
    details = [info.details for info in infos if info is not None]
    differing = []
    for key in sorted({key for item in details for key in item}):
        values = sorted({shown(item.get(key)) for item in details})
        if len(values) > 1:
            differing.append(f"{key} {', '.join(values)}")
    return f" (they differ in {'; '.join(differing)})" if differing else ""


def _has_dynamic_ranges(item: Observation) -> bool:
    activations = item.record.spec.scheme.activations
    return activations is not None and activations.ranges == "dynamic"


def _cell_name(item: Observation) -> str:
    return f"cell {item.model}/{item.scheme}/{item.task}/{item.metric}"


def _cell_advice(name: str) -> str:
    if name in ("model", "family", "variant", "scheme", "task", "protocol", "metric"):
        return f"add '{name}' to the rows or columns of the table spec, or keep one"
    return "keep one"
