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

import torch
from torch import Tensor, nn

from oasis_eval.errors import MissingExtraError, QuantizationError
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.replacement import Facts, LibraryApplied, check_product, replace_
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
            check_product("optimum-quanto", _product)
        layers = QuantoLayers(quanto, scheme)
        applied = replace_(model, scheme, layers, keep_reference=keep_reference)
        if scheme.activations is not None and batches:
            try:
                _calibrate(quanto, model, applied, batches)
            except BaseException:
                applied.detach_()
                raise
        return applied


class QuantoLayers:
    """`QLinear` for a Linear."""

    name = "optimum-quanto"

    def __init__(self, quanto: ModuleType, scheme: QuantScheme) -> None:
        assert scheme.weights is not None
        self._quanto = quanto
        self._weights = quanto.qint8 if scheme.weights.bits == 8 else quanto.qint4
        self._activations = quanto.qint8 if scheme.activations is not None else None
        self._group_size = scheme.weights.group_size

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the quantized layer of a Linear, its weight frozen."""
        layer = self._quanto.QLinear.from_module(
            linear, weights=self._weights, activations=self._activations
        )
        layer.disable_output_quantization()
        layer.freeze()
        assert isinstance(layer, nn.Module)
        return layer

    def facts(self, name: str, layer: nn.Module) -> Facts:
        """Return what a layer is."""
        weight = layer.weight
        if not isinstance(weight, self._quanto.QTensor) or weight.qtype is not self._weights:
            raise QuantizationError(
                f"{name}: optimum-quanto did not quantize it (weight {type(weight).__name__})"
            )
        bits = weight.qtype.bits
        tensors = [weight._scale, *([weight._shift] if bits == 4 else [])]
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
        """Refuse NaN and infinity, which would become ordinary codes."""
        if self._activations is None or isinstance(x, self._quanto.QTensor):
            return
        if not bool(torch.isfinite(x).all()):
            raise QuantizationError(
                f"{name}: an input is not finite, and optimum-quanto would make an integer of it"
            )


def _calibrate(
    quanto: ModuleType, model: nn.Module, applied: LibraryApplied, batches: Sequence[Batch]
) -> None:
    """Run the text through the model, sequence by sequence, and check that every layer saw it."""
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    try:
        model.eval()
        with torch.no_grad(), quanto.Calibration(streamline=False):
            for batch in batches:
                for ids_T, mask_T in zip(batch.input_ids_BT, batch.attention_mask_BT, strict=True):
                    real_1T = ids_T[mask_T.bool()][None].to(device)
                    if real_1T.numel():
                        model(input_ids=real_1T, use_cache=False)
    finally:
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
    scale = torch.ones(len(second_NK), 1)
    product: Tensor = torch.ops.quanto.qbytes_mm(first_MK, second_NK, scale)
    return product


def _library() -> ModuleType:
    try:
        from optimum import quanto
    except ImportError as error:
        raise MissingExtraError("optimum-quanto", "pip install optimum-quanto") from error
    assert isinstance(quanto, ModuleType)
    return quanto
