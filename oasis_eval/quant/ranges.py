"""Ranges that leave something out: exact percentiles and the clipping of least squared error.

Both work on one tensor (weights) and piece by piece (activations, see `calibrate`), with the same
functions. Everything is relative to the data, so a power-of-two factor passes through unchanged.

Dimensions: R what shares nothing, M what shares one range, K values kept of each row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from oasis_eval.quant.primitives import (
    WEIGHT_DIMS,
    Grid,
    Range,
    join_groups,
    largest_of_all,
    make_grid,
    minmax,
    snap,
    split_groups,
)
from oasis_eval.spec import TensorFormat

CLIPPING_RATIOS = tuple(2.0 ** (-step / 6) for step in range(40))
"""Shares of the full range that the squared-error search tries: 12 % apart, down to 1.1 %."""


class Tails(NamedTuple):
    """The most extreme values of each row."""

    smallest_RK: Tensor  # noqa: N815 - shape suffix
    """Ascending."""
    largest_RK: Tensor  # noqa: N815 - shape suffix
    """Descending."""


def tail_length(count: int, percentile: float) -> int:
    """Return how many extreme values of `count` decide the percentile."""
    return min(count, math.floor((1 - percentile / 100) * (count - 1)) + 2)


def tails(x_RM: Tensor, length: int) -> Tails:
    """Return the `length` smallest and largest values of each row, or all if there are fewer."""
    length = min(length, x_RM.shape[-1])
    return Tails(
        torch.topk(x_RM, length, largest=False).values,
        torch.topk(x_RM, length, largest=True).values,
    )


def merge_tails(first: Tails, second: Tails, length: int) -> Tails:
    """Return the tails of two sets of values together."""
    return Tails(
        tails(torch.cat([first.smallest_RK, second.smallest_RK], dim=-1), length).smallest_RK,
        tails(torch.cat([first.largest_RK, second.largest_RK], dim=-1), length).largest_RK,
    )


def percentile_range(ends: Tails, count: int, percentile: float) -> Range:
    """Return the percentile and its mirror image, interpolated linearly between order statistics.

    Args:
        ends: At least `tail_length(count, percentile)` values of each row.
        count: Values in a row.
        percentile: Above 50, up to 100.

    Returns:
        Low and high of shape [R, 1], fp32.
    """
    position = (1 - percentile / 100) * (count - 1)
    whole = math.floor(position)
    share = position - whole

    def at(values_RK: Tensor) -> Tensor:
        inner = values_RK[:, whole : whole + 1].double()
        if share == 0.0:
            return inner.float()
        return (inner * (1 - share) + values_RK[:, whole + 1 : whole + 2].double() * share).float()

    return Range(at(ends.smallest_RK), at(ends.largest_RK))


def clipping_errors(
    x: Tensor,
    span: Range,
    fmt: TensorFormat,
    dims: tuple[int, ...],
    *,
    largest: Tensor | None = None,
) -> Tensor:
    """Return the squared error of every clipping ratio, summed over `dims` in float64.

    Errors are relative to the squared end of the range, so that tiny values do not underflow.
    `dims` are those that a range of `span` covers, kept with length 1; `largest` is that of
    `make_grid`.

    Returns:
        [ratios, ...] with the dimensions of `span`.
    """
    end = torch.maximum(span.high, -span.low)
    unit = torch.where(end > 0, end, torch.ones_like(end))
    errors = []
    for ratio in CLIPPING_RATIOS:
        clipped = Range(span.low * ratio, span.high * ratio)
        grid = make_grid(clipped, fmt, torch.float32, largest=largest)
        error = snap(x, grid, clip=True).sub_(x).div_(unit)
        errors.append(error.square_().sum(dims, keepdim=True, dtype=torch.float64))
    return torch.stack(errors)


def best_clipping(errors: Tensor, span: Range) -> Range:
    """Return the range of least error; of equal ones the widest."""
    ratios = torch.tensor(CLIPPING_RATIOS, dtype=torch.float32, device=errors.device)
    ratio = ratios[errors.argmin(dim=0)]
    return Range(span.low * ratio, span.high * ratio)


def weight_range(
    x: Tensor, fmt: TensorFormat, dims: tuple[int, ...], *, largest: Tensor | None = None
) -> Range:
    """Return the range of a weight (or of its groups) as the format estimates it.

    Args:
        x: The weight, or a part of it, in fp32.
        fmt: Its `ranges` say how: min-max, least squared error or a percentile.
        dims: Dimensions that share a range.
        largest: That of `make_grid`.

    Returns:
        Low and high ends with the shape of `x`, `dims` of length 1.
    """
    span = minmax(x, dims)
    if fmt.ranges == "mse":
        return best_clipping(clipping_errors(x, span, fmt, dims, largest=largest), span)
    if fmt.ranges == "percentile":
        x_RM = x.flatten(-len(dims)).flatten(0, -2) if x.dim() > len(dims) else x.reshape(1, -1)
        count = x_RM.shape[-1]
        low, high = percentile_range(
            tails(x_RM, tail_length(count, fmt.percentile)), count, fmt.percentile
        )
        return Range(low.reshape(span.low.shape), high.reshape(span.high.shape))
    return span


def weight_grids(weight_NK: Tensor, fmt: TensorFormat) -> list[tuple[Tensor, Grid]]:
    """Return the parts of a weight [N, K] in fp32, from `split_groups`, and their grids."""
    dims = WEIGHT_DIMS[fmt.granularity]
    work_NK = weight_NK.float()
    largest = largest_of_all(work_NK, fmt, (-2, -1))
    grids = []
    for part in split_groups(work_NK, fmt.group_size):
        span = weight_range(part, fmt, dims, largest=largest)
        grids.append((part, make_grid(span, fmt, weight_NK.dtype, largest=largest)))
    return grids


def clips_weights(fmt: TensorFormat) -> bool:
    """Return whether weights may lie outside of the range that the format estimates."""
    return not fmt.symmetric or fmt.ranges != "minmax"


def fake_quantize_weight(weight_NK: Tensor, fmt: TensorFormat) -> Tensor:
    """Quantize and dequantize a weight [N, K]; a new tensor of the same dtype."""
    parts = [
        snap(part, grid, clip=clips_weights(fmt)) for part, grid in weight_grids(weight_NK, fmt)
    ]
    return join_groups(parts, weight_NK.shape).to(weight_NK.dtype)
