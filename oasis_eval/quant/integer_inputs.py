"""Activations as integer codes, by the very arithmetic of fake quantization.

Codes are int8. An asymmetric format of 8 bits has codes relative to its zero point of up to +-255;
there the stored levels are kept, shifted by 128, and the product is put right afterwards through
the sums of the weight's codes, exactly.

Dimensions: M rows (tokens), K inputs, G groups of inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oasis_eval.quant.primitives import Grid, codes_of, make_grid, minmax, split_groups
from oasis_eval.spec import TensorFormat

_LEVEL_OFFSET = 128
"""What is subtracted from stored levels 0..255 to make them int8."""


class IntegerInput(NamedTuple):
    """Quantized rows."""

    codes_MK: Tensor  # noqa: N815 - shape suffix
    """int8."""
    scale_MG: Tensor  # noqa: N815 - shape suffix
    """fp32 [M, G]; NaN where the row, or the group, has a non-finite value."""
    offset_MG: Tensor | None  # noqa: N815 - shape suffix
    """Code of 0, fp32 [M, G] or [1, 1]; None: it is 0."""


class RowCodes:
    """Dynamic ranges inside a token, per token or per group."""

    def __init__(self, fmt: TensorFormat) -> None:
        self._format = fmt

    def __call__(self, x: Tensor, name: str) -> IntegerInput:
        """Quantize each token, or each group of its inputs, by its own extremes."""
        rows_MK = x.reshape(-1, x.shape[-1]).float()
        codes, scales, offsets = [], [], []
        for part in split_groups(rows_MK, self._format.group_size):
            grid = make_grid(minmax(part, (-1,)), self._format, x.dtype)
            relative = codes_of(part, grid, clip=not self._format.symmetric)
            scales.append(grid.scale.flatten(1))
            offset = _offset(grid, self._format)
            if offset is not None:
                relative.add_(offset)
                offsets.append(offset.flatten(1))
            codes.append(relative.flatten(1).to(torch.int8))
        return IntegerInput(_joined(codes), _joined(scales), _joined(offsets) if offsets else None)


class StaticCodes:
    """One range for the tensor, fixed by calibration; a non-finite token becomes NaN."""

    def __init__(self, grid: Grid, fmt: TensorFormat) -> None:
        self._grid = grid
        self._offset = _offset(grid, fmt)

    def __call__(self, x: Tensor, name: str) -> IntegerInput:
        """Quantize by the fixed range; values outside are clipped."""
        rows_MK = x.reshape(-1, x.shape[-1]).float()
        low_M1, high_M1 = minmax(rows_MK, (-1,))
        poison_M1 = (high_M1 - high_M1).add_(low_M1 - low_M1)
        codes_MK = codes_of(rows_MK, self._grid, clip=True)
        offset = None
        if self._offset is not None:
            codes_MK.add_(self._offset)
            offset = self._offset.reshape(1, 1)
        return IntegerInput(codes_MK.to(torch.int8), self._grid.scale + poison_M1, offset)


def largest_code(fmt: TensorFormat) -> int:
    """Return the largest magnitude that a code relative to its zero point can have."""
    return (1 << (fmt.bits - 1)) - 1 if fmt.symmetric else (1 << fmt.bits) - 1


def values(rows: IntegerInput, group_size: int | None) -> Tensor:
    """Return what the codes stand for, fp32 [M, K]."""
    values_MK = rows.codes_MK.float()
    if rows.offset_MG is not None:
        values_MK.sub_(_spread(rows.offset_MG, group_size, values_MK.shape[1]))
    return values_MK.mul_(_spread(rows.scale_MG, group_size, values_MK.shape[1]))


def _offset(grid: Grid, fmt: TensorFormat) -> Tensor | None:
    """Return the int8 code of 0 where codes relative to it would not fit int8."""
    if grid.zero_point is None or fmt.bits < 8:
        return None
    return grid.zero_point - _LEVEL_OFFSET


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _spread(per_group_MG: Tensor, group_size: int | None, width: int) -> Tensor:
    if per_group_MG.shape[-1] == 1 or group_size is None:
        return per_group_MG
    return per_group_MG.repeat_interleave(group_size, dim=-1)[:, :width]
