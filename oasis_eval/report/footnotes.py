"""What the notes under a table say: protocols, data, schemes, failures, marks.

Every text is made from the records alone and holds no path, so that a table can be published.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from oasis_eval.report.observations import (
    Observation,
    data_name,
    evaluated_data,
    fewshot_data,
    protocol_info,
    shown,
)
from oasis_eval.spec import QuantScheme, TensorFormat

_MAX_MODELS_LISTED = 4
_ABSOLUTE_PATH = re.compile(r"(?<![\w./:])/(?:[^\s/'\":;,]+/)+([^\s/'\":;,]+)")
_LETTERS = "abcdefghijkmnpqrstuvwxyz"
"""Without l and o, which read as 1 and 0 behind a number."""
_TOLD_OTHERWISE = frozenset({"limit", "num_cut", "num_unread", "num_prompt_truncated"})
"""Details that have their own words in the note, or differ from cell to cell."""


@dataclass(frozen=True, slots=True)
class Footnote:
    """One lettered note."""

    mark: str
    text: str


class Footnotes:
    """Notes in the order in which they are first used, each text once."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def marks(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Return the letters of `texts`, new ones for new texts."""
        for text in texts:
            if text not in self._marks:
                self._marks[text] = letters(len(self._marks))
        return tuple(self._marks[text] for text in dict.fromkeys(texts))

    def all(self) -> tuple[Footnote, ...]:
        """Return every note so far."""
        return tuple(Footnote(mark, text) for text, mark in self._marks.items())


def letters(index: int) -> str:
    """Return a, b, ..., z, aa, ab, ... for 0, 1, ..., without the letters l and o."""
    text = ""
    index += 1
    while index:
        index, digit = divmod(index - 1, len(_LETTERS))
        text = _LETTERS[digit] + text
    return text


