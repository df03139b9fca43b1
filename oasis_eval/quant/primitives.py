"""Quantization arithmetic on plain tensors: range -> grid -> codes -> values.

Everything is computed in fp32, whatever the dtype that comes in, and only the dequantized values
are cast back. The rules, each of which keeps a property that low-bit numbers are easily robbed of:

- Codes are round(x / scale), a true division with ties to even. Multiplying by 1 / scale moves an
  element in a million to the next level, and a tiny fp16 scale has no finite reciprocal.
- There is no absolute floor under scales, so quantizing W * 2^-k gives 2^-k times the quantized W
  bit for bit. Underflow: a scale that would be smaller than the smallest normal fp32 number is
  raised to it, which is also what turns a zero range into exact zeros without dividing by zero.
- Overflow: scales and levels are limited so that no finite input dequantizes to infinity, be it in
  fp32 or in the narrower dtype that the values are cast to; a level beyond the largest number of
  that dtype is not used.
- An asymmetric range is extended to contain 0, and codes are kept relative to the zero point, so 0
  maps to exactly 0.
- A range with a NaN or an infinity in it has scale NaN: everything that shares it becomes NaN,
  and a broken activation cannot pass for a quantized one.
- The code of a float format is the number that it stores, a value of e4m3 or e2m1 (`floats.py`).

Dimensions: N output channels, K inputs, R what shares nothing, M what shares one scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from oasis_eval.quant.floats import (
    E2M1,
    E4M3,
    FloatType,
    block_scale,
    power_of_two_scale,
    round_,
    top_scale,
)
from oasis_eval.spec import Granularity, NumberType, TensorFormat

SMALLEST_SCALE = 2.0**-126
FLOATS: Mapping[NumberType, FloatType] = MappingProxyType({"fp8_e4m3": E4M3, "fp4_e2m1": E2M1})
"""Number types whose codes are floats."""
_LARGEST_FP32 = float(torch.finfo(torch.float32).max)

WEIGHT_DIMS: Mapping[Granularity, tuple[int, ...]] = MappingProxyType(
    {"tensor": (-2, -1), "channel": (-1,), "group": (-1,)}
)
"""Dimensions of a weight [N, K], or of its groups [N, K / group, group], that share a scale."""
ACTIVATION_DIMS: Mapping[Granularity, tuple[int, ...]] = MappingProxyType(
    {"tensor": (-2, -1), "channel": (-2,), "token": (-1,), "group": (-1,)}
)
"""Dimensions of one sequence's activations [T, K] that share a scale."""


class Range(NamedTuple):
    """Smallest and largest value to represent, shaped so that they broadcast against the tensor."""

    low: Tensor
    high: Tensor


class Limits(NamedTuple):
    """Smallest and largest code where they are the same for the whole tensor."""

    lowest: int
    highest: int


class Grid(NamedTuple):
    """The representable values: scale * code, where code is relative to the zero point."""

    scale: Tensor
    """fp32; broadcasts against the tensor."""
    limits: Limits | tuple[Tensor, Tensor]
    """Smallest and largest code."""
    zero_point: Tensor | None
    """Stored code of 0; None for symmetric formats, whose zero is code 0."""
    kind: FloatType | None = None
    """What codes are rounded to; None: integers."""


