"""optimum-quanto: int8 weights and inputs with static ranges, and int8 or int4 weights alone.

- Inputs are quantized per tensor by a running mean of their largest magnitudes, which needs
  calibration text; the unit is one unpadded sequence, so that neither padding nor the batch size
  enters. Outputs are left alone: the library would quantize those that a quantized operation
  reads, and in a Llama that is none of them.
- int8 weights are symmetric per output channel, with scales in the model's dtype.
- int4 weights have 0 to 15 as codes and a floating-point offset, in groups of 128 inputs; the
  library takes smaller groups, or whole rows, where those do not fit, and the coverage says which.
  Unpacking them compiles C++ at first use, for minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from oasis_eval.errors import MissingExtraError, QuantizationError, UnsupportedSchemeError
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


class QuantoBackend:
    """Runs `quanto-w8a8`, `quanto-w8a16` and `quanto-w4a16`."""

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
            MissingExtraError: optimum-quanto is not installed.
        """
        assert not codes, "support.unsupported refuses transforms"
        quanto = _library()
        assert scheme.weights is not None
        if scheme.activations is not None:
            if not batches:
                raise QuantizationError(
                    f"scheme {scheme.name!r}: static activation ranges need calibration batches"
                )
            check_product("optimum-quanto", _product, next(model.parameters()).device)
        layers = QuantoLayers(quanto, scheme)
        applied = replace_(model, scheme, layers, keep_reference=keep_reference)
        if scheme.activations is not None and batches:
            try:
                _calibrate(quanto, model, applied, layers, batches)
            except BaseException:
                applied.detach_()
                raise
        return applied

    def empty_(self, model: nn.Module, scheme: QuantScheme, dtype: torch.dtype) -> LibraryApplied:
        """Put layers with any codes in; see `backends.StoringBackend.empty_`.

        Raises:
            MissingExtraError: optimum-quanto is not installed.
        """
        quanto = _library()
        if scheme.activations is not None:
            check_product("optimum-quanto", _product, next(model.parameters()).device)
        return replace_empty_(model, scheme, QuantoLayers(quanto, scheme), dtype)


