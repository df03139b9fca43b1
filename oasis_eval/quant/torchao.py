"""torchao: int8 weights per output channel, int8 inputs per token, dynamic.

Its codes are -128 to 127 and a scale is max|x| / 127.5, no smaller than fp32's epsilon: rows whose
values are smaller than that are refused instead of flattened.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oasis_eval.errors import MissingExtraError, QuantizationError
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.replacement import (
    Complaint,
    Facts,
    LibraryApplied,
    cast_refused,
    check_product,
    replace_,
    replace_empty_,
)
from oasis_eval.quant.stored import StoredLayer
from oasis_eval.quant.weights import WeightCodes
from oasis_eval.record import ModuleCoverage
from oasis_eval.spec import QuantScheme

_SMALLEST_SCALE = float(torch.finfo(torch.float32).eps)
_SCALE_BITS = 32


class TorchaoBackend:
    """Runs `torchao-w8a8`."""

    def apply_(
        self,
        model: nn.Module,
        scheme: QuantScheme,
        batches: Sequence[Batch] | None,
        *,
        codes: Mapping[str, WeightCodes],
        keep_reference: bool,
    ) -> LibraryApplied:
        """Quantize `model` in place; see `backends.Backend.apply_`.

        Raises:
            MissingExtraError: torchao is not installed.
        """
        assert not codes, "support.unsupported refuses transforms"
        library = DynamicEightBit(_library())
        check_product("torchao", _product, next(model.parameters()).device)
        return replace_(model, scheme, library, keep_reference=keep_reference)

    def empty_(self, model: nn.Module, scheme: QuantScheme, dtype: torch.dtype) -> LibraryApplied:
        """Put layers with any codes in; see `backends.StoringBackend.empty_`.

        Raises:
            MissingExtraError: torchao is not installed.
        """
        library = DynamicEightBit(_library())
        check_product("torchao", _product, next(model.parameters()).device)
        return replace_empty_(model, scheme, library, dtype)


class _Library(NamedTuple):
    """What is used of torchao."""

    quantize_: Callable[..., None]
    configuration: object


class DynamicEightBit:
    """A Linear with an `Int8Tensor` as weight."""

    name = "torchao"

    def __init__(self, library: _Library) -> None:
        self._library = library

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return a Linear whose weight is torchao's."""
        largest_N = linear.weight.abs().amax(-1).float()
        lost = (largest_N > 0) & (largest_N / 127.5 < _SMALLEST_SCALE)
        if bool(lost.any()):
            raise QuantizationError(
                f"{name}: {int(lost.sum())} of {len(lost)} weight rows need a scale below "
                f"{_SMALLEST_SCALE:.2g}, torchao's smallest; use backend 'fake' or 'torch'"
            )
        return self._layer(linear, linear.weight)

    def _layer(self, linear: nn.Linear, weight: Tensor) -> nn.Module:
        layer = nn.Linear(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
        )
        layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), linear.bias
        self._library.quantize_(nn.ModuleList([layer]), self._library.configuration)
        return layer

    def facts(self, name: str, layer: nn.Module) -> Facts:
        """Return what a layer is."""
        codes = getattr(layer.weight, "qdata", None)
        scale = getattr(layer.weight, "scale", None)
        inputs = getattr(layer.weight, "act_quant_kwargs", None)
        is_int8 = isinstance(codes, Tensor) and codes.dtype == torch.int8
        if not is_int8 or inputs is None or not isinstance(scale, Tensor):
            raise QuantizationError(
                f"{name}: torchao did not quantize it (weight {type(layer.weight).__name__})"
            )
        assert isinstance(codes, Tensor)
        if scale.numel() != codes.shape[0]:
            raise QuantizationError(f"{name}: torchao used {scale.numel()} scales, not one a row")
        covered = ModuleCoverage(
            module=name,
            quantized=True,
            weight_bits=8,
            weight_granularity="channel",
            activation_bits=8,
            activation_granularity="token",
            activation_static=False,
        )
        return Facts(covered, 8 * codes.numel() + _SCALE_BITS * scale.numel())

    def dequantize(self, layer: nn.Module) -> Tensor:
        """Return the weight in the model's dtype."""
        values: Tensor = layer.weight.dequantize()  # type: ignore[operator]  # an Int8Tensor
        return values

    def check_input(self, name: str, layer: nn.Module, x: Tensor) -> None:
        """A non-finite token has a non-finite scale and comes out as NaN."""

    def empty(self, linear: nn.Linear) -> nn.Module:
        """Return a layer with any codes and scales: the library's own, of a weight of zeros."""
        return self._layer(linear, torch.zeros_like(linear.weight))

    def stored(self, name: str, layer: nn.Module) -> StoredLayer:
        """Return codes and scales; the zero points of a symmetric weight are constants."""
        weight: Any = layer.weight
        points = {} if weight.zero_point is None else {"weight.zero_point": weight.zero_point}
        tensors = {"weight.qdata": weight.qdata, "weight.scale": weight.scale}
        return StoredLayer(tensors, points)

    def filled_(self, layer: nn.Module) -> Complaint | None:
        """Find scales that the library does not make."""
        weight: Any = layer.weight
        if not bool((torch.isfinite(weight.scale) & (weight.scale > 0)).all()):
            return Complaint("weight.scale", "a scale that is not a positive number")
        return None

    def compute_in_(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """Refuse another dtype than that of the weight that was quantized."""
        weight: Any = layer.weight
        if weight.dtype != dtype:
            raise cast_refused(self.name, weight.dtype, dtype)


def _product(first_MK: Tensor, second_NK: Tensor) -> Tensor:
    from torchao.kernel.intmm import int_scaled_matmul

    scale_M1 = torch.ones(len(first_MK), 1, device=first_MK.device)
    product: Tensor = int_scaled_matmul(first_MK, second_NK.contiguous().t(), scale_M1)
    return product


def _library() -> _Library:
    try:
        with warnings.catch_warnings():  # about kernels for other versions of torch
            warnings.simplefilter("ignore")
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise MissingExtraError("torchao", "pip install 'oasis-eval[torchao]'") from error
    return _Library(quantize_, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
