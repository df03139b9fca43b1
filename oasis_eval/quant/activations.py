"""Quantizers of activations, and the one quantized input that consecutive layers share.

Query, key and value read the very same tensor, as do gate and up. Whoever comes first quantizes
it, and the next finds the result as long as the tensor object is the same, alive and unmodified.
The result is dropped with the tensor, so nothing outlives its use.

Dimensions: B sequences, T tokens, K inputs.
"""

from __future__ import annotations

import weakref
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from oasis_eval.quant.padding import PaddingContext
from oasis_eval.quant.primitives import (
    ACTIVATION_DIMS,
    Grid,
    Limits,
    Range,
    codes_of,
    fake_quantize,
    make_grid,
    snap,
)
from oasis_eval.spec import TensorFormat

Rows = tuple[Tensor, int] | None
"""What `modeling.experts` notes at an expert's layer as `token_rows` while it runs."""
Quantized_co = TypeVar("Quantized_co", covariant=True)


class Quantizer(Protocol[Quantized_co]):
    """Quantizes activations of any leading shape."""

    def __call__(self, x: Tensor, name: str) -> Quantized_co:
        """Return `x` quantized; `name` is for error messages."""
        ...


class ActivationQuantizer(Protocol):
    """Quantizes and dequantizes activations of any leading shape."""

    def __call__(self, x: Tensor, name: str) -> Tensor:
        """Return a new tensor of the shape and dtype of `x`; `name` is for error messages."""
        ...


class RowQuantizer:
    """Dynamic ranges inside a token (per token or per group): padding and batch cannot matter."""

    def __init__(self, fmt: TensorFormat) -> None:
        self._format = fmt
        self._dims = ACTIVATION_DIMS[fmt.granularity]

    def __call__(self, x: Tensor, name: str) -> Tensor:
        """Quantize each token, or each group of its inputs, by its own extremes."""
        return fake_quantize(x, self._format, self._dims)


class SequenceQuantizer:
    """Dynamic ranges over the real tokens of each sequence, per tensor or per input channel.

    One range per sequence, never per batch: what else is in the batch must not matter.
    """

    def __init__(
        self, fmt: TensorFormat, padding: PaddingContext, expert: nn.Module | None = None
    ) -> None:
        self._format = fmt
        self._dims = ACTIVATION_DIMS[fmt.granularity]
        self._padding = padding
        self._expert = expert

    def of(self, module: nn.Module) -> SequenceQuantizer:
        """Return the quantizer of a layer: itself, but for an expert's, whose rows are its own."""
        if not hasattr(module, "token_rows"):
            return self
        return SequenceQuantizer(self._format, self._padding, module)

    def __call__(self, x: Tensor, name: str) -> Tensor:
        """Quantize each sequence by the extremes of its real tokens; padding is clipped."""
        rows = None if self._expert is None else cast(Rows, self._expert.token_rows)
        x_BTK, real_BT = self._padding.sequences(x, name, rows)
        work_BTK = x_BTK.float()
        low, high = work_BTK, work_BTK
        if real_BT is not None:
            # Zero belongs to every range, so it hides a token from both extremes.
            low = high = work_BTK.masked_fill(~real_BT[..., None], 0.0)
        span = Range(low.amin(self._dims, keepdim=True), high.amax(self._dims, keepdim=True))
        grid = make_grid(span, self._format, x.dtype)
        snapped_BTK = snap(work_BTK, grid, clip=True).to(x.dtype)
        return snapped_BTK.reshape(x.shape) if rows is None else snapped_BTK.flatten(0, 1)[rows[0]]


