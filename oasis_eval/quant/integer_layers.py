"""Linear layers that hold integer codes and multiply integers.

As with fake quantization a layer changes its class, not its place: names, hooks and references
stay. Its floating-point weight goes; codes, scales and zero points are buffers in its stead, and
`weight` is what the codes stand for, computed whenever somebody asks.

Groups of weights and of activations need not agree: the inputs are cut wherever either begins a
new group, and the exact sums of each stretch are scaled by themselves.

Dimensions: M rows (tokens), N output channels, K inputs, G groups of inputs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from oasis_eval.quant import packing
from oasis_eval.quant.activations import Quantizer, SharedInput
from oasis_eval.quant.integer_inputs import IntegerInput, values
from oasis_eval.quant.kernels import Kernel, Prepared, choose
from oasis_eval.quant.packing import Layout, StoredWeight

CODES, SCALE = "weight_codes", "weight_scale"
ZERO_POINT, RANGE = "weight_zero_point", "input_limits"
"""Names of a layer's buffers."""
_CACHED_ELEMENTS = 1 << 17  # rows scaled at a time, so that they stay in a core's cache


@dataclass(slots=True)
class IntegerSession:
    """What the integer layers of one model have in common."""

    shared: SharedInput[IntegerInput] = field(default_factory=SharedInput)
    called: set[str] = field(default_factory=set)
    """Layers that have run."""
    activation_changed: bool = False
    """Whether quantizing an activation has changed any value so far."""


class Stretch(NamedTuple):
    """Inputs whose codes share their scales, ready to be multiplied."""

    inputs: slice
    weight_group: int
    input_group: int
    product: Prepared
    sums_N: Tensor  # noqa: N815 - shape suffix
    """Of the weight's codes, int32."""


@dataclass(slots=True)
class IntegerState:
    """How one layer computes."""

    name: str
    layout: Layout
    session: IntegerSession
    quantizer: Quantizer[IntegerInput] | None
    """None: activations stay in floating point."""
    input_group_size: int | None
    largest_weight: int
    """Largest magnitude of weight codes."""
    largest_input: int
    """Largest magnitude of activation codes."""
    dtype: torch.dtype
    """What `weight` is given in: the dtype of the model."""
    kernel: Kernel | None = None
    """What multiplies, once `prepared` is there."""
    prepared: tuple[Stretch, ...] = ()
    """Made by the first product, on the device where it is."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        session = copy.deepcopy(self.session, memo)
        return dataclasses.replace(self, session=session, prepared=())


class _Integer(nn.Module):
    """What integer layers have in common; their buffers are named above."""

    integer: IntegerState
    bias: Any
    """A parameter, or None."""

    @property
    def stored(self) -> StoredWeight:
        """The codes and their scales."""
        codes, scale = self._buffers[CODES], self._buffers[SCALE]
        assert codes is not None
        assert scale is not None
        return StoredWeight(codes, scale, self._buffers.get(ZERO_POINT))

    @property
    def input_range(self) -> Tensor | None:
        """Low and high of a static range, fp32 [2]."""
        return self._buffers.get(RANGE)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return what the codes stand for, [N, K]."""
        return packing.values(self.stored, self.integer.layout, dtype)

    def stretches(self) -> tuple[Stretch, ...]:
        """Return the weight in the form that the kernel wants, made once."""
        if not self.integer.prepared:
            self.integer.prepared = _prepare(self.integer, self.stored)
        return self.integer.prepared

    def forward(self, x: Tensor) -> Tensor:
        """Return quantize(x) @ weight.T + bias from integer products."""
        state = self.integer
        state.session.called.add(state.name)
        if state.quantizer is None:
            return self._in_floating_point(x)
        rows = state.session.shared.quantize(x, state.quantizer, state.name)
        if not state.session.activation_changed:
            plain_MK = x.detach().reshape(-1, x.shape[-1])
            changed_MK = values(rows, state.input_group_size).to(x.dtype)
            state.session.activation_changed = not torch.equal(changed_MK, plain_MK)
        y_MN = self._product(rows).to(x.dtype)
        return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])

    def _product(self, rows: IntegerInput) -> Tensor:
        """Return the layer's output [M, N] in fp32."""
        scale_NG = self.stored.scale
        num_rows, num_outputs = rows.codes_MK.shape[0], self.integer.layout.num_outputs
        if not num_rows:
            return rows.scale_MG.new_zeros(0, num_outputs)
        bias_N = None if self.bias is None else self.bias.detach().float()
        last = len(self.stretches()) - 1
        total_MN: Tensor | None = None
        for index, stretch in enumerate(self.stretches()):
            part_MN = accumulate(stretch, rows).float()
            column = min(stretch.weight_group, scale_NG.shape[1] - 1)
            weight_N = scale_NG[:, column]
            input_M1 = rows.scale_MG[:, stretch.input_group : stretch.input_group + 1]
            step = max(1, _CACHED_ELEMENTS // num_outputs)
            for start in range(0, num_rows, step):
                block = slice(start, start + step)
                part_MN[block].mul_(weight_N).mul_(input_M1[block])
                if total_MN is not None:
                    part_MN[block].add_(total_MN[block])
                if index == last and bias_N is not None:
                    part_MN[block].add_(bias_N)
            total_MN = part_MN
        assert total_MN is not None
        return total_MN

    def _in_floating_point(self, x: Tensor) -> Tensor:
        return F.linear(x, self.values(x.dtype), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move buffers; scales and ranges keep fp32 whatever the model is cast to."""
        before = {name: self._buffers.get(name) for name in (SCALE, RANGE)}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = self._buffers.get(name)
            if tensor is not None and after is not None and after.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(after.device)
        self.integer.prepared = ()
        self.integer.dtype = fn(torch.empty(0, dtype=self.integer.dtype)).dtype
        return self


class IntegerLinear(_Integer, nn.Linear):
    """`nn.Linear` on integer codes."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in the base class
        """What the codes stand for, [N, K]; computed at every call."""
        return self.values(self.integer.dtype)


class IntegerConv1D(_Integer, Conv1D):
    """The transposed Linear of GPT-2 on integer codes, which are [N, K] all the same."""

    @property
    def weight(self) -> Tensor:
        """What the codes stand for, [K, N]; computed at every call."""
        return self.values(self.integer.dtype).T.contiguous()

    def _in_floating_point(self, x: Tensor) -> Tensor:
        weight_KN = self.values(x.dtype).T.contiguous()
        rows_MN = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), weight_KN)
        return rows_MN.reshape(*x.shape[:-1], rows_MN.shape[-1])


