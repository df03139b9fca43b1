"""Observers: what reduces the activations of one layer to a range as they pass.

None keeps activations. Percentiles keep the tails, the squared-error search one sum per ratio it
tries; both see the text twice, first to learn the count or the extremes.

Dimensions: N real tokens of one sequence, K features, R ranges, M values behind one range.
"""

from __future__ import annotations

from torch import Tensor

from oasis_eval.quant.primitives import ACTIVATION_DIMS, Range, minmax
from oasis_eval.quant.ranges import (
    Tails,
    best_clipping,
    clipping_errors,
    merge_tails,
    percentile_range,
    tail_length,
    tails,
)
from oasis_eval.spec import TensorFormat


class Observer:
    """Base: the extremes of all tokens, in one pass."""

    num_passes = 1
    """How often the text must be seen."""

    def __init__(self, fmt: TensorFormat) -> None:
        self._format = fmt
        self._dims = ACTIVATION_DIMS[fmt.granularity]
        self._span: Range | None = None

    def observe(self, x_NK: Tensor, sequence: int) -> None:
        """Take in the real tokens of one sequence.

        Args:
            x_NK: fp32, N > 0.
            sequence: Number of the sequence in its batch.
        """
        self._span = _union(self._span, _flat(minmax(x_NK, self._dims)))

    def end_batch(self) -> None:
        """Note that the sequences observed so far are complete."""

    def end_pass(self) -> None:
        """Note that the text has been seen once."""

    def result(self) -> Range | None:
        """Return the range, [1] or [K] in fp32; None if nothing was observed."""
        return self._span

    def _rows(self, x_NK: Tensor) -> Tensor:
        """Return the values [R, M], a row for each range."""
        return x_NK.reshape(1, -1) if self._format.granularity == "tensor" else x_NK.T


class RunningObserver(Observer):
    """Exponentially weighted mean of the sequences' ranges, in order.

    A layer that runs more than once in a pass has the union of its ranges as the sequence's.
    """

    def __init__(self, fmt: TensorFormat) -> None:
        super().__init__(fmt)
        self._pending: dict[int, Range] = {}

    def observe(self, x_NK: Tensor, sequence: int) -> None:
        """Take the extremes, or the percentile, of one sequence."""
        if self._format.percentile < 100.0:
            x_RM = self._rows(x_NK)
            count = x_RM.shape[-1]
            ends = tails(x_RM, tail_length(count, self._format.percentile))
            span = percentile_range(ends, count, self._format.percentile)
        else:
            span = minmax(x_NK, self._dims)
        self._pending[sequence] = _union(self._pending.get(sequence), _flat(span))

    def end_batch(self) -> None:
        """Fold the batch's sequences into the running range, in order."""
        momentum = self._format.momentum
        for _, span in sorted(self._pending.items()):
            low, high = span.low.double(), span.high.double()
            if self._span is not None:
                low = self._span.low * momentum + low * (1 - momentum)
                high = self._span.high * momentum + high * (1 - momentum)
            self._span = Range(low, high)
        self._pending.clear()

    def result(self) -> Range | None:
        """Return the running range."""
        if self._span is None:
            return None
        return Range(self._span.low.float(), self._span.high.float())


class PercentileObserver(Observer):
    """Exact percentile over all tokens; keeps the tails only."""

    num_passes = 2

    def __init__(self, fmt: TensorFormat) -> None:
        super().__init__(fmt)
        self._count = 0
        self._counted = False
        self._tails: Tails | None = None

    def observe(self, x_NK: Tensor, sequence: int) -> None:
        """Count the values, then, in the second pass, keep the extreme ones."""
        x_RM = self._rows(x_NK)
        if not self._counted:
            self._count += x_RM.shape[-1]
            return
        length = tail_length(self._count, self._format.percentile)
        ends = tails(x_RM, length)
        self._tails = ends if self._tails is None else merge_tails(self._tails, ends, length)

    def end_pass(self) -> None:
        """Note that all values are counted."""
        self._counted = True

    def result(self) -> Range | None:
        """Return the percentile and its mirror image."""
        if self._tails is None:
            return None
        return _flat(percentile_range(self._tails, self._count, self._format.percentile))


class ErrorObserver(Observer):
    """The clipping of least squared error; keeps one sum per ratio tried.

    The first pass finds the extremes, the second sums the error of every ratio of them.
    """

    num_passes = 2

    def __init__(self, fmt: TensorFormat) -> None:
        super().__init__(fmt)
        self._has_extremes = False
        self._errors: Tensor | None = None

    def observe(self, x_NK: Tensor, sequence: int) -> None:
        """Widen the extremes, then, in the second pass, add up errors."""
        if not self._has_extremes:
            super().observe(x_NK, sequence)
            return
        assert self._span is not None
        errors = clipping_errors(x_NK, self._span, self._format, self._dims).flatten(1)
        self._errors = errors if self._errors is None else self._errors + errors

    def end_pass(self) -> None:
        """Note that the extremes are known."""
        self._has_extremes = True

    def result(self) -> Range | None:
        """Return the range of least error."""
        if self._errors is None or self._span is None:
            return None
        return best_clipping(self._errors, self._span)


def observer_for(fmt: TensorFormat) -> Observer:
    """Return a fresh observer of a format with static ranges."""
    kinds: dict[str, type[Observer]] = {
        "minmax": Observer,
        "running_minmax": RunningObserver,
        "percentile": PercentileObserver,
        "mse": ErrorObserver,
    }
    return kinds[fmt.ranges](fmt)


def _flat(span: Range) -> Range:
    return Range(span.low.flatten(), span.high.flatten())


def _union(first: Range | None, second: Range) -> Range:
    if first is None:
        return second
    return Range(first.low.minimum(second.low), first.high.maximum(second.high))
