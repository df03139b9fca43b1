"""A fake-quantized model part by part: any of its weights, inputs, outputs and taps switched off.

The scheme is put on the whole model once, so that every part is what the scheme makes of it: its
codes, its calibrated range, its transformed weights. Switching a part means exchanging a parameter
or the class of a module, costs nothing, and is exact.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, NamedTuple

from torch import nn

from oasis_eval.quant.backends import Applied
from oasis_eval.quant.fake import FakeApplied
from oasis_eval.quant.layers import LayerQuantization, become_plain_, become_quantized_
from oasis_eval.quant.regions import FakeQuantTap, TapQuantization, become_quantized_tap_

Grouping = Literal["layer", "region", "kind"]
_LAYER = re.compile(r"(.*?\.\d+)(\.|$)")


class Part(NamedTuple):
    """One thing that a scheme quantizes."""

    module: str
    what: Literal["weight", "input", "output", "tap"]
    region: str
    """`weights`, or the region of the activations."""

    def label(self, by: Grouping) -> str:
        """Return the group that the part belongs to.

        Args:
            by: `layer`: the decoder layer, or the module itself outside of them. `region`: its
                region, all weights being one. `kind`: the layer's own name (`q_proj`), for a place
                between layers its region.
        """
        if by == "region":
            return self.region
        if by == "kind":
            return self.region if self.what == "tap" else self.module.rpartition(".")[2]
        match = _LAYER.match(self.module)
        return match[1] if match else self.module


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer or embedding with and without its scheme."""

    module: nn.Module
    kind: type[nn.Module]
    plain: nn.Parameter | None
    weight: nn.Parameter | None
    """Quantized; the same as `plain` where the scheme leaves weights alone."""
    quantization: LayerQuantization | None
    """None: an embedding, whose activations stay."""


@dataclass(frozen=True, slots=True)
class _Tap:
    module: nn.Module
    kind: type[nn.Module]
    quantization: TapQuantization


class Parts:
    """The parts of a model under a scheme; on leaving the block all of them are on again."""

    def __init__(self, model: nn.Module, applied: Applied) -> None:
        """Take stock of a model.

        Args:
            model: As `applied` left it.
            applied: A scheme of backend `fake` whose original weights are kept.
        """
        inner = getattr(applied, "applied", applied)  # below its transforms
        assert isinstance(inner, FakeApplied)
        self._layers: dict[str, _Layer] = {}
        self._taps: dict[str, _Tap] = {}
        self._shared = inner.session.shared
        originals = {id(item.module): item for item in inner.originals}
        tap_kinds = {id(tap): kind for tap, kind in inner.taps}
        parts: list[Part] = []
        for item in inner.coverage.modules:
            if not item.quantized:
                continue
            module = model.get_submodule(item.module)
            if isinstance(module, FakeQuantTap):
                kind = tap_kinds[id(module)]
                self._taps[item.module] = _Tap(module, kind, module.quantization)
                parts.append(Part(item.module, "tap", str(item.region)))
                continue
            original = originals[id(module)]
            assert original.weight is not None
            quantization: LayerQuantization | None = getattr(module, "quantization", None)
            layer = _Layer(
                module,
                original.kind,
                original.weight,
                module._parameters["weight"],
                quantization,
            )
            self._layers[item.module] = layer
            parts += _parts_of(item.module, item.region or "linear_inputs", layer)
        self.all = tuple(parts)

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.only(self.all)

    def groups(self, by: Grouping) -> Mapping[str, tuple[Part, ...]]:
        """Return the parts of each group, groups in the order of the model."""
        found: dict[str, list[Part]] = {}
        for part in self.all:
            found.setdefault(part.label(by), []).append(part)
        return {label: tuple(parts) for label, parts in found.items()}

    def only(self, parts: Collection[Part]) -> None:
        """Quantize these parts and no others."""
        chosen = {(part.module, part.what) for part in parts}
        if self._shared is not None:
            self._shared.clear()
        for name, layer in self._layers.items():
            weight = layer.weight if (name, "weight") in chosen else layer.plain
            layer.module._parameters["weight"] = weight
            if layer.quantization is not None:
                _set_activations(
                    layer,
                    inputs=(name, "input") in chosen,
                    outputs=(name, "output") in chosen,
                )
        for name, tap in self._taps.items():
            is_on, wanted = hasattr(tap.module, "quantization"), (name, "tap") in chosen
            if is_on and not wanted:
                become_plain_(tap.module, tap.kind)
            elif wanted and not is_on:
                become_quantized_tap_(tap.module, tap.quantization)


def _parts_of(name: str, region: str, layer: _Layer) -> list[Part]:
    parts = []
    if layer.weight is not layer.plain:
        parts.append(Part(name, "weight", "weights"))
    if layer.quantization is not None and layer.quantization.inputs is not None:
        parts.append(Part(name, "input", region))
    if layer.quantization is not None and layer.quantization.outputs is not None:
        parts.append(Part(name, "output", "linear_outputs"))
    return parts


def _set_activations(layer: _Layer, *, inputs: bool, outputs: bool) -> None:
    whole = layer.quantization
    assert whole is not None
    if hasattr(layer.module, "quantization"):
        become_plain_(layer.module, layer.kind)
    wanted = replace(
        whole,
        inputs=whole.inputs if inputs else None,
        outputs=whole.outputs if outputs else None,
    )
    become_quantized_(layer.module, wanted)
