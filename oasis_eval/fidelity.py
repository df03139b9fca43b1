"""How faithful a model under a scheme is to the unquantized one, on the same tokens.

One window is run at a time, so that its numbers depend on it alone. The logits of both models are
made tile by tile from hidden states; no more than a tile of each is ever held.

Dimensions: T scored tokens of all windows, W windows, R scored tokens of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from oasis_eval.divergence import Run, TokenChanges, token_changes
from oasis_eval.errors import DataError
from oasis_eval.harness.protocols import Window
from oasis_eval.parsing import content_hash
from oasis_eval.prepared import PreparedModel
from oasis_eval.record import Metric, ProtocolInfo
from oasis_eval.references import Reference
from oasis_eval.spec import Dtype
from oasis_eval.statistics import Interval, log_perplexity_difference

VERSION = 2
"""Raised when a change of the code changes a number."""
WORST_TOKENS = 0.01
"""Share of the tokens whose part of all divergence and of all loss increase is measured."""
WORST_LOSSES = 0.001
"""Share of the tokens whose part of all loss is measured."""

Array = NDArray[np.float64]
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}


class WindowFidelity(NamedTuple):
    """One window, token by token, [R] each; losses and divergences in nats."""

    kl: Array
    """KL(reference || scheme)."""
    nll: Array
    """Loss under the scheme."""
    reference_nll: Array
    same_top: NDArray[np.bool_]
    """Whether both models predict the same token; of equally likely ones the first is it."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A model under a scheme beside its reference on some windows."""

    windows: tuple[WindowFidelity, ...]
    length: int
    """Tokens of the longest window."""
    dtype: Dtype
    """Of the reference."""

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return sum(len(window.kl) for window in self.windows)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of all windows together, by name."""
        kl_T, nll_T, before_T, same_T = (
            np.concatenate(parts) for parts in zip(*self.windows, strict=True)
        )
        values = {
            "same_top1": float(same_T.mean()),
            "delta_nll_nats": float((nll_T - before_T).mean()),
            "median_nll_nats": float(np.median(nll_T)),
            "worst_window_nll_nats": float(max_of([w.nll.mean() for w in self.windows])),
            "nll_tail_share": tail_share(nll_T, WORST_LOSSES),
            "kl_tail_share": tail_share(kl_T, WORST_TOKENS),
            "increase_tail_share": tail_share(nll_T - before_T, WORST_TOKENS),
            "kl_nats": float(kl_T.mean()),
            "kl_max_nats": max_of(kl_T),
        }
        for name, share in _PERCENTILES.items():
            values[f"kl_{name}_nats"] = float(np.quantile(kl_T, share))
        return values

    def delta(self) -> Interval | None:
        """Return the change of the mean loss with its paired block-bootstrap interval.

        None where there is no interval: fewer than two windows, or a loss that is not finite.
        """
        return self._interval(
            [float(window.reference_nll.sum()) for window in self.windows],
            [float(window.nll.sum()) for window in self.windows],
        )

    def divergence(self) -> Interval | None:
        """Return the mean KL with its block-bootstrap interval; None as for `delta`."""
        sums = [float(window.kl.sum()) for window in self.windows]
        return self._interval([0.0] * len(sums), sums)

    def _interval(self, first_W: list[float], second_W: list[float]) -> Interval | None:
        if len(self.windows) < 2 or not np.isfinite([*first_W, *second_W]).all():
            return None
        return log_perplexity_difference(first_W, second_W, [len(w.kl) for w in self.windows])

    @property
    def protocol(self) -> ProtocolInfo:
        """How the numbers were measured."""
        name = f"fidelity-{self.length}"
        summary = (
            f"against the unquantized model in {self.dtype}, on the scored tokens, one window a "
            f"pass; tails: worst {WORST_TOKENS:.0%} of tokens (KL, loss increase), worst "
            f"{WORST_LOSSES:.1%} (loss)"
        )
        return ProtocolInfo(
            name=name,
            version=VERSION,
            sha256=content_hash([name, VERSION, summary]),
            summary=summary,
            details={
                "window": self.length,
                "num_windows": len(self.windows),
                "num_tokens": self.num_tokens,
                "reference_dtype": self.dtype,
            },
        )

    def as_metrics(self, task: str) -> tuple[Metric, ...]:
        """Return the numbers as a record of `task` holds them, sorted by name."""
        intervals = {"delta_nll_nats": self.delta(), "kl_nats": self.divergence()}
        return tuple(
            Metric(
                task=task,
                name=name,
                value=value,
                stderr=None if (found := intervals.get(name)) is None else found.stderr,
                count=len(self.windows),
                protocol=self.protocol.name,
            )
            for name, value in sorted(self.metrics().items())
        )

    def as_rows(self) -> list[dict[str, object]]:
        """Return what is stored of each window beside a record."""
        return [
            {
                "fidelity_nll_nats": float(window.nll.sum()),
                "reference_nll_nats": float(window.reference_nll.sum()),
                "kl_nats": float(window.kl.sum()),
                "num_same_top1": int(window.same_top.sum()),
            }
            for window in self.windows
        ]


def compare(
    prepared: PreparedModel,
    windows: Sequence[Window],
    reference: Reference,
    *,
    on_window: Callable[[], object] = lambda: None,
) -> Fidelity:
    """Run a model over windows whose reference pass is stored.

    Args:
        prepared: The model under its scheme.
        windows: What to run, and which tokens count.
        reference: Its `fill` has seen every window.
        on_window: Called after each.

    Raises:
        DataError: There is nothing to compare on.
        RecordError: A stored pass has gone.
    """
    if not any(window.targets for window in windows):
        raise DataError("fidelity needs at least one window with a scored token; found none")
    run = Run(prepared.model, prepared.device)
    found = []
    for window in windows:
        if window.targets:
            found.append(_compare(run, window, reference, prepared.device))
            on_window()
    length = max(len(window.input_ids) for window in windows)
    return Fidelity(tuple(found), length, reference.dtype)


def tail_share(values: Array, worst: float) -> float:
    """Return what part of all that is positive in `values` the largest of them make up.

    Args:
        values: One number a token.
        worst: Share of the tokens that count as the largest, one at least.

    Returns:
        Between 0 and 1; NaN for values that are not finite, 0 where nothing is positive.
    """
    if not np.isfinite(values).all():
        return math.nan
    positive = np.sort(np.maximum(values, 0.0))[::-1]
    total = float(positive.sum())
    count = max(1, math.ceil(worst * len(values) - 1e-9))
    return float(positive[:count].sum()) / total if total > 0.0 else 0.0


def max_of(values: Array | Sequence[float]) -> float:
    """Return the largest value; a NaN is not lost."""
    return float(np.max(np.asarray(values)))


@torch.no_grad()
def _compare(run: Run, window: Window, reference: Reference, device: str) -> WindowFidelity:
    run.start(window.input_ids)
    states = reference.states(window)
    targets_R = torch.tensor(window.targets, device=device)
    tiles: list[TokenChanges] = []
    for rows in reference.tiles(len(targets_R)):
        base_RV = reference.logits(states.hidden[rows]).float()
        other_RV = run.logits(slice(window.offset + rows.start, window.offset + rows.stop)).float()
        tiles.append(token_changes(base_RV, other_RV, targets_R[rows], states.top[rows]))
    kl_R, change_R, base_nll_R, same_R = (
        torch.cat(parts).double().cpu().numpy() for parts in zip(*tiles, strict=True)
    )
    return WindowFidelity(
        # Rounding can leave a divergence a hair below 0.
        kl=np.maximum(kl_R, 0.0),
        nll=base_nll_R + change_R,
        reference_nll=base_nll_R,
        same_top=same_R.astype(np.bool_),
    )


def answer_flips(
    before: Sequence[Mapping[str, object]],
    after: Sequence[Mapping[str, object]],
    *,
    task: str,
    protocol: str,
) -> tuple[Metric, ...]:
    """Return the shares of questions whose answer, read strictly, changed from right to wrong.

    And the other way. Only their difference shows in Pass@1.

    Args:
        before: Samples of the unquantized model.
        after: Samples under the scheme.
        task: Of both.
        protocol: Of both.

    Raises:
        DataError: They are not answers to the same questions.
    """
    first, second = (
        {row["question"]: bool(row["strict"]) for row in rows} for rows in (before, after)
    )
    if first.keys() != second.keys() or not first:
        raise DataError(
            f"{task}: {len(first)} answers of the unquantized model, {len(second)} under the "
            "scheme; expected answers to the same questions: delete the records and run again"
        )
    n = len(first)
    counts = {
        "flips_right_to_wrong": sum(first[key] and not second[key] for key in first),
        "flips_wrong_to_right": sum(second[key] and not first[key] for key in first),
    }
    return tuple(
        Metric(
            task=task,
            name=name,
            value=count / n,
            stderr=math.sqrt(count / n * (1.0 - count / n) / (n - 1)) if n > 1 else None,
            count=n,
            protocol=protocol,
        )
        for name, count in counts.items()
    )
