"""Records as observations: one per number, with everything that decides what it compares with.

Observations are the rows of the tidy long form. This module also refuses what no table may do:
put two protocols into one column, two schemes under one name, or two checkpoints into one row.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePosixPath

from oasis_eval.errors import NoMatchError, RecordError, SpecError
from oasis_eval.parsing import content_hash
from oasis_eval.record import DataInfo, Metric, ProtocolInfo, RunRecord, Status, perplexity
from oasis_eval.report.lesser import without_lesser
from oasis_eval.report.order import natural_key
from oasis_eval.spec import QuantScheme

_RELATIVE_TOLERANCE = 1e-9
_PERPLEXITY_COUNTS = {
    "token_perplexity": "num_tokens",
    "word_perplexity": "num_words",
    "byte_perplexity": "num_bytes",
}


@dataclass(frozen=True, slots=True)
class Observation:
    """One number of one record, or the one line of a record that has none."""

    model: str
    label: str
    family: str
    variant: str
    scheme: str
    scheme_sha256: str
    """Of the scheme without its name and description."""
    backend: str
    execution: str
    dtype: str | None
    """Dtype of the computation; None: not recorded (an imported number)."""
    task: str
    protocol: str
    protocol_version: int | None
    protocol_sha256: str | None
    window: int | None
    limit: int | None
    data: str | None
    """File name of local data, `repository@revision` of hub data."""
    data_sha256: str | None
    fewshot_sha256: str | None
    """Of the text that example questions come from."""
    max_new_tokens: int | None
    """Of generative metrics."""
    chat_template: bool | None
    """Of generative metrics."""
    seed: int
    batch_size: int | None
    device: str | None
    checkpoint_sha256: str | None
    metric: str | None
    """None in a record without numbers."""
    filter: str | None
    value: float | None
    stderr: float | None
    count: int | None
    status: Status
    reason: str | None
    warnings: str
    """All of the record's warnings, separated by semicolons."""
    key: str
    record: RunRecord
    """Where it comes from; not part of the long form."""


LONG_COLUMNS = tuple(item.name for item in fields(Observation) if item.name != "record")
_OUTCOMES = frozenset({"value", "stderr", "count", "status", "reason", "warnings", "key"})
_OF_NUMBERS = frozenset({"metric", "filter"})
FILTER_COLUMNS = tuple(name for name in LONG_COLUMNS if name not in _OUTCOMES - {"status", "key"})
_FIELDS_OF = operator.attrgetter(*FILTER_COLUMNS)
_MAX_VALUES_LISTED = 12
_MAX_VALUE_LENGTH = 60


def observe(records: Iterable[RunRecord]) -> list[Observation]:
    """Return the observations of `records`, each record once, in an order of their content.

    Raises:
        RecordError: A record is there twice with different results, or a stored perplexity is
            not that of its stored loss.
    """
    found: list[Observation] = []
    for record in _distinct(records):
        found.extend(_observations(record, _scheme_hash(record.spec.scheme)))
    return found


def chosen(records: Iterable[RunRecord], where: Mapping[str, tuple[str, ...]]) -> list[Observation]:
    """Return the observations of `records` that match `where`, at least one.

    Of two records of the same scores the fuller counts.

    Raises:
        NoMatchError: None matches; the message says what there is.
        RecordError: As `observe`.
        SpecError: As `keep`.
    """
    found = observe(records)
    kept = keep(found, where)
    if not kept:
        raise NoMatchError(no_match(where, {name: values(found, name) for name in where}))
    return without_lesser(kept)


def values(observations: Iterable[Observation], name: str) -> set[str]:
    """Return the values of a field; a record without numbers has no metric and no filter."""
    return {
        shown(getattr(item, name))
        for item in observations
        if item.metric is not None or name not in _OF_NUMBERS
    }


def matching(text: str, patterns: Iterable[str]) -> bool:
    """Tell whether a field's text matches one of `patterns`."""
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)


