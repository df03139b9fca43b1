"""Low-bit floats on plain tensors: rounding to their values, and the scales of MX and NV formats.

Nothing here knows granularities; `primitives` divides by the scale first. A float of E exponent and
M mantissa bits is evenly spaced between two powers of two, so rounding is a division by that
spacing, a power of two, and therefore exact: ties go to the even mantissa, values beyond the
largest saturate, NaN and infinity become NaN.

Sources: "OCP 8-bit Floating Point Specification" 1.0 (e4m3), "OCP Microscaling Formats (MX)
Specification" 1.0 (e2m1, e8m0), NVIDIA's description of NVFP4 (e2m1 in groups of 16 with e4m3
scales under one fp32 scale).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EXPONENT_BITS = 0x7F800000
"""Of an fp32 number; what is left of it is the power of two below."""
_SMALLEST_TOP = 2.0**-117
"""Of an NV tensor scale: times the smallest e4m3 number it is still a normal fp32 number."""
_LARGEST_FP32 = float(torch.finfo(torch.float32).max)


class FloatType(NamedTuple):
    """A float without infinities."""

    smallest_exponent: int
    """Of normal numbers; below it lie the subnormal ones."""
    mantissa_bits: int
    largest: int
    """Largest finite value."""

    @property
    def smallest(self) -> float:
        """Smallest positive value."""
        return 2.0 ** (self.smallest_exponent - self.mantissa_bits)


E4M3 = FloatType(smallest_exponent=-6, mantissa_bits=3, largest=448)
E2M1 = FloatType(smallest_exponent=0, mantissa_bits=1, largest=6)


def round_(x: Tensor, kind: FloatType) -> Tensor:
    """Round an fp32 tensor to the nearest values of a float type, in place."""
    spacing = _power_below(x).clamp_(min=2.0**kind.smallest_exponent).mul_(2.0**-kind.mantissa_bits)
    return x.div_(spacing).round_().mul_(spacing).clamp_(-kind.largest, kind.largest)


def _power_below(x: Tensor) -> Tensor:
    """Return the largest power of two up to |x|; 0 for subnormal fp32 numbers."""
    return (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def power_of_two_scale(largest: Tensor) -> Tensor:
    """Return the e8m0 scale of each MX group of e2m1 values.

    It brings the largest value into [4, 8), where what lies beyond 6 saturates: the rule of the MX
    specification. Scales end at 2^-127; an all-zero group has that one.

    Args:
        largest: Largest magnitude of each group, fp32.
    """
    return _power_below(largest).mul_(0.25).clamp_(min=2.0**-127)


def top_scale(largest: Tensor) -> Tensor:
    """Return the fp32 scale above the e4m3 scales of an NV tensor (or token).

    Args:
        largest: Largest magnitude of all groups under it, fp32.
    """
    span = E4M3.largest * E2M1.largest
    return largest.div(span).clamp_(_SMALLEST_TOP, _LARGEST_FP32 / span * (1 - 2.0**-22))


def block_scale(largest: Tensor, top: Tensor) -> Tensor:
    """Return the scale of each NV group of e2m1 values: an e4m3 number times the scale above.

    A group so small that its e4m3 number would be 0 has the smallest one instead.

    Args:
        largest: Largest magnitude of each group, fp32.
        top: From `top_scale`; broadcasts against `largest`.
    """
    return round_(largest / E2M1.largest / top, E4M3).clamp_(min=E4M3.smallest).mul_(top)
