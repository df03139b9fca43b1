"""Codes of weights as they are stored: one a byte at 8 bits, two a byte at 4 bits.

Two conventions could meet at a byte, so they are spelled out here and nowhere else:

- What a stored code stands for: a symmetric format stores the signed code itself at 8 bits (int8)
  and the code plus 8 at 4 bits; an asymmetric format stores the level 0..2^b-1 (uint8), and the
  zero point of each scale beside it, as the level that stands for 0 (uint8).
- Where a 4-bit code is: the input of even index in the low half of its byte, the next one in the
  high half. After an odd number of inputs the last high half is 0 and means nothing.

Dimensions: N output channels, K inputs, P bytes of a row, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.weights import CodePart, WeightCodes
from oasis_eval.spec import TensorFormat

SIGN_OFFSET = 8
"""What is added to signed 4-bit codes."""


class Layout(NamedTuple):
    """How a weight is stored; with the shape of the layer, all that reading it takes."""

    bits: int
    symmetric: bool
    group_size: int | None
    per_tensor: bool
    num_outputs: int
    num_inputs: int

    @property
    def code_dtype(self) -> torch.dtype:
        """Dtype of the stored codes."""
        return torch.int8 if self.bits == 8 and self.symmetric else torch.uint8

    @property
    def code_shape(self) -> tuple[int, int]:
        """[N, K] at 8 bits, [N, P] at 4."""
        width = self.num_inputs if self.bits == 8 else (self.num_inputs + 1) // 2
        return self.num_outputs, width

    @property
    def scale_shape(self) -> tuple[int, int]:
        """[N, G], or [1, 1] where the tensor has one scale."""
        return (1, 1) if self.per_tensor else (self.num_outputs, len(list(self.groups())))

    def groups(self) -> Iterator[slice]:
        """Yield the inputs of each scale."""
        size = self.group_size or self.num_inputs
        for start in range(0, self.num_inputs, size):
            yield slice(start, min(start + size, self.num_inputs))


class StoredWeight(NamedTuple):
    """A quantized weight in its storage."""

    codes: Tensor
    """[N, K] int8 or uint8, or [N, P] uint8 with two codes a byte."""
    scale: Tensor
    """[N, G] or [1, 1], fp32."""
    zero_point: Tensor | None
    """[N, G] or [1, 1], uint8; None for symmetric formats."""


def layout_of(fmt: TensorFormat, num_outputs: int, num_inputs: int) -> Layout:
    """Return how a weight [N, K] of an 8- or 4-bit integer format is stored."""
    assert fmt.type == "int"
    assert fmt.bits in (4, 8)
    return Layout(
        bits=fmt.bits,
        symmetric=fmt.symmetric,
        group_size=None if fmt.group_size is None else min(fmt.group_size, num_inputs),
        per_tensor=fmt.granularity == "tensor",
        num_outputs=num_outputs,
        num_inputs=num_inputs,
    )


def empty(layout: Layout, device: torch.device) -> StoredWeight:
    """Return a weight whose codes, scales and zero points are yet to be filled."""
    return StoredWeight(
        codes=torch.empty(layout.code_shape, dtype=layout.code_dtype, device=device),
        scale=torch.empty(layout.scale_shape, device=device),
        zero_point=None
        if layout.symmetric
        else torch.empty(layout.scale_shape, dtype=torch.uint8, device=device),
    )


def pack_nibbles(levels_NK: Tensor) -> Tensor:
    """Put two levels 0..15 into each byte.

    Args:
        levels_NK: uint8 [N, K].

    Returns:
        uint8 [N, P] with P = K / 2, rounded up.
    """
    if levels_NK.shape[-1] % 2:
        levels_NK = torch.nn.functional.pad(levels_NK, (0, 1))
    return levels_NK[:, 0::2] | (levels_NK[:, 1::2] << 4)


def unpack_nibbles(packed_NP: Tensor, num_inputs: int) -> Tensor:
    """Return the levels uint8 [N, K] of packed bytes [N, P]."""
    pairs = torch.stack([packed_NP & 0x0F, packed_NP >> 4], dim=-1)
    return pairs.flatten(-2)[:, :num_inputs]


def store(weight: WeightCodes, layout: Layout) -> StoredWeight:
    """Put codes into their storage.

    Raises:
        QuantizationError: A code does not fit the format, so that storing it would change it.
    """
    codes = [_levels(part, layout) for part in weight.parts]
    scales = [_columns(part.grid.scale, layout) for part in weight.parts]
    points = [
        _columns(part.grid.zero_point, layout)
        for part in weight.parts
        if part.grid.zero_point is not None
    ]
    levels_NK = codes[0] if len(codes) == 1 else torch.cat(codes, dim=-1)
    return StoredWeight(
        codes=levels_NK if layout.bits == 8 else pack_nibbles(levels_NK),
        scale=torch.cat(scales, dim=-1).contiguous(),
        zero_point=None if layout.symmetric else torch.cat(points, dim=-1).to(torch.uint8),
    )


def relative_codes(stored: StoredWeight, layout: Layout) -> Tensor:
    """Return the codes [N, K] relative to their zero points, int16."""
    if layout.bits == 4:
        levels_NK = unpack_nibbles(stored.codes, layout.num_inputs).to(torch.int16)
    else:
        levels_NK = stored.codes.to(torch.int16)
    if stored.zero_point is not None:
        return levels_NK.sub_(_spread(stored.zero_point, layout).to(torch.int16))
    return levels_NK.sub_(SIGN_OFFSET) if layout.bits == 4 else levels_NK


def values(stored: StoredWeight, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the values [N, K] that stored codes stand for, in `dtype`."""
    values_NK = relative_codes(stored, layout).float()
    return values_NK.mul_(_spread(stored.scale, layout)).to(dtype)