class QuantoLayers:
    """`QLinear` for a Linear."""

    name = "optimum-quanto"

    def __init__(self, quanto: ModuleType, scheme: QuantScheme) -> None:
        assert scheme.weights is not None
        self._quanto = quanto
        self._weights = quanto.qint8 if scheme.weights.bits == 8 else quanto.qint4
        self._activations = quanto.qint8 if scheme.activations is not None else None
        self._group_size = scheme.weights.group_size
        self.calibration: Any = None
        """What observes inputs, while ranges are being fixed."""

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the quantized layer of a Linear, its weight frozen."""
        layer = self._layer(linear)
        layer.freeze()
        assert isinstance(layer, nn.Module)
        return layer

    def _layer(self, linear: nn.Linear) -> Any:
        """Return a layer that is not quantized yet."""
        layer = self._quanto.QLinear.from_module(
            linear, weights=self._weights, activations=self._activations
        )
        layer.disable_output_quantization()
        return layer

    def facts(self, name: str, layer: nn.Module) -> Facts:
        """Return what a layer is."""
        weight = layer.weight
        if not isinstance(weight, self._quanto.QTensor) or weight.qtype is not self._weights:
            raise QuantizationError(
                f"{name}: optimum-quanto did not quantize it (weight {type(weight).__name__})"
            )
        bits = weight.qtype.bits
        # Scale and offset are one tensor where the library packs for a kernel: in bf16 with groups
        # of 128, on CUDA also in fp16.
        names = ("_scale", "_shift", "_scale_shift")
        tensors = [getattr(weight, key) for key in names if hasattr(weight, key)]
        group = weight._group_size if bits == 4 else None
        width = weight.shape[-1]
        notes = ["codes 0 to 15 and a floating-point offset"] if bits == 4 else []
        if bits == 4 and (group or width) != min(self._group_size or width, width):
            notes.append(
                f"groups of {group or width}, since {self._group_size} does not divide {width}"
            )
        has_activations = self._activations is not None
        covered = ModuleCoverage(
            module=name,
            quantized=True,
            note="; ".join(notes) or None,
            weight_bits=bits,
            weight_granularity="group" if group else "channel",
            weight_group_size=group,
            activation_bits=8 if has_activations else None,
            activation_granularity="tensor" if has_activations else None,
            activation_static=True if has_activations else None,
        )
        scales = sum(8 * tensor.numel() * tensor.element_size() for tensor in tensors)
        return Facts(covered, bits * weight.numel() + scales)

    def dequantize(self, layer: nn.Module) -> Tensor:
        """Return the weight in the model's dtype."""
        values: Tensor = layer.weight.dequantize()  # type: ignore[operator]  # a QTensor
        return values

    def check_input(self, name: str, layer: nn.Module, x: Tensor) -> None:
        """Refuse NaN and infinity, which would become ordinary codes; show calibration the rest.

        This is behind the rotation of an input and ahead of its quantizer.
        """
        if self._activations is None or isinstance(x, self._quanto.QTensor):
            return
        if not bool(torch.isfinite(x).all()):
            raise QuantizationError(
                f"{name}: an input is not finite, and optimum-quanto would make an integer of it"
            )
        if self.calibration is not None:
            self.calibration.calibrate_input(layer, (x,))

    def empty(self, linear: nn.Linear) -> nn.Module:
        """Return a layer with any codes and scales."""
        layer = self._layer(linear)
        weight = linear.weight
        (num_outputs, num_inputs), group = weight.shape, layer.weight_group_size or weight.shape[1]
        grouped = (num_outputs * num_inputs // group, group)  # a row a scale
        is_int4 = self._weights.bits == 4
        rows = (grouped[0] + 1) // 2 if is_int4 else grouped[0]
        codes = torch.empty(
            rows, group, dtype=torch.uint8 if is_int4 else torch.int8, device=weight.device
        )
        scales = [weight.new_empty(grouped[0], 1) for _ in range(2 if is_int4 else 1)]
        shape = (weight.size(), weight.stride())
        if is_int4:
            from optimum.quanto.tensor.packed import PackedTensor

            packed = PackedTensor(codes, 4, torch.Size(grouped), (group, 1))
            quantized = self._quanto.WeightQBitsTensor(
                self._weights, 0, layer.weight_group_size, *shape, packed, *scales
            )
        else:
            quantized = self._quanto.WeightQBytesTensor(
                self._weights, 0, *shape, codes, *scales, self._activations
            )
        layer.weight = nn.Parameter(quantized, requires_grad=False)
        assert isinstance(layer, nn.Module)
        return layer

    def stored(self, name: str, layer: nn.Module) -> StoredLayer:
        """Return codes and scales of the weight, and the scales of inputs and outputs."""
        weight: Any = layer.weight
        if type(weight) not in (self._quanto.WeightQBytesTensor, self._quanto.WeightQBitsTensor):
            raise UnsupportedSchemeError(
                f"{name}: optimum-quanto has packed it for a kernel ({type(weight).__name__}) and "
                "does not give back what it was; use another --dtype"
            )
        tensors: dict[str, Tensor] = {}
        weight.save_to_state_dict(tensors, "weight.", True)
        scales = {key: layer.get_buffer(key) for key in ("input_scale", "output_scale")}
        return StoredLayer(tensors | scales, {})

    def filled_(self, layer: nn.Module) -> Complaint | None:
        """Find scales that no calibration makes, and a range that is still unset."""
        for key, value in self.stored("", layer).tensors.items():
            is_number = bool(torch.isfinite(value).all()) if value.is_floating_point() else True
            if not is_number or (key.endswith("scale") and bool((value < 0).any())):
                return Complaint(key, "a scale that is negative or not finite")
        if _is_unset(layer) != (self._activations is None):
            what = "is for calibrated inputs" if self._activations is None else "was not calibrated"
            return Complaint(
                "input_scale", f"{layer.get_buffer('input_scale').item():g}, which {what}"
            )
        return None

    def compute_in_(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """Refuse another dtype than that of the scales, which decides what comes out."""
        weight: Any = layer.weight
        if weight.dtype != dtype:
            raise cast_refused(self.name, weight.dtype, dtype)


def _calibrate(
    quanto: ModuleType,
    model: nn.Module,
    applied: LibraryApplied,
    layers: QuantoLayers,
    batches: Sequence[Batch],
) -> None:
    """Run the text through the model, sequence by sequence, and check that every layer saw it."""
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    calibration = quanto.Calibration(streamline=False)
    try:
        model.eval()
        with torch.no_grad(), calibration:
            # The library's own hook is a global one and runs first, before an input is rotated.
            calibration.pre_handle.remove()
            layers.calibration = calibration
            for batch in batches:
                for ids_T, mask_T in zip(batch.input_ids_BT, batch.attention_mask_BT, strict=True):
                    real_1T = ids_T[mask_T.bool()][None].to(device)
                    if real_1T.numel():
                        model(input_ids=real_1T, use_cache=False)
    finally:
        layers.calibration = None
        for module in training:
            module.training = True
    unset = [name for name, layer in applied.layers.items() if _is_unset(layer)]
    if unset:
        raise QuantizationError(
            f"{len(unset)} of {len(applied.layers)} layers have no input range after calibration: "
            + ", ".join(unset[:3])
            + (", ..." if len(unset) > 3 else "")
            + " (calibrate on more text, or skip them)"
        )
    applied.called.clear()
    applied.activation_changed = False


def _is_unset(layer: nn.Module) -> bool:
    """Return whether the input scale is still the one that a new layer has."""
    scale = layer.input_scale
    assert isinstance(scale, Tensor)
    return bool(scale == 1)


def _product(first_MK: Tensor, second_NK: Tensor) -> Tensor:
    scale = torch.ones(len(second_NK), 1, device=second_NK.device)
    product: Tensor = torch.ops.quanto.qbytes_mm(first_MK, second_NK, scale)
    return product


def _library() -> ModuleType:
    try:
        from optimum import quanto
    except ImportError as error:
        raise MissingExtraError("optimum-quanto", "pip install optimum-quanto") from error
    assert isinstance(quanto, ModuleType)
    return quanto