def no_match(where: Mapping[str, tuple[str, ...]], found: Mapping[str, Iterable[str]]) -> str:
    """Say which filter nothing passes, and what would.

    Args:
        where: Filters; each of its fields is known.
        found: Values of each of these fields in all records.
    """
    for name, patterns in where.items():
        there = sorted(found[name], key=natural_key)
        if there and not any(matching(text, patterns) for text in there):
            parts = [part.strip() for pattern in patterns for part in pattern.split(",")]
            if all(any(matching(text, (part,)) for text in there) for part in parts):
                each = " ".join(f"--where {name}={part}" for part in parts)
                return f"no record has {name}={' or '.join(patterns)}; for any of them: {each}"
            more = len(there) - _MAX_VALUES_LISTED
            listed = ", ".join(text[:_MAX_VALUE_LENGTH] for text in there[:_MAX_VALUES_LISTED])
            return f"no record has {name}={' or '.join(patterns)}; found: {listed}" + (
                f" and {more} more" if more > 0 else ""
            )
    together = " and ".join(f"{name}={' or '.join(texts)}" for name, texts in where.items())
    return f"no record has {together} together" if where else "the records hold no numbers"


def field_texts(record: RunRecord) -> dict[str, list[str] | None]:
    """Return the texts of every field that filters match; None: it passes every filter on it.

    Raises:
        RecordError: As `observe`.
    """
    items = list(_observations(record, _scheme_hash(record.spec.scheme)))
    without = any(item.metric is None for item in items)
    columns = zip(*map(_FIELDS_OF, items), strict=True) if items else ((),) * len(FILTER_COLUMNS)
    return {
        name: None if without and name in _OF_NUMBERS else sorted(map(shown, set(column)))
        for name, column in zip(FILTER_COLUMNS, columns, strict=True)
    }


def keep(
    observations: Sequence[Observation], where: Mapping[str, tuple[str, ...]]
) -> list[Observation]:
    """Return the observations whose fields match one pattern each of `where`.

    A limit (or other field) that is not set matches `none`. What a record without numbers would
    have measured is not known: it passes filters on `metric` and `filter`.

    Raises:
        SpecError: A key of `where` is no field.
    """
    for name in where:
        if name not in FILTER_COLUMNS:
            raise SpecError(f"where: unknown field {name!r} (known: {', '.join(FILTER_COLUMNS)})")

    def matches(item: Observation, name: str, patterns: tuple[str, ...]) -> bool:
        if item.metric is None and name in _OF_NUMBERS:
            return True
        return matching(shown(getattr(item, name)), patterns)

    return [
        item
        for item in observations
        if all(matches(item, name, patterns) for name, patterns in where.items())
    ]


def shown(value: object) -> str:
    """Return a field's text in messages and filters: `none`, `true`, `false`, or as it is."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def evaluated_data(record: RunRecord) -> DataInfo | None:
    """Return the text that was scored; calibration text may stand beside it in the record."""
    named = [item for item in record.data if item.name == record.spec.task.name]
    return next(iter(named or record.data), None)


def fewshot_data(record: RunRecord) -> DataInfo | None:
    """Return the text that example questions come from: the task's second entry."""
    named = [item for item in record.data if item.name == record.spec.task.name]
    return named[1] if len(named) > 1 else None


def data_name(record: RunRecord, data: DataInfo) -> str:
    """Return the file name of local data, else where the data comes from."""
    local = record.spec.task.data is not None or "@" not in data.origin
    return PurePosixPath(data.origin.replace("\\", "/")).name if local else data.origin


def protocol_info(record: RunRecord, name: str) -> ProtocolInfo | None:
    """Return the record's protocol called `name`, or None."""
    return next((item for item in record.protocols if item.name == name), None)


def _scheme_hash(scheme: QuantScheme) -> str:
    return _hash_of(scheme.model_dump_json(exclude={"name", "description"}))


@functools.lru_cache(maxsize=1024)
def _hash_of(text: str) -> str:
    return content_hash(json.loads(text))