def impossible_code(stored: StoredWeight, layout: Layout) -> str | None:
    """Return which stored code no quantizer makes; None: all of them are possible."""
    if not layout.symmetric:
        return None
    lowest = -(2 ** (layout.bits - 1))
    if layout.bits == 4:
        found = unpack_nibbles(stored.codes, layout.num_inputs) == lowest + SIGN_OFFSET
    else:
        found = stored.codes == lowest
    if not bool(found.any()):
        return None
    return f"code {lowest}, and symmetric codes end at {lowest + 1}"


def impossible_zero_point(stored: StoredWeight, layout: Layout) -> str | None:
    """Return which stored zero point is no level of its format; None: all of them are."""
    largest = 2**layout.bits - 1
    if stored.zero_point is None or not bool((stored.zero_point > largest).any()):
        return None
    return f"a zero point of {int(stored.zero_point.max())}, and levels end at {largest}"


def _levels(part: CodePart, layout: Layout) -> Tensor:
    """Return the stored form [N, M] of a part's codes, still one a byte."""
    codes = part.codes.flatten(1)
    if layout.symmetric:
        low, high = -(2 ** (layout.bits - 1)) + 1, 2 ** (layout.bits - 1) - 1
        offset = SIGN_OFFSET if layout.bits == 4 else 0
    else:
        assert part.grid.zero_point is not None
        codes = (part.codes + part.grid.zero_point).flatten(1)
        low, high, offset = 0, 2**layout.bits - 1, 0
    least, most = (float(extreme) for extreme in torch.aminmax(codes))
    if not (low <= least and most <= high):
        raise QuantizationError(
            f"codes from {least:g} to {most:g} do not fit {layout.bits} bits ({low} to {high})"
        )
    return codes.add(offset).to(layout.code_dtype)


def _columns(per_group: Tensor, layout: Layout) -> Tensor:
    """Return scales or zero points of a part as [N, G], or [1, 1]."""
    return per_group.reshape(layout.scale_shape[0], -1)


def _spread(per_group: Tensor, layout: Layout) -> Tensor:
    """Repeat scales or zero points [N, G] so that they broadcast against [N, K]."""
    if per_group.shape[-1] == 1:
        return per_group
    size = layout.group_size or layout.num_inputs
    return per_group.repeat_interleave(size, dim=-1)[:, : layout.num_inputs]
