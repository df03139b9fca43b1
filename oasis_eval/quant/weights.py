"""Weights as codes: what integer storage, integer products and GPTQ have in common.

`decode(encode(w))` is `ranges.fake_quantize_weight(w)` bit for bit, so a backend that stores codes
and one that stores dequantized values quantize alike.

Dimensions: N output channels, K inputs, G groups of M inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oasis_eval.quant.primitives import Grid, codes_of, join_groups
from oasis_eval.quant.ranges import clips_weights, weight_grids
from oasis_eval.spec import TensorFormat


class CodePart(NamedTuple):
    """Codes that lie side by side in a weight, and their grid."""

    codes: Tensor
    """Relative to the zero point, fp32; [N, K], or [N, G, M] with groups."""
    grid: Grid


class WeightCodes(NamedTuple):
    """A quantized weight: one part, or with groups that do not divide K a second, shorter one."""

    parts: tuple[CodePart, ...]
    shape: torch.Size
    """[N, K]."""


def encode(weight_NK: Tensor, fmt: TensorFormat) -> WeightCodes:
    """Round a weight [N, K] to the nearest codes."""
    clip = clips_weights(fmt)
    parts = tuple(
        CodePart(codes_of(part, grid, clip=clip), grid)
        for part, grid in weight_grids(weight_NK, fmt)
    )
    return WeightCodes(parts, weight_NK.shape)


def decode(weight: WeightCodes, dtype: torch.dtype) -> Tensor:
    """Return the values [N, K] that codes stand for."""
    values = [part.codes * part.grid.scale for part in weight.parts]
    return join_groups(values, weight.shape).to(dtype)
