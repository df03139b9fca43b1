"""Which figures there are, and what a kind lacks that cannot be drawn."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oasis_eval import attention_maps
from oasis_eval.attention_maps import AttentionMaps
from oasis_eval.errors import RecordError, UnknownNameError
from oasis_eval.record import RunRecord
from oasis_eval.report.figures import layers
from oasis_eval.report.figures.attention import attention
from oasis_eval.report.figures.context import context
from oasis_eval.report.figures.passkey import passkey
from oasis_eval.report.figures.perplexity import perplexity
from oasis_eval.report.figures.ranking import Ranked, read_ranking
from oasis_eval.report.figures.style import Drawing, settings
from oasis_eval.report.html.selection import Selection, select
from oasis_eval.report.store import find_records

_MOST_NAMED = 4
_USUAL_TASK = "wikitext2"
_LONGEST = 1024
"""Tokens of the longest context that a command asks for."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of figure that is drawn from records."""

    draw: Callable[[Selection], Iterator[Drawing]]
    needs: str
    """What records must have."""
    arguments: str
    """Of `oasis-eval evaluate`, which measures that."""
    can_have: Callable[[RunRecord], bool]
    """Whether that command would change anything for a record that lacks it."""
    protocol: str | None = None
    """Protocol whose name ends in a number of tokens, which a model must have positions for."""
    num_lengths: int = 1
    """Lengths under that protocol: the largest, its half and so on."""

    def arguments_for(self, records: Sequence[RunRecord]) -> str:
        """Return the arguments with context lengths that the models of these records can have."""
        if self.protocol is None:
            return self.arguments
        known = [record.card.context_length for record in records if record.card.context_length]
        longest = min([_LONGEST, *known])
        lengths = [longest >> at for at in reversed(range(self.num_lengths))]
        names = ",".join(f"{self.protocol}-{length}" for length in lengths if length >= 2)
        return f"{self.arguments} --protocol {names}"


def _has_layers(record: RunRecord) -> bool:
    return bool(record.layers)


def _always(record: RunRecord) -> bool:
    """Nothing is lacking in a record that was made for something else."""
    return True


_DIAGNOSTICS = "diagnostics"
KINDS: dict[str, Kind] = {
    "perplexity": Kind(
        perplexity,
        "a perplexity under a scheme with bits",
        "--scheme fp32,w8a8,w4a4",
        lambda record: record.metric("token_perplexity") is not None,
    ),
    "outliers": Kind(layers.outliers, _DIAGNOSTICS, "--diagnostics", _has_layers),
    "sink-mass": Kind(layers.sink_mass, _DIAGNOSTICS, "--diagnostics", _has_layers),
    "null-mass": Kind(
        layers.null_mass, "diagnostics of a model with a null", "--diagnostics", _has_layers
    ),
    "depth-routing": Kind(
        layers.depth_routing,
        "diagnostics of a model with depth routing",
        "--diagnostics",
        _has_layers,
    ),
    "context": Kind(
        context,
        "a perplexity under a context-N protocol",
        "--diagnostics",
        _always,
        protocol="context",
        num_lengths=3,
    ),
    "passkey": Kind(passkey, "a passkey run", "--task passkey", _always, protocol="passkey"),
}
"""By the name that `--kind` takes."""
_OWN_PROTOCOL = ("context", "passkey")
"""Kinds whose records nobody has by the way."""
ATTENTION = "attention"
SENSITIVITY = "sensitivity"
NAMES = (*KINDS, ATTENTION, SENSITIVITY)
_FILES = {
    ATTENTION: "attention maps; capture them: oasis-eval attention MODEL --out DIR",
    SENSITIVITY: "*.csv of sensitivities; measure them: oasis-eval sensitivity MODEL",
}
"""What kinds need that are drawn from files of their own."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What figures are drawn from."""

    records: tuple[RunRecord, ...]
    folders: tuple[Path, ...]
    """Where samples lie."""
    maps: tuple[AttentionMaps, ...] = ()
    rankings: tuple[Ranked, ...] = ()


def read_sources(
    paths: Sequence[Path], *, where: Mapping[str, tuple[str, ...]] | None = None
) -> Sources:
    """Read records (files or folders), attention maps (`*.safetensors`), sensitivities (`*.csv`).

    Args:
        paths: What to read.
        where: Filters that `draw` will be given: records that cannot match are left out unread.

    Raises:
        RecordError: A path does not exist or is neither.
    """
    files = [path for path in paths if path.suffix == attention_maps.SUFFIX]
    tables = [path for path in paths if path.suffix == ".csv"]
    others = [path for path in paths if path not in files and path not in tables]
    for path in others:
        if path.is_dir():
            files += sorted(path.glob(f"*{attention_maps.SUFFIX}"))
    return Sources(
        records=tuple(find_records(others, where=where, whole=True)),
        folders=tuple(path if path.is_dir() else path.parent for path in others),
        maps=tuple(attention_maps.read(path) for path in files),
        rankings=tuple(read_ranking(path) for path in tables),
    )


