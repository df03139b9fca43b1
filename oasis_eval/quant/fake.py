"""Fake quantization: quantize-dequantize in the compute dtype, any bit width, any device.

Weights are quantized once, when the scheme is applied; activations in every forward pass. The
model's own layers are changed in place and changed back by `undo`, which returns the very
parameters that were there before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.activations import (
    ActivationQuantizer,
    SequenceQuantizer,
    StaticQuantizer,
    dynamic_quantizer,
    static_quantizer,
)
from oasis_eval.quant.calibrate import Batch, Site, calibrate
from oasis_eval.quant.coverage import report
from oasis_eval.quant.effects import Changed, Original, check_effect, check_undo
from oasis_eval.quant.layers import (
    LayerQuantization,
    Session,
    become_plain_,
    become_quantized_,
)
from oasis_eval.quant.padding import PaddingContext
from oasis_eval.quant.primitives import Range
from oasis_eval.quant.ranges import fake_quantize_weight
from oasis_eval.quant.regions import (
    RegionSite,
    TapQuantization,
    become_quantized_tap_,
    dynamic_tap_quantizer,
    is_static,
    static_tap_quantizer,
)
from oasis_eval.quant.targets import Selection, Target, quantizes_inputs, quantizes_outputs, select
from oasis_eval.quant.weights import WeightCodes, decode
from oasis_eval.record import Coverage
from oasis_eval.spec import QuantScheme, Region

Ranges = dict[tuple[str, str], Range]
_SHAPES: Mapping[Region, Literal["heads", "attention"]] = MappingProxyType(
    {
        "attention_scores": "attention",
        "attention_probs": "attention",
        "attention_context": "heads",
    }
)
"""What passes a tap that is not a tensor of tokens."""


class FakeBackend:
    """Runs every format in every region."""

    def apply_(
        self,
        model: nn.Module,
        scheme: QuantScheme,
        batches: Sequence[Batch] | None,
        *,
        codes: Mapping[str, WeightCodes],
        keep_reference: bool,
    ) -> FakeApplied:
        """Quantize `model` in place; see `backends.Backend.apply_`."""
        selection = select(model, scheme)
        for target in (*selection.targets, *selection.embeddings):
            if not bool(torch.isfinite(target.weight).all()):
                raise QuantizationError(f"{target.name}: the weight holds non-finite values")
        coverage = report(scheme, selection, list(model.parameters()))
        ranges = _static_ranges(model, scheme, selection, batches)
        applied = FakeApplied(scheme=scheme, coverage=coverage, ranges=ranges, codes=codes)
        try:
            applied.attach_(model, selection, keep_reference=keep_reference)
        except BaseException:
            applied.detach_()
            raise
        return applied


@dataclass(slots=True, kw_only=True)
class FakeApplied:
    """A fake-quantized scheme in effect on a model."""

    scheme: QuantScheme
    coverage: Coverage
    ranges: Ranges
    """Static ranges by (module, "input" or "output"), as calibrated."""
    codes: Mapping[str, WeightCodes] = field(default_factory=dict)
    """Codes that are decided already, by layer name."""
    session: Session = field(default_factory=Session)
    padding: PaddingContext = field(default_factory=PaddingContext)
    weights_changed: bool = False
    originals: list[Original] = field(default_factory=list)
    taps: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    """Those that quantize what passes them, and the class they had."""

    def verify(self) -> tuple[str, ...]:
        """Check, after a forward pass, that the scheme had an effect.

        Returns:
            Warnings: layers that have not run so far, and a half of the scheme without effect.

        Raises:
            QuantizationError: No weight and no activation changed, or no quantized layer ran.
        """
        covered = [
            item.module
            for item in self.coverage.modules
            if item.quantized and item.region != "embedding"
        ]
        what = "layers and regions" if self.coverage.num_sites else "layers"
        return check_effect(
            self.scheme,
            covered,
            self.session.called,
            Changed(self.weights_changed, self.session.activation_changed),
            what=what,
        )

    def undo(self) -> None:
        """Restore the model bit for bit.

        Raises:
            QuantizationError: The original weights were not kept, or were restored already.
        """
        check_undo(
            self.scheme,
            [*(item.weight is not None for item in self.originals), *(True for _ in self.taps)],
        )
        self.detach_()

    def attach_(self, model: nn.Module, selection: Selection, *, keep_reference: bool) -> None:
        """Quantize weights, each once however many layers share it, and change the layers."""
        quantizers = _Quantizers(self.scheme, self.ranges, self.padding)
        sharing: dict[int, list[Target]] = {}
        for target in (*selection.targets, *selection.embeddings):
            sharing.setdefault(id(target.weight), []).append(target)
        for targets in sharing.values():
            weight = self._quantize_weight(targets[0])
            for target in targets:
                original = target.module._parameters["weight"]
                is_kept = keep_reference or weight is None
                self.originals.append(
                    Original(target.module, type(target.module), original if is_kept else None)
                )
                if weight is not None:
                    target.module._parameters["weight"] = weight
                if target.region != "embedding":
                    become_quantized_(target.module, quantizers.layer(target, self.session))
        like = next(model.parameters())
        for site in selection.sites:
            kind = type(site.tap)
            become_quantized_tap_(site.tap, quantizers.tap(site, self.session, like=like))
            self.taps.append((site.tap, kind))
        if self.scheme.activations is None and not self.weights_changed:
            raise QuantizationError(
                f"scheme {self.scheme.name!r}: no weight was changed by quantization"
            )
        if quantizers.need_padding:
            for module in _entry_points(model):
                self.padding.watch(module)

    def detach_(self) -> None:
        """Change the layers back, with the original weights where they were kept."""
        self.padding.unwatch()
        if self.session.shared is not None:
            self.session.shared.clear()
        while self.taps:
            become_plain_(*self.taps.pop())
        for original in reversed(self.originals):
            if hasattr(original.module, "quantization"):
                become_plain_(original.module, original.kind)
            if original.weight is not None:
                original.module._parameters["weight"] = original.weight
        self.originals.clear()

    def _quantize_weight(self, target: Target) -> nn.Parameter | None:
        if self.scheme.weights is None:
            return None
        before = target.weight.detach()
        if target.name in self.codes:
            after = decode(self.codes[target.name], before.dtype)
            after = after.T.contiguous() if target.is_transposed else after
        elif target.is_transposed:
            after = fake_quantize_weight(before.T, self.scheme.weights).T.contiguous()
        else:
            after = fake_quantize_weight(before, self.scheme.weights)
        if not self.weights_changed:
            self.weights_changed = not torch.equal(before, after)
        return nn.Parameter(after, requires_grad=False)


class _Quantizers:
    """The activation quantizers of a scheme; layers with equal settings get the same object.

    That object is what tells that a quantized input may be shared.
    """

    def __init__(self, scheme: QuantScheme, ranges: Ranges, padding: PaddingContext) -> None:
        self._scheme = scheme
        self._ranges = ranges
        self._static: dict[tuple[object, ...], StaticQuantizer] = {}
        self._dynamic: ActivationQuantizer | None = None
        if scheme.activations is not None and not scheme.is_static:
            self._dynamic = dynamic_quantizer(scheme.activations, padding)

    @property
    def need_padding(self) -> bool:
        """Whether ranges are taken over the tokens of the running pass."""
        return isinstance(self._dynamic, SequenceQuantizer)

    def layer(self, target: Target, session: Session) -> LayerQuantization:
        """Return how `target` quantizes its activations."""
        has_inputs = quantizes_inputs(self._scheme, target.region)
        has_outputs = quantizes_outputs(self._scheme, target.region)
        return LayerQuantization(
            name=target.name,
            session=session,
            inputs=self._get(target, "input") if has_inputs else None,
            outputs=self._get(target, "output") if has_outputs else None,
        )

    def tap(self, site: RegionSite, session: Session, *, like: Tensor) -> TapQuantization:
        """Return how a place outside of layers quantizes tensors of `like`'s dtype and device."""
        fmt = self._scheme.activations
        assert fmt is not None
        if not is_static(site.region, self._scheme):
            return TapQuantization(site.name, session, dynamic_tap_quantizer(site.region, fmt))
        quantizer = self._of_range(self._ranges[site.name, "input"], like=like)
        return TapQuantization(site.name, session, static_tap_quantizer(site.region, quantizer))

    def _get(self, target: Target, side: str) -> ActivationQuantizer:
        if isinstance(self._dynamic, SequenceQuantizer):
            return self._dynamic.of(target.module)
        if self._dynamic is not None:
            return self._dynamic
        return self._of_range(self._ranges[target.name, side], like=target.weight)

    def _of_range(self, span: Range, *, like: Tensor) -> StaticQuantizer:
        assert self._scheme.activations is not None
        key = (*span.low.tolist(), *span.high.tolist(), like.dtype, like.device)
        if key not in self._static:
            self._static[key] = static_quantizer(
                self._scheme.activations, span, dtype=like.dtype, device=like.device
            )
        return self._static[key]


def _static_ranges(
    model: nn.Module,
    scheme: QuantScheme,
    selection: Selection,
    batches: Sequence[Batch] | None,
) -> Ranges:
    if scheme.activations is None or not scheme.is_static:
        return {}
    if not batches:
        raise QuantizationError(
            f"scheme {scheme.name!r}: static activation ranges need calibration batches"
        )
    sites = []
    for target in selection.targets:
        if quantizes_inputs(scheme, target.region):
            sites.append(Site(target.name, target.module, "input"))
        if quantizes_outputs(scheme, target.region):
            sites.append(Site(target.name, target.module, "output"))
    for site in selection.sites:
        if is_static(site.region, scheme):
            sites.append(Site(site.name, site.tap, "input", _SHAPES.get(site.region, "tokens")))
    if not sites:
        return {}
    return calibrate(model, sites, scheme.activations, batches)


def _entry_points(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called with token ids: the model and its body."""
    body = getattr(model, "base_model", model)
    return [model] if body is model else [model, body]
