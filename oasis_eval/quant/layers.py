"""Linear layers that quantize their inputs and outputs; their weights are quantized already.

A layer is turned into one of these by changing its class, not by putting another module in its
place: parameter names, hooks, attributes and every reference to it stay, and turning it back is
exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from oasis_eval.quant.activations import ActivationQuantizer, SharedInput


@dataclass(slots=True)
class Session:
    """What the quantized layers of one model have in common."""

    shared: SharedInput[Tensor] | None = field(default_factory=SharedInput)
    """None: every layer quantizes its input itself."""
    called: set[str] = field(default_factory=set)
    """Layers that have run."""
    activation_changed: bool = False
    """Whether quantizing an activation has changed any value so far."""


@dataclass(frozen=True, slots=True)
class LayerQuantization:
    """How one layer quantizes its activations."""

    name: str
    session: Session
    inputs: ActivationQuantizer | None
    outputs: ActivationQuantizer | None


class Quantized(Protocol):
    """What the quantized layers carry besides their parameters."""

    quantization: LayerQuantization
    weight: Tensor
    bias: Tensor | None


class FakeQuantLinear(nn.Linear):
    """`nn.Linear` with quantized activations."""

    quantization: LayerQuantization

    def forward(self, x: Tensor) -> Tensor:
        """Return quantize(x) @ weight.T + bias, the result quantized where the scheme says so."""
        return _finish(
            self.quantization, F.linear(_start(self.quantization, x), self.weight, self.bias)
        )


class FakeQuantConv1D(Conv1D):
    """The transposed Linear of GPT-2, weight [inputs, outputs], with quantized activations."""

    quantization: LayerQuantization
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return quantize(x) @ weight + bias, the result quantized where the scheme says so."""
        x = _start(self.quantization, x)
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return _finish(self.quantization, rows.reshape(*x.shape[:-1], rows.shape[-1]))


def become_quantized_(module: nn.Module, quantization: LayerQuantization) -> None:
    """Turn a plain Linear or Conv1D into its quantized class, in place."""
    module.__class__ = FakeQuantConv1D if isinstance(module, Conv1D) else FakeQuantLinear
    cast(Quantized, module).quantization = quantization


def become_plain_(module: nn.Module, original: type[nn.Module]) -> None:
    """Turn a quantized layer back into the class it had."""
    del cast(Quantized, module).quantization
    module.__class__ = original


def _start(quantization: LayerQuantization, x: Tensor) -> Tensor:
    session = quantization.session
    session.called.add(quantization.name)
    if quantization.inputs is None:
        return x
    if session.shared is None:
        quantized = quantization.inputs(x.detach(), quantization.name)
    else:
        quantized = session.shared.quantize(x, quantization.inputs, quantization.name)
    if not session.activation_changed:
        session.activation_changed = not torch.equal(quantized, x)
    return quantized


def _finish(quantization: LayerQuantization, y: Tensor) -> Tensor:
    if quantization.outputs is None:
        return y
    quantized = quantization.outputs(y.detach(), quantization.name)
    if not quantization.session.activation_changed:
        quantization.session.activation_changed = not torch.equal(quantized, y)
    return quantized