def _distinct(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Return each key once; a finished record replaces a failed attempt."""
    by_key: dict[str, list[RunRecord]] = {}
    for record in records:
        by_key.setdefault(record.key, []).append(record)
    chosen = []
    for key in sorted(by_key):
        same = by_key[key]
        if len(same) > 1:
            same.sort(key=lambda item: (item.status != "ok", item.model_dump_json()))
        finished = [item for item in same if item.status == "ok"]
        if any(repr(item.metrics) != repr(finished[0].metrics) for item in finished[1:]):
            raise RecordError(
                f"record {key} is there twice with different numbers; "
                "give one of the two folders, or move one of the two files away"
            )
        chosen.append(same[0])
    return chosen


def _observations(record: RunRecord, scheme_sha256: str) -> Iterator[Observation]:
    if record.status != "ok":
        yield _observation(record, scheme_sha256, None)
        return
    for metric in _with_perplexities(record):
        yield _observation(record, scheme_sha256, metric)


def _observation(record: RunRecord, scheme_sha256: str, metric: Metric | None) -> Observation:
    spec, scheme = record.spec, record.spec.scheme
    protocol = metric.protocol if metric else spec.task.protocol
    info = protocol_info(record, protocol)
    window = info.details.get("window") if info else None
    data, examples = evaluated_data(record), fewshot_data(record)
    generated = metric is not None and metric.name.startswith(("pass@", "exact_match"))
    return Observation(
        model=record.card.name,
        label=record.card.label,
        family=record.card.family,
        variant=record.card.variant,
        scheme=scheme.name,
        scheme_sha256=scheme_sha256,
        backend=scheme.backend,
        execution=scheme.execution,
        dtype=scheme.dtype or spec.dtype,
        task=metric.task if metric else spec.task.name,
        protocol=protocol,
        protocol_version=info.version if info else None,
        protocol_sha256=info.sha256 if info else None,
        window=int(window) if isinstance(window, int) else None,
        limit=spec.task.limit,
        data=data_name(record, data) if data else None,
        data_sha256=data.sha256 if data else None,
        fewshot_sha256=examples.sha256 if examples else None,
        max_new_tokens=spec.task.max_new_tokens if generated else None,
        chat_template=spec.task.chat_template if generated else None,
        seed=spec.seed,
        batch_size=batch_size_of(record, info),
        device=spec.device,
        checkpoint_sha256=record.provenance.checkpoint_sha256 if record.provenance else None,
        metric=metric.name if metric else None,
        filter=metric.filter if metric else None,
        value=metric.value if metric else None,
        stderr=metric.stderr if metric else None,
        count=metric.count if metric else None,
        status=record.status,
        reason=record.reason,
        warnings="; ".join(record.warnings),
        key=record.key,
        record=record,
    )


def batch_size_of(record: RunRecord, info: ProtocolInfo | None) -> int | None:
    """Return the batch that ran, which is smaller than was asked for where memory ran out."""
    used = info.details.get("batch_size") if info else None
    return used if isinstance(used, int) else record.spec.batch_size


def _with_perplexities(record: RunRecord) -> Iterator[Metric]:
    """Yield the stored metrics, perplexities derived anew from summed loss and counts."""
    stored = {(item.task, item.protocol, item.name): item for item in record.metrics}
    for metric in record.metrics:
        if metric.name == "nll_nats":
            yield from _derived(record, metric, stored)
    for metric in record.metrics:
        count = _PERPLEXITY_COUNTS.get(metric.name)
        place = (metric.task, metric.protocol)
        if count is None or (*place, "nll_nats") not in stored or (*place, count) not in stored:
            yield metric


def _derived(
    record: RunRecord, loss: Metric, stored: Mapping[tuple[str, str, str], Metric]
) -> Iterator[Metric]:
    for name, count_name in _PERPLEXITY_COUNTS.items():
        count = stored.get((loss.task, loss.protocol, count_name))
        if count is None:
            continue
        value = perplexity(loss.value, count.value)
        given = stored.get((loss.task, loss.protocol, name))
        if given is None:
            yield loss.model_copy(update={"name": name, "value": value, "stderr": None})
        elif _same(given.value, value):
            yield given.model_copy(update={"value": value})
        else:
            raise RecordError(
                f"record {record.key}: stored {name} {given.value!r} is not {value!r}, which its "
                f"nll_nats and {count_name} give; the file was changed, evaluate again"
            )


def _same(stored: float, derived: float) -> bool:
    if math.isnan(stored) or math.isnan(derived):
        return math.isnan(stored) and math.isnan(derived)
    return math.isclose(stored, derived, rel_tol=_RELATIVE_TOLERANCE)
