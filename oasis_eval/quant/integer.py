"""Real execution: integer codes stored, integers multiplied, the sums scaled.

The codes are those of fake quantization, bit for bit, and the products are exact, so on identical
inputs a layer differs from its fake twin by the rounding of floating-point sums alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.activations import Quantizer, static_grid
from oasis_eval.quant.calibrate import Batch, Site, calibrate
from oasis_eval.quant.coverage import report
from oasis_eval.quant.effects import Changed, Original, check_effect, check_undo
from oasis_eval.quant.integer_inputs import IntegerInput, RowCodes, StaticCodes, largest_code
from oasis_eval.quant.integer_layers import (
    CODES,
    RANGE,
    SCALE,
    ZERO_POINT,
    IntegerSession,
    IntegerState,
    become_integer_,
    become_plain_,
    integer_layers,
)
from oasis_eval.quant.kernels import Kernel, choose
from oasis_eval.quant.packing import (
    Layout,
    StoredWeight,
    empty,
    impossible_code,
    impossible_zero_point,
    layout_of,
    store,
    values,
)
from oasis_eval.quant.primitives import Range
from oasis_eval.quant.stored import StoredLayer
from oasis_eval.quant.targets import Selection, Target, select
from oasis_eval.quant.weights import WeightCodes, encode
from oasis_eval.record import Coverage
from oasis_eval.spec import QuantScheme


class TorchBackend:
    """Runs integer formats of 8- and 4-bit weights on integer codes."""

    def apply_(
        self,
        model: nn.Module,
        scheme: QuantScheme,
        batches: Sequence[Batch] | None,
        *,
        codes: Mapping[str, WeightCodes],
        keep_reference: bool,
    ) -> IntegerApplied:
        """Quantize `model` in place; see `backends.Backend.apply_`."""
        selection = select(model, scheme)
        for target in selection.targets:
            if not bool(torch.isfinite(target.weight).all()):
                raise QuantizationError(f"{target.name}: the weight holds non-finite values")
        kernel = kernel_for(scheme, next(model.parameters()).device)
        coverage = noted(report(scheme, selection, list(model.parameters())), scheme, kernel)
        ranges = _static_ranges(model, scheme, selection, batches)
        applied = IntegerApplied(scheme=scheme, coverage=coverage)
        try:
            applied.attach_(selection, ranges, codes, keep_reference=keep_reference)
        except BaseException:
            applied.detach_()
            raise
        return applied

    def empty_(self, model: nn.Module, scheme: QuantScheme, dtype: torch.dtype) -> IntegerApplied:
        """Put integer layers with any codes in; see `backends.StoringBackend.empty_`."""
        selection = select(model, scheme)
        kernel = kernel_for(scheme, next(model.parameters()).device)
        coverage = noted(report(scheme, selection, list(model.parameters())), scheme, kernel)
        applied = IntegerApplied(scheme=scheme, coverage=coverage, weights_changed=True)
        stored: dict[int, StoredWeight] = {}
        weights = [target.weight for target in selection.targets]  # so that ids stay theirs
        for target, weight in zip(selection.targets, weights, strict=True):
            state = state_for(target, scheme, applied.session)
            if id(weight) not in stored:
                stored[id(weight)] = empty(state.layout, weight.device)
            span = torch.empty(2, device=weight.device) if scheme.is_static else None
            become_integer_(target.module, state, stored[id(weight)], span)
        return applied


@dataclass(slots=True, kw_only=True)
class IntegerApplied:
    """Integer layers in effect on a model."""

    scheme: QuantScheme
    coverage: Coverage
    notes: tuple[str, ...] = ()
    """See `backends.Storable`."""
    session: IntegerSession = field(default_factory=IntegerSession)
    weights_changed: bool = False
    originals: list[Original] = field(default_factory=list)

    def verify(self) -> tuple[str, ...]:
        """Check, after a forward pass, that the scheme had an effect.

        Returns:
            Warnings: layers that have not run so far, and a half of the scheme without effect.

        Raises:
            QuantizationError: No weight and no activation changed, or no quantized layer ran.
        """
        covered = [item.module for item in self.coverage.modules if item.quantized]
        effect = check_effect(
            self.scheme,
            covered,
            self.session.called,
            Changed(self.weights_changed, self.session.activation_changed),
        )
        return (*effect, *self.notes)

    def undo(self) -> None:
        """Restore the model bit for bit.

        Raises:
            QuantizationError: The original weights were not kept, or were restored already.
        """
        check_undo(self.scheme, [item.weight is not None for item in self.originals])
        self.detach_()

    def attach_(
        self,
        selection: Selection,
        ranges: Mapping[str, Range],
        codes: Mapping[str, WeightCodes],
        *,
        keep_reference: bool,
    ) -> None:
        """Encode weights, each once however many layers share it, and change the layers."""
        quantizers = Quantizers(self.scheme)
        encoded: dict[int, StoredWeight] = {}
        kept_alive = [target.weight for target in selection.targets]  # so that ids stay theirs
        for target in selection.targets:
            weight = target.weight
            layout = layout_for(target, self.scheme)
            if id(weight) not in encoded:
                encoded[id(weight)] = self._encode(target, layout, codes.get(target.name))
            span = ranges.get(target.name)
            limits = None if span is None else torch.cat([span.low, span.high]).to(weight.device)
            state = state_for(target, self.scheme, self.session)
            state.quantizer = quantizers.get(limits, weight.dtype)
            original = target.module._parameters["weight"]
            self.originals.append(
                Original(target.module, type(target.module), original if keep_reference else None)
            )
            become_integer_(target.module, state, encoded[id(weight)], limits)
        del kept_alive
        if self.scheme.activations is None and not self.weights_changed:
            raise QuantizationError(
                f"scheme {self.scheme.name!r}: no weight was changed by quantization"
            )

    def stored(self, model: nn.Module) -> dict[str, StoredLayer]:
        """Return what a checkpoint holds of each layer; see `backends.Storable`."""
        return {
            name: StoredLayer({key: t for key, t in layer._buffers.items() if t is not None}, {})
            for name, layer in integer_layers(model).items()
        }

    def filled_(self, model: nn.Module) -> str | None:
        """Find codes, scales and ranges that no quantizer makes; see `backends.Storable`."""
        for name, layer in integer_layers(model).items():
            stored, layout = layer.stored, layer.integer.layout
            scale, span = stored.scale, layer.input_range
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                return f"{name}.{SCALE} holds a scale that is not a positive number"
            wrong = impossible_code(stored, layout)
            if wrong is not None:
                return f"{name}.{CODES} holds {wrong}"
            wrong = impossible_zero_point(stored, layout)
            if wrong is not None:
                return f"{name}.{ZERO_POINT} holds {wrong}"
            if span is not None and not bool(torch.isfinite(span).all() and span[0] <= span[1]):
                return f"{name}.{RANGE} holds the range {span.tolist()}"
        return None

    def compute_in_(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Expect activations of another dtype, after the rest of the model was cast to it."""
        quantizers = Quantizers(self.scheme)
        for layer in integer_layers(model).values():
            layer.integer.dtype = dtype
            layer.integer.quantizer = quantizers.get(layer.input_range, dtype)

    def detach_(self) -> None:
        """Change the layers back, those whose original weights were kept."""
        self.session.shared.clear()
        for original in reversed(self.originals):
            if original.weight is not None:
                become_plain_(original.module, original.kind, original.weight)
        self.originals.clear()

    def _encode(self, target: Target, layout: Layout, decided: WeightCodes | None) -> StoredWeight:
        assert self.scheme.weights is not None
        before_NK = target.weight.detach()
        if target.is_transposed:
            before_NK = before_NK.T
        try:
            stored = store(decided or encode(before_NK, self.scheme.weights), layout)
        except QuantizationError as error:
            raise QuantizationError(f"{target.name}: {error}") from error
        if not self.weights_changed:
            after_NK = values(stored, layout, before_NK.dtype)
            self.weights_changed = not torch.equal(after_NK, before_NK)
        return stored