IntegerLayer = IntegerLinear | IntegerConv1D


def accumulate(stretch: Stretch, rows: IntegerInput) -> Tensor:
    """Return the exact sums of products of codes relative to their zero points.

    Args:
        stretch: Of a layer.
        rows: All inputs of the layer.

    Returns:
        Integers [M, N]: fp32 where none can pass 2^24, else int32.
    """
    sums_MN = stretch.product(rows.codes_MK[:, stretch.inputs])
    if rows.offset_MG is None:
        return sums_MN
    column = min(stretch.input_group, rows.offset_MG.shape[1] - 1)
    offset_M1 = rows.offset_MG[:, column : column + 1].to(sums_MN.dtype)
    return sums_MN - offset_M1 * stretch.sums_N.to(sums_MN.dtype)


def become_integer_(
    module: nn.Module, state: IntegerState, stored: StoredWeight, span: Tensor | None
) -> None:
    """Turn a plain Linear or Conv1D into its integer class, in place.

    Args:
        module: Loses its floating-point weight.
        state: How to compute.
        stored: Codes and scales.
        span: Low and high of a static range, fp32 [2].
    """
    module._parameters["weight"] = None
    module.__class__ = IntegerConv1D if isinstance(module, Conv1D) else IntegerLinear
    module.integer = state  # type: ignore[assignment]  # modules take any attribute
    module._buffers[CODES] = stored.codes
    module._buffers[SCALE] = stored.scale
    if stored.zero_point is not None:
        module._buffers[ZERO_POINT] = stored.zero_point
    if span is not None:
        module._buffers[RANGE] = span


def become_plain_(module: nn.Module, original: type[nn.Module], weight: nn.Parameter) -> None:
    """Turn an integer layer back into the class it had, with its weight."""
    del module.integer
    for name in (CODES, SCALE, ZERO_POINT, RANGE):
        module._buffers.pop(name, None)
    module.__class__ = original
    module._parameters["weight"] = weight


def integer_layers(model: nn.Module) -> dict[str, IntegerLayer]:
    """Return the integer layers of a model by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, IntegerLinear | IntegerConv1D)
    }


def fixed_tensors(model: nn.Module) -> set[int]:
    """Return the identities of the buffers whose dtype no cast of a model may change."""
    tensors = (
        layer._buffers.get(name)
        for layer in integer_layers(model).values()
        for name in (SCALE, RANGE)
    )
    return {id(tensor) for tensor in tensors if tensor is not None}


def prepared_bytes(model: nn.Module) -> int:
    """Return the memory that kernels hold beside the buffers of a model."""
    layers = integer_layers(model).values()
    return sum(item.product.num_bytes for layer in layers for item in layer.integer.prepared)


def _prepare(state: IntegerState, stored: StoredWeight) -> tuple[Stretch, ...]:
    state.kernel = choose(stored.codes.device, state.largest_weight, state.largest_input)
    is_plain = state.layout.bits == 8 and state.layout.symmetric
    codes_NK = stored.codes if is_plain else packing.relative_codes(stored, state.layout)
    stretches = []
    width = state.layout.num_inputs
    weight_size, input_size = state.layout.group_size or width, state.input_group_size or width
    starts = sorted({*range(0, width, weight_size), *range(0, width, input_size)})
    for start, end in zip(starts, [*starts[1:], width], strict=True):
        part_NK = codes_NK[:, start:end]
        stretches.append(
            Stretch(
                inputs=slice(start, end),
                weight_group=start // weight_size,
                input_group=start // input_size,
                product=state.kernel.prepare(part_NK, state.largest_input),
                sums_N=part_NK.sum(-1, dtype=torch.int32),
            )
        )
    return tuple(stretches)