def split_groups(x: Tensor, group_size: int | None) -> tuple[Tensor, ...]:
    """View the last dimension in groups.

    Args:
        x: [..., K].
        group_size: Inputs per group, or None for no grouping.

    Returns:
        `(x,)` without grouping; else views [..., K // size, size] and, where K leaves a remainder,
        [..., 1, K % size]. A row shorter than a group is one group.
    """
    if group_size is None:
        return (x,)
    width = x.shape[-1]
    size = min(group_size, width)
    whole = width - width % size
    views = [x[..., :whole].unflatten(-1, (whole // size, size))]
    if whole < width:
        views.append(x[..., whole:].unsqueeze(-2))
    return tuple(views)


def join_groups(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Undo `split_groups`: put its parts back into one tensor of `shape`."""
    if len(parts) == 1:
        return parts[0].reshape(shape)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


def minmax(x: Tensor, dims: tuple[int, ...]) -> Range:
    """Return the extremes of `x` over `dims`, kept as dimensions of size 1."""
    return Range(x.amin(dims, keepdim=True), x.amax(dims, keepdim=True))


def largest_of_all(x: Tensor, fmt: TensorFormat, dims: tuple[int, ...]) -> Tensor | None:
    """Return the largest magnitude over `dims`, for formats that scale their groups' scales.

    Args:
        x: Not yet split into groups.
        fmt: Only groups with e4m3 scales have a scale above them.
        dims: What shares that one: all of a weight, the inputs of a token.

    Returns:
        fp32, with one dimension more than `x`, so that it broadcasts against its groups.
    """
    if fmt.scales != "e4m3":
        return None
    low, high = minmax(x, dims)
    return torch.maximum(high, -low).float().unsqueeze(-1)


def make_grid(
    span: Range, fmt: TensorFormat, dtype: torch.dtype, *, largest: Tensor | None = None
) -> Grid:
    """Return the grid that represents a range.

    Args:
        span: What must be representable; values outside are clipped by `snap`.
        fmt: Type, bits and symmetry.
        dtype: What dequantized values will be cast to; it limits the levels of asymmetric grids.
        largest: From `largest_of_all`; needed with e4m3 scales.
    """
    low, high = span.low.float(), span.high.float()
    poison = (low - low) + (high - high)
    if fmt.type != "int":
        kind = FLOATS[fmt.type]
        scale = _float_scale(torch.maximum(high, -low), fmt, kind, largest)
        return Grid(scale.add_(poison), Limits(-kind.largest, kind.largest), None, kind)
    if fmt.symmetric:
        levels = 2 ** (fmt.bits - 1) - 1
        return Grid(
            _true_scale(torch.maximum(high, -low), levels).add_(poison),
            Limits(-levels, levels),
            None,
        )
    levels = 2**fmt.bits - 1
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    # Halved, because the width of a finite range can be infinite.
    scale = ((high / 2 - low / 2) / levels * 2).clamp_(min=SMALLEST_SCALE).add_(poison)
    zero_point = torch.round(-low / scale).clamp_(0, levels)
    limit = torch.floor(min(_LARGEST_FP32, float(torch.finfo(dtype).max)) * (1 - 2.0**-22) / scale)
    limits = torch.maximum(-zero_point, -limit), torch.minimum(levels - zero_point, limit)
    return Grid(scale, limits, zero_point)


def _true_scale(magnitude: Tensor, levels: int) -> Tensor:
    """Return the scale that takes the largest code to the largest magnitude."""
    largest = _LARGEST_FP32 / levels * (1 - 2.0**-22)
    return magnitude.div(levels).clamp_(SMALLEST_SCALE, largest)


def _float_scale(
    magnitude: Tensor, fmt: TensorFormat, kind: FloatType, largest: Tensor | None
) -> Tensor:
    if fmt.scales == "e8m0":
        return power_of_two_scale(magnitude)
    if fmt.scales == "e4m3":
        assert largest is not None, "e4m3 scales need the largest magnitude of all groups"
        return block_scale(magnitude, top_scale(largest))
    return _true_scale(magnitude, kind.largest)


def codes_of(x: Tensor, grid: Grid, *, clip: bool) -> Tensor:
    """Return codes relative to the zero point, as a new fp32 tensor.

    Args:
        x: fp32.
        grid: The representable values.
        clip: Whether values may lie outside of the grid. Those of a symmetric grid made from the
            extremes of `x` itself cannot, and are spared a pass.
    """
    # The scale stays a tensor on the device: CUDA divides by a host number by multiplying with
    # its reciprocal.
    codes = torch.div(x, grid.scale)
    if grid.kind is not None:
        return round_(codes, grid.kind)  # saturates, since rounded scales let values through
    codes.round_()
    if clip:
        if isinstance(grid.limits, Limits):
            codes.clamp_(grid.limits.lowest, grid.limits.highest)
        else:  # twice as fast as clamp_ with tensors
            torch.maximum(codes, grid.limits[0], out=codes)
            torch.minimum(codes, grid.limits[1], out=codes)
    return codes


def snap(x: Tensor, grid: Grid, *, clip: bool) -> Tensor:
    """Return the values of the grid nearest to `x`, as a new fp32 tensor; arguments as above."""
    return codes_of(x, grid, clip=clip).mul_(grid.scale)


def encode(x: Tensor, grid: Grid) -> Tensor:
    """Return stored codes: int8 of a symmetric grid, uint8 (zero point added) of another.

    Integer formats only.
    """
    assert grid.kind is None
    codes = codes_of(x.float(), grid, clip=True)
    if grid.zero_point is None:
        return codes.to(torch.int8)
    return codes.add_(grid.zero_point).to(torch.uint8)


def decode(codes: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Return the values that stored codes stand for."""
    relative = codes.float()
    if grid.zero_point is not None:
        relative = relative.sub_(grid.zero_point)
    return relative.mul_(grid.scale).to(dtype)


def fake_quantize(x: Tensor, fmt: TensorFormat, dims: tuple[int, ...]) -> Tensor:
    """Quantize and dequantize with the extremes of `x` itself as range.

    Where groups have e4m3 scales, each row (token) has a scale above them, so that what else is in
    the batch does not matter.

    Args:
        x: Floating point, at least two-dimensional.
        fmt: Type, bits, symmetry and group size.
        dims: Dimensions that share a scale, from `WEIGHT_DIMS` or `ACTIVATION_DIMS`.

    Returns:
        A new tensor of the shape and dtype of `x`.
    """
    work = x.float()
    largest = largest_of_all(work, fmt, (-1,))
    parts = [
        snap(
            part,
            make_grid(minmax(part, dims), fmt, x.dtype, largest=largest),
            clip=not fmt.symmetric,
        )
        for part in split_groups(work, fmt.group_size)
    ]
    return join_groups(parts, x.shape).to(x.dtype)