class Quantizers:
    """The quantizer of each layer; layers of one range share one, and so the quantized input."""

    def __init__(self, scheme: QuantScheme) -> None:
        self._format = scheme.activations
        self._static: dict[tuple[object, ...], Quantizer[IntegerInput]] = {}
        self._dynamic = None if self._format is None else RowCodes(self._format)

    def get(self, limits: Tensor | None, dtype: torch.dtype) -> Quantizer[IntegerInput] | None:
        """Return the quantizer of a layer.

        Args:
            limits: Low and high of a static range, [2].
            dtype: Of the activations.
        """
        if self._format is None or limits is None:
            return self._dynamic
        key = (*limits.tolist(), dtype)
        if key not in self._static:
            span = Range(limits[:1], limits[1:])
            grid = static_grid(self._format, span, dtype=dtype, device=limits.device)
            self._static[key] = StaticCodes(grid, self._format)
        return self._static[key]


def kernel_for(scheme: QuantScheme, device: torch.device) -> Kernel | None:
    """Return the kernel that computes a scheme's products, None where there are none.

    Raises:
        QuantizationError: No kernel of the device is exact.
    """
    if scheme.weights is None or scheme.activations is None:
        return None
    return choose(device, largest_code(scheme.weights), largest_code(scheme.activations))


def layout_for(target: Target, scheme: QuantScheme) -> Layout:
    """Return how a layer's weight is stored."""
    assert scheme.weights is not None
    first, second = target.weight.shape
    outputs, inputs = (second, first) if target.is_transposed else (first, second)
    return layout_of(scheme.weights, outputs, inputs)


def state_for(target: Target, scheme: QuantScheme, session: IntegerSession) -> IntegerState:
    """Return how a layer computes, its quantizer yet to be set."""
    assert scheme.weights is not None
    layout = layout_for(target, scheme)
    activations = scheme.activations
    group_size = None if activations is None else activations.group_size
    return IntegerState(
        name=target.name,
        layout=layout,
        session=session,
        quantizer=None,
        input_group_size=None if group_size is None else min(group_size, layout.num_inputs),
        largest_weight=largest_code(scheme.weights),
        largest_input=0 if activations is None else largest_code(activations),
        dtype=target.weight.dtype,
    )


def _static_ranges(
    model: nn.Module,
    scheme: QuantScheme,
    selection: Selection,
    batches: Sequence[Batch] | None,
) -> dict[str, Range]:
    if scheme.activations is None or not scheme.is_static:
        return {}
    if not batches:
        raise QuantizationError(
            f"scheme {scheme.name!r}: static activation ranges need calibration batches"
        )
    sites = [Site(target.name, target.module, "input") for target in selection.targets]
    found = calibrate(model, sites, scheme.activations, batches)
    return {name: span for (name, _), span in found.items()}


def noted(coverage: Coverage, scheme: QuantScheme, kernel: Kernel | None) -> Coverage:
    """Say in every quantized layer's entry what is stored and what multiplies."""
    assert scheme.weights is not None
    how = "dequantized for each product" if kernel is None else f"int8 GEMM ({kernel.name})"
    text = f"int{scheme.weights.bits} storage, {how}"
    modules = tuple(
        item.model_copy(update={"note": "; ".join(filter(None, (item.note, text)))})
        if item.quantized
        else item
        for item in coverage.modules
    )
    return coverage.model_copy(update={"modules": modules})