def draw(
    sources: Sources, kinds: Sequence[str], *, where: Mapping[str, tuple[str, ...]]
) -> tuple[list[Drawing], list[str]]:
    """Draw kinds of figures.

    Args:
        sources: Records and maps.
        kinds: Names; empty: all that can be drawn.
        where: Filters on records, as those of a table.

    Returns:
        Figures, and for each kind that has none the reason with the command that would measure it.

    Raises:
        UnknownNameError: There is no such kind.
        RecordError: There is nothing to draw from, or a kind that was asked for has no figure.
    """
    for name in kinds:
        if name not in NAMES:
            raise UnknownNameError("figure kind", name, NAMES)
    if not sources.records and not sources.maps and not sources.rankings:
        raise RecordError(
            "no records and no attention maps: run 'oasis-eval evaluate MODEL' or 'oasis-eval "
            "attention MODEL' first, or give the folder it wrote to"
        )
    drawings: list[Drawing] = []
    lacking: list[str] = []
    with settings():
        selection = None
        if sources.records:
            selection = select(sources.records, where=where, folders=sources.folders)
        possible = [*(KINDS if sources.records else ())]
        possible += [ATTENTION] if sources.maps else []
        possible += [SENSITIVITY] if sources.rankings else []
        for name in kinds or tuple(possible):
            found, missing = _draw_kind(name, selection, sources)
            drawings += found
            lacking += missing
            if kinds and not found:
                raise RecordError(missing[0])
    if not drawings:
        raise RecordError(lacking[0])
    return _with_own_names(drawings), lacking


def _draw_kind(
    name: str, selection: Selection | None, sources: Sources
) -> tuple[list[Drawing], list[str]]:
    if name in _FILES:
        found = list(attention(sources.maps)) if name == ATTENTION else []
        found += [item.draw() for item in sources.rankings] if name == SENSITIVITY else []
        return found, [] if found else [f"{name}: no {_FILES[name]}"]
    kind = KINDS[name]
    if selection is None:
        return [], [
            f"{name}: no records; measure: oasis-eval evaluate MODEL {kind.arguments_for(())}"
        ]
    found = list(kind.draw(selection))
    finished = [record for record in selection.records if _is_text(record)]
    without = [record for record in finished if not kind.can_have(record)]
    if found and not without:
        return found, []
    count = f"{len(without)} of {len(finished)} records of text"
    if without:
        return found, [f"{name}: {count} lack {kind.needs}; measure: {_command(without, kind)}"]
    if name in _OWN_PROTOCOL:
        return found, [
            f"{name}: no record has {kind.needs}; measure: {_command(selection.records, kind)}"
        ]
    return found, [f"{name}: no record has {kind.needs}"]


def _is_text(record: RunRecord) -> bool:
    """Tell whether text was scored: what figures lack is measured on text, not on questions."""
    return any(metric.name.endswith("perplexity") for metric in record.metrics)


def _command(records: Sequence[RunRecord], kind: Kind) -> str:
    """Return the call of `evaluate` that measures what the records lack."""
    models = list(dict.fromkeys(record.spec.model for record in records))
    tasks = list(dict.fromkeys(item.spec.task.name for item in records if _is_text(item)))
    schemes = list(dict.fromkeys(record.spec.scheme.name for record in records))
    arguments = kind.arguments_for(records)
    words = ["oasis-eval", "evaluate", *models[:_MOST_NAMED]]
    words += ["..."] if len(models) > _MOST_NAMED else []
    words += [] if "--task" in arguments else ["--task", ",".join(tasks or [_USUAL_TASK])]
    if "--scheme" not in arguments:
        words += ["--scheme", ",".join(schemes)]
    if "--task" not in arguments and "--protocol" not in arguments:
        # Under a protocol of its own, a limit counts something else.
        limits = {record.spec.task.limit for record in records if _is_text(record)}
        limit = limits.pop() if len(limits) == 1 else None
        words += ["--limit", str(limit)] if limit is not None else []
    return f"{shlex.join(words)} {arguments}"


def _with_own_names(drawings: Sequence[Drawing]) -> list[Drawing]:
    """Number figures whose names became one when they were made file names."""
    seen: dict[str, int] = {}
    result = []
    for item in drawings:
        seen[item.stem] = count = seen.get(item.stem, 0) + 1
        stem = item.stem if count == 1 else f"{item.stem}--{count}"
        result.append(item._replace(stem=stem))
    return result
