"""Taps on the residual stream of transformers' decoder layers.

A layer is turned into a subclass of itself, in place, whose forward pass is the layer's own with a
tap behind every addition (and, in the first layer, before everything). A model of layers that are
not known has no such taps, and says so.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from oasis_eval.modeling.layer_forms import TappedLayer, forward_of
from oasis_eval.modeling.taps import Tap


class ResidualTaps(nn.Module):
    """The residual stream around one decoder layer."""

    def __init__(self, *, is_first: bool, is_parallel: bool) -> None:
        super().__init__()
        if is_first:
            self.residual_input = Tap()
            """[B, T, D] what enters the first layer."""
        if not is_parallel:
            self.residual_attention = Tap()
            """[B, T, D] after the attention sublayer's output was added."""
        self.residual_mlp = Tap()
        """[B, T, D] after the MLP's output was added; what leaves the layer."""


@contextmanager
def tapped_layers(model: nn.Module) -> Iterator[str | None]:
    """Put residual taps into the decoder layers of `model` for the length of the block.

    Yields:
        Why there are none, in a model of unknown layers; else None.
    """
    layers = _decoder_layers(model)
    unknown = [layer for layer in layers if forward_of(layer) is None]
    if unknown or not layers:
        stranger = unknown[0] if unknown else model
        yield f"the layers of {type(stranger).__name__} are not known"
        return
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    subclasses: dict[str, type[nn.Module]] = {}
    try:
        for index, layer in enumerate(layers):
            kind = type(layer)
            forward = forward_of(layer)
            assert forward is not None
            layer.taps = ResidualTaps(is_first=index == 0, is_parallel=forward.is_parallel)
            layer.__class__ = subclasses.setdefault(kind.__name__, _tapped(kind, forward))
            changed.append((layer, kind))
        yield None
    finally:
        for layer, kind in changed:
            layer.__class__ = kind
            del layer.taps


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a decoder: its first list of modules of which each attends."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            is_layer = [
                any("attn" in n or "attention" in n for n, _ in m.named_children()) for m in module
            ]
            if all(is_layer):
                return list(module)
    return []


def _tapped(kind: type[nn.Module], forward: type[TappedLayer]) -> type[nn.Module]:
    """Return the layer's class with another forward pass."""
    return type(f"Tapped{kind.__name__}", (forward, kind), {})
