"""GPTQ: round a weight one input at a time and let the inputs still to come make up for the error.

With H the second moments of a layer's inputs and U the upper Cholesky factor of its inverse, the
error of input j, e = (w_j - q_j) / U_jj, is taken out of the later inputs as w_k -= e U_jk. That
is done at once inside of a block, and for all later inputs at the end of one, as a matrix product.
Blocks end where a group starts, so that the range of a group is always that of weights with every
earlier error taken out.

Everything is float64: the inverse of H needs it at low damping, and the cost of a calibration is
elsewhere.

Source: Frantar et al., "GPTQ", ICLR 2023.
Dimensions: N output channels, K inputs, G groups of M inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.primitives import (
    WEIGHT_DIMS,
    Grid,
    Limits,
    codes_of,
    largest_of_all,
    make_grid,
)
from oasis_eval.quant.ranges import weight_range
from oasis_eval.quant.transforms.edits import wide
from oasis_eval.quant.weights import CodePart, WeightCodes
from oasis_eval.spec import Gptq, TensorFormat

BLOCK = 128
"""Inputs whose errors are taken out one by one."""


class _Segment(NamedTuple):
    """Inputs that share a grid."""

    start: int
    stop: int


def quantize_weight(
    weight_NK: Tensor, hessian_KK: Tensor, fmt: TensorFormat, spec: Gptq, *, name: str
) -> WeightCodes:
    """Return codes of a weight that keep the outputs of a layer close on given inputs.

    Args:
        weight_NK: The weight, in the dtype in which the layer computes.
        hessian_KK: Second moments X^T X of the layer's inputs, up to a factor.
        fmt: Integers or floats.
        spec: Damping and the order of inputs.
        name: Layer for error messages.

    Returns:
        Codes on grids as `weights.encode` would make them. Inputs that were always 0 are rounded
        to nearest.

    Raises:
        QuantizationError: Weights or moments are not finite.
    """
    if not bool(torch.isfinite(weight_NK).all()):
        raise QuantizationError(f"{name}: the weight holds non-finite values")
    if not bool(torch.isfinite(hessian_KK).all()):
        raise QuantizationError(f"{name}: inputs on the calibration text are not finite")
    work_NK = wide(weight_NK)
    num_inputs = work_NK.shape[1]
    order_K = torch.arange(num_inputs, device=work_NK.device)
    if spec.order == "activation":
        order_K = torch.argsort(hessian_KK.diagonal(), descending=True, stable=True)
    segments = _segments(num_inputs, fmt.group_size)
    # One scale for all groups is that of the weight as it came.
    largest = largest_of_all(weight_NK.float(), fmt, (-2, -1))
    largest = None if largest is None else largest.squeeze(-1)  # a segment is [N, M]
    grids: list[Grid | None] = [None] * len(segments)
    if spec.order == "activation" or len(segments) == 1:
        grids = [_grid(weight_NK[:, start:stop], fmt, largest) for start, stop in segments]
    factor_KK = _inverse_factor(wide(hessian_KK)[order_K][:, order_K], spec.damping)
    work_NK = work_NK[:, order_K].contiguous()
    codes_NK = torch.empty(work_NK.shape, dtype=torch.float32, device=work_NK.device)

    places = order_K.tolist()
    group_size = segments[0].stop
    start = 0
    while start < num_inputs:
        stop = min(start + BLOCK, num_inputs)
        if spec.order == "natural":
            stop = min(stop, segments[start // group_size].stop)
            if grids[start // group_size] is None:
                # Earlier errors are all taken out here.
                group_NM = work_NK[:, slice(*segments[start // group_size])]
                grids[start // group_size] = _grid(group_NM.to(weight_NK.dtype), fmt, largest)
        errors_NB = torch.empty_like(work_NK[:, start:stop])
        for index in range(start, stop):
            grid = grids[places[index] // group_size]
            assert grid is not None
            column_N1 = work_NK[:, index : index + 1]
            code_N1 = codes_of(column_N1.float(), grid, clip=True)
            value_N1 = (code_N1 * grid.scale).to(weight_NK.dtype).double()
            error_N1 = (column_N1 - value_N1) / factor_KK[index, index]
            work_NK[:, index:stop] -= error_N1 * factor_KK[index, index:stop]
            errors_NB[:, index - start] = error_N1[:, 0]
            codes_NK[:, places[index]] = code_N1[:, 0]
        work_NK[:, stop:] -= errors_NB @ factor_KK[start:stop, stop:]
        start = stop
    return _assemble(codes_NK, segments, [grid for grid in grids if grid is not None], fmt)


def _segments(num_inputs: int, group_size: int | None) -> list[_Segment]:
    size = min(group_size or num_inputs, num_inputs)
    return [_Segment(start, min(start + size, num_inputs)) for start in range(0, num_inputs, size)]


def _grid(part_NM: Tensor, fmt: TensorFormat, largest: Tensor | None) -> Grid:
    """Return the grid of a segment, [N, 1] or [1, 1]."""
    span = weight_range(part_NM.float(), fmt, WEIGHT_DIMS[fmt.granularity], largest=largest)
    return make_grid(span, fmt, part_NM.dtype, largest=largest)


def _inverse_factor(hessian_KK: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian."""
    diagonal_K = hessian_KK.diagonal()
    is_dead = diagonal_K <= 0
    if bool(is_dead.all()):
        return torch.eye(len(hessian_KK), dtype=torch.float64, device=hessian_KK.device)
    mean = diagonal_K[~is_dead].mean()
    # An input that is always 0 has a row of zeros: with any diagonal it affects no other input.
    added_K = torch.where(is_dead, mean, torch.zeros_like(diagonal_K)) + damping * mean
    damped_KK = hessian_KK + torch.diag(added_K)
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(damped_KK))
    factor: Tensor = torch.linalg.cholesky(inverse_KK, upper=True)
    return factor


def _assemble(
    codes_NK: Tensor, segments: Sequence[_Segment], grids: Sequence[Grid], fmt: TensorFormat
) -> WeightCodes:
    """Put codes and grids into the parts that `weights.encode` makes."""
    if fmt.group_size is None:
        return WeightCodes((CodePart(codes_NK, grids[0]),), codes_NK.shape)
    size = segments[0].stop
    num_whole = sum(segment.stop - segment.start == size for segment in segments)
    whole = codes_NK[:, : num_whole * size].unflatten(-1, (num_whole, size))
    parts = [CodePart(whole, _stack(grids[:num_whole]))]
    if num_whole < len(segments):
        rest = codes_NK[:, num_whole * size :].unsqueeze(-2)
        parts.append(CodePart(rest, _stack(grids[num_whole:])))
    return WeightCodes(tuple(parts), codes_NK.shape)


def _stack(grids: Sequence[Grid]) -> Grid:
    """Put grids of [N, 1] side by side as one of [N, G, 1]."""
    scale = torch.stack([grid.scale for grid in grids], dim=1)
    first = grids[0]
    if isinstance(first.limits, Limits):
        return Grid(scale, first.limits, None, first.kind)
    limits = [grid.limits for grid in grids if not isinstance(grid.limits, Limits)]
    lowest = torch.stack([item[0] for item in limits], dim=1)
    highest = torch.stack([item[1] for item in limits], dim=1)
    zero_points = [grid.zero_point for grid in grids if grid.zero_point is not None]
    return Grid(scale, (lowest, highest), torch.stack(zero_points, dim=1))
