"""What was found part by part: one JSON file a question, and a CSV of the same for reading.

The file is rewritten whole after every part, so that it can be cut off at no moment, and says what
its numbers depend on. No torch here: whatever draws or prints reads the file.

Dimensions: W windows.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from oasis_eval.errors import RecordError
from oasis_eval.parsing import explain
from oasis_eval.record import Outcome, write_text_atomically
from oasis_eval.statistics import Interval, log_perplexity_difference

VERSION = 1
"""Of the files; raised when their layout or a number's meaning changes."""
WHOLE = "everything"
"""Name of the result of the whole scheme."""


class PartResult(Outcome):
    """A model with one part quantized, or with all but that part."""

    name: str
    """Decoder layer, region or module kind; `everything` for the whole scheme."""
    num_parts: int
    """Weights, inputs, outputs and taps that were switched on (or off, for all but one)."""
    nll_nats: tuple[float, ...]
    """Summed loss of each window."""
    kl_nats: tuple[float, ...]
    """Summed KL(reference || model) of each window."""
    same_top1: float
    """Share of the tokens whose most likely next token is the reference's."""


class Effect(Outcome):
    """What a part costs, in nats a token."""

    name: str
    effect_nats: float
    """One part alone: its change of the mean loss. All but one: how much of the loss of the whole
    scheme goes with the part."""
    low: float | None = None
    """End of the 95 % interval over windows; None where there is none."""
    high: float | None = None
    delta_nll_nats: float
    """Mean loss of the run minus the reference's."""
    kl_nats: float
    """Mean KL of the run."""
    same_top1: float
    num_parts: int


class Sensitivity(Outcome):
    """Results of one question."""

    version: int = VERSION
    key: str
    """Content hash of everything that the numbers depend on."""
    model: str
    scheme: str
    by: Literal["layer", "region", "kind"]
    all_but_one: bool
    task: str
    protocol: str
    dtype: str
    reference_dtype: str
    num_tokens: tuple[int, ...]
    """Scored tokens of each window."""
    reference_nll_nats: tuple[float, ...]
    """Summed loss of each window, unquantized."""
    part_names: tuple[str, ...]
    """All parts in the order of the model, measured already or not."""
    whole: PartResult | None = None
    """Under the whole scheme."""
    parts: tuple[PartResult, ...] = ()
    """Those measured so far."""

    @property
    def is_complete(self) -> bool:
        """Whether every part is measured."""
        return self.whole is not None and len(self.parts) == len(self.part_names)

    def effects(self) -> list[Effect]:
        """Return what each part costs, the costliest first; NaN counts as the worst there is."""
        found = [self._effect(part) for part in self.parts]
        return sorted(found, key=lambda item: (not math.isnan(item.effect_nats), -item.effect_nats))

    def delta(self, result: PartResult) -> Interval:
        """Return the change of the mean loss against the reference; ends NaN without interval."""
        return self._difference(self.reference_nll_nats, result.nll_nats)

    def _effect(self, part: PartResult) -> Effect:
        delta = self.delta(part)
        effect = delta
        if self.all_but_one:
            assert self.whole is not None
            effect = self._difference(part.nll_nats, self.whole.nll_nats)
        has_ends = math.isfinite(effect.low) and math.isfinite(effect.high)
        return Effect(
            name=part.name,
            effect_nats=effect.estimate,
            low=effect.low if has_ends else None,
            high=effect.high if has_ends else None,
            delta_nll_nats=delta.estimate,
            kl_nats=sum(part.kl_nats) / sum(self.num_tokens),
            same_top1=part.same_top1,
            num_parts=part.num_parts,
        )

    def _difference(self, first_W: Sequence[float], second_W: Sequence[float]) -> Interval:
        finite = all(math.isfinite(value) for value in (*first_W, *second_W))
        if finite and len(first_W) > 1:
            return log_perplexity_difference(first_W, second_W, self.num_tokens)
        mean = (sum(second_W) - sum(first_W)) / sum(self.num_tokens)
        return Interval(mean, math.nan, math.nan)


def read(path: Path) -> Sensitivity:
    """Read a file of results.

    Raises:
        RecordError: It cannot be read, or is of another version.
    """
    try:
        found = Sensitivity.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise RecordError(
            f"{path}: no results of `sensitivity`: {explain(error, Sensitivity)}; if it is "
            "damaged, delete it and run again"
        ) from error
    if found.version != VERSION:
        raise RecordError(f"{path}: version {found.version}, this program reads {VERSION}")
    return found


def write(path: Path, found: Sensitivity) -> None:
    """Write results and, beside them, their ranking as CSV.

    Raises:
        RecordError: They cannot be written.
    """
    if found.whole is not None:
        write_text_atomically(path.with_suffix(".csv"), as_csv(found))
    write_text_atomically(path, found.model_dump_json(indent=1) + "\n")


def as_csv(found: Sensitivity) -> str:
    """Return the ranking as CSV, full precision, costliest first."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    columns = list(Effect.model_fields)
    table.writerow(["rank", *columns])
    for rank, effect in enumerate(found.effects(), start=1):
        values = (getattr(effect, name) for name in columns)
        table.writerow([rank, *("" if value is None else value for value in values)])
    return text.getvalue()