def protocol_note(group: Sequence[Observation]) -> str:
    """Say how the numbers of one column were measured.

    Args:
        group: All finished observations of one task, protocol and metric.
    """
    infos = [(item, protocol_info(item.record, item.protocol)) for item in group]
    known = [(item, info) for item, info in infos if info is not None]
    if not known:
        return f"{group[0].protocol}: version and settings not recorded."
    first, info = known[0]
    parts = [f"{info.name} v{info.version} ({info.sha256[:8]}): {info.summary.rstrip('.')}"]
    details: dict[str, dict[str, list[str]]] = {}
    for item, each in known:
        for key, value in each.details.items():
            if key in _TOLD_OTHERWISE:
                continue
            details.setdefault(key, {}).setdefault(_said(value), []).append(item.label)
    parts += [
        f"{key.replace('_', ' ')} {_by_model(values)}"
        for key, values in sorted(details.items())
        if set(values) != {"0"}
    ]
    counted = [info.details.get(name) for _, info in known for name in ("num_cut", "num_unread")]
    if first.metric in ("pass@1", "pass@1_flexible") and set(counted) == {0}:
        parts.append("no completion cut by the token limit or without an answer")
    if first.max_new_tokens is not None and "max_new_tokens" not in details:
        parts.append(f"at most {first.max_new_tokens} new tokens")
    if first.chat_template is not None and "chat_template" not in details:
        parts.append("chat template" if first.chat_template else "no chat template")
    if first.limit is not None:
        parts.append(f"limited to the first {first.limit}")
    counts = sorted({item.count for item in group if item.count is not None})
    if counts:
        parts.append(f"n = {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else ""))
    if len(known) < len(infos):
        parts.append("settings of some values not recorded")
    return "; ".join(parts) + "."


def data_note(item: Observation) -> str | None:
    """Say which text was scored, without the folder it lay in."""
    data = evaluated_data(item.record)
    if data is None:
        return None
    split = f", split {data.split}" if data.split else ""
    rows = f", {data.num_rows} rows"
    text = f"Data: {data_name(item.record, data)}{split}{rows}, sha256 {data.sha256[:8]}"
    examples = fewshot_data(item.record)
    if examples is not None:
        name = data_name(item.record, examples)
        text += f"; examples from {name}, sha256 {examples.sha256[:8]}"
    return f"{text}."


def scheme_note(group: Sequence[Observation]) -> str:
    """Say what a scheme quantizes and in which dtype its model computes."""
    scheme = group[0].record.spec.scheme
    dtypes = sorted({item.dtype for item in group if item.dtype is not None})
    parts = [f"{scheme.name} ({group[0].scheme_sha256[:8]}): {describe_scheme(scheme)}"]
    if dtypes and (scheme.execution != "none" or dtypes != [scheme.name]):
        parts.append(f"computed in {' or '.join(dtypes)}")
    return "; ".join(parts) + "."


def describe_scheme(scheme: QuantScheme) -> str:
    """Return the scheme's own description, or one made from its formats."""
    if scheme.description:
        return scheme.description.rstrip(".")
    if scheme.execution == "none":
        return "nothing quantized"
    parts = [
        f"{kind} {_format(tensor)}"
        for kind, tensor in (("weights", scheme.weights), ("activations", scheme.activations))
        if tensor is not None
    ]
    if scheme.activations is not None:
        parts.append(f"at {', '.join(scheme.regions)}")
    how = "fake quantization" if scheme.execution == "fake" else "integer arithmetic"
    backend = "" if scheme.backend == "fake" else f" by {scheme.backend}"
    return ", ".join([*parts, how + backend])


def failure_note(item: Observation) -> str:
    """Say why a run has no number."""
    reason = _ABSOLUTE_PATH.sub(r"\1", item.reason or "no reason recorded")
    return f"{item.status.capitalize()}: {' '.join(reason.split()).rstrip('.')}."


def mean_note(num_seeds: int) -> str:
    """Say what a value with `±` is when it is a mean."""
    return f"Mean ± standard deviation (n - 1) over {num_seeds} seeds."


def seeds_notes(cell: Sequence[Observation]) -> list[str]:
    """Say which seeds of a cell are no ordinary numbers."""
    values = [item.value for item in cell if item.value is not None]
    notes = []
    for name, test in (("NaN", math.isnan), ("infinite", math.isinf)):
        hits = sum(test(value) for value in values)
        if hits and len(cell) > 1:
            notes.append(f"{hits} of {len(values)} seeds {name}.")
    for item in cell:
        if item.status != "ok":
            notes.append(f"Seed {item.seed} left out. {failure_note(item)}")
    return notes


def loss_note(item: Observation) -> str | None:
    """Give the mean loss behind an infinite perplexity, which still tells models apart."""
    if item.metric is None or not item.metric.endswith("perplexity") or item.value != math.inf:
        return None
    found = {metric.name: metric.value for metric in item.record.metrics}
    tokens = found.get("num_tokens", 0.0)
    if "nll_nats" not in found or not tokens:
        return None
    return f"Mean loss {found['nll_nats'] / tokens:.4g} nats per token."


def warning_note(warning: str) -> str:
    """Repeat a warning that a run stored."""
    text = _ABSOLUTE_PATH.sub(r"\1", warning)
    return f"Warning: {' '.join(text.split()).rstrip('.')}."


def completions_note(item: Observation) -> str | None:
    """Say how many completions were cut by the token limit or held no answer, if any."""
    info = protocol_info(item.record, item.protocol)
    if info is None or item.metric is None or not item.metric.startswith("pass@"):
        return None
    counts = (info.details.get("num_cut") or 0, info.details.get("num_unread") or 0)
    if not any(counts):
        return None
    total = "" if item.count is None else f" of {item.count}"
    return f"{counts[0]}{total} completions cut by the token limit, {counts[1]} without an answer."


def answer_note(item: Observation) -> str | None:
    """Give the loss of the reference answers, which still moves where Pass@k is at the floor."""
    found = item.record.metric("answer_nll_per_token")
    if found is None:
        return None
    return f"Mean loss of the reference answers {found.value:.4g} nats per token."


def _format(tensor: TensorFormat) -> str:
    sharing = f"group of {tensor.group_size}" if tensor.group_size else tensor.granularity
    kind = "symmetric" if tensor.symmetric else "asymmetric"
    ranges = {"minmax": "min-max", "running_minmax": "running min-max"}.get(
        tensor.ranges, tensor.ranges
    )
    return f"{tensor.bits} bit {kind} per {sharing} ({ranges})"


def _said(value: object) -> str:
    """Return a setting's value in a sentence."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else shown(value)


def _by_model(values: dict[str, list[str]]) -> str:
    """Print a setting that all models share once, else value by value with its models."""
    if len(values) == 1:
        return next(iter(values))
    parts = []
    for value in sorted(values):
        models = sorted(set(values[value]))
        more = len(models) - _MAX_MODELS_LISTED
        names = ", ".join(models[:_MAX_MODELS_LISTED]) + (f" and {more} more" if more > 0 else "")
        parts.append(f"{value} ({names})")
    return ", ".join(parts)