class StaticQuantizer:
    """A range that calibration fixed, per tensor or per input channel.

    Values outside are clipped. Infinity is not: a token with a non-finite value becomes NaN as
    under dynamic ranges.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __call__(self, x: Tensor, name: str) -> Tensor:
        """Quantize by the fixed range."""
        work = x.float()
        poison = _poison(work)
        values = codes_of(work, self._grid, clip=True)
        return self._values(values, poison).to(x.dtype)

    def quantize_(self, x: Tensor, name: str) -> Tensor:
        """Quantize by the fixed range, writing the result over `x` where its dtype allows it.

        Attention scores are the largest tensors of a pass, and getting fresh memory for a copy
        costs more than the arithmetic.
        """
        is_integer = self._grid.kind is None and isinstance(self._grid.limits, Limits)
        if x.dtype != torch.float32 or not is_integer:
            return self(x, name)
        poison = _poison(x)
        codes = x.div_(self._grid.scale).round_()
        return self._values(codes.clamp_(*self._grid.limits), poison)

    def _values(self, codes: Tensor, poison: Tensor | None) -> Tensor:
        """Turn codes into values, in place; rows that are poisoned become NaN."""
        if poison is None:
            return codes.mul_(self._grid.scale)
        if self._grid.scale.numel() == 1:
            return codes.mul_(self._grid.scale + poison)
        return codes.mul_(self._grid.scale).add_(poison)


def _poison(x: Tensor) -> Tensor | None:
    """Return 0 for each row [..., K] of finite values and NaN for others, [..., 1]; None: all 0."""
    # One sum tells most of the time, and overflows at worst; on other devices it would wait.
    if x.device.type == "cpu" and bool(x.sum().isfinite()):
        return None
    high = x.amax(-1, keepdim=True)
    low = x.amin(-1, keepdim=True)
    return (high - high).add_(low - low)


Input = TypeVar("Input")


class SharedInput(Generic[Input]):
    """The last quantized input, for the next layer that reads the same tensor.

    A tensor is the same if it is the same object at the same version, that is, not written to in
    between. Tensors made under `torch.inference_mode` have no version; nothing is shared there.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._quantizer: Quantizer[Input] | None = None
        self._quantized: Input | None = None

    def quantize(self, x: Tensor, quantizer: Quantizer[Input], name: str) -> Input:
        """Return `x` quantized, from the layer before where that read the same tensor."""
        if x.is_inference():
            return quantizer(x.detach(), name)
        if (
            self._quantized is not None
            and self._quantizer is quantizer
            and self._source is not None
            and self._source() is x
            and self._version == x._version
        ):
            return self._quantized
        self.clear()  # before the new one is made, so that never two are held
        quantized = quantizer(x.detach(), name)
        self._source = weakref.ref(x, self._drop)
        self._version = x._version
        self._quantizer = quantizer
        self._quantized = quantized
        return quantized

    def clear(self) -> None:
        """Forget the tensor."""
        self._source = self._quantizer = self._quantized = None

    def _drop(self, source: weakref.ref[Tensor]) -> None:
        if self._source is source:
            self.clear()


def dynamic_quantizer(fmt: TensorFormat, padding: PaddingContext) -> ActivationQuantizer:
    """Return the quantizer of a format with dynamic ranges."""
    if fmt.granularity in ("token", "group"):
        return RowQuantizer(fmt)
    return SequenceQuantizer(fmt, padding)


def static_quantizer(
    fmt: TensorFormat, span: Range, *, dtype: torch.dtype, device: torch.device
) -> StaticQuantizer:
    """Return the quantizer of a format with a fixed range.

    Args:
        fmt: Bits and symmetry.
        span: Low and high of shape [1], or [K] per input channel.
        dtype: Dtype of the activations.
        device: Where the activations will be.
    """
    return StaticQuantizer(static_grid(fmt, span, dtype=dtype, device=device))


def static_grid(
    fmt: TensorFormat, span: Range, *, dtype: torch.dtype, device: torch.device
) -> Grid:
    """Return the grid of a fixed range; arguments as of `static_quantizer`."""
    grid = make_grid(Range(span.low.to(device), span.high.to(device)), fmt, dtype)
    if grid.zero_point is not None and grid.scale.numel() == 1:
        lowest, highest = (int(limit) for limit in grid.limits)
        grid = grid._replace(limits=Limits(lowest, highest))
    return grid
