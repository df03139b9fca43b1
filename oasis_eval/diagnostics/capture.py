"""Which activations are measured, and the hooks that measure them as they pass.

Two sets of tensors. `outputs`: what decoder layers, MLPs, norms and attention output projections
return, and the final norm: the literature's. `linear_inputs`: what the Linear layers of the
backbone read: what is quantized, and the only set that means the same under every wiring. Linears
that read one tensor (query, key and value) count as one; gates and depth routers, which some
variants have and others have not, and the language-model head are not in it.

A hook reduces its tensor at once to five numbers a token, and the end of the pass adds these up.
The last tensor is remembered until the next one,
because what a norm returns is what the Linears behind it read.

Shapes: B sequences, T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from oasis_eval.diagnostics.moments import TokenMoments, token_moments
from oasis_eval.diagnostics.tensor_sums import TensorSums, sums_over_sequences
from oasis_eval.modeling.routing import DepthPort
from oasis_eval.modeling.self_attention import ElementwiseGate, PerHeadGate

TensorSet = Literal["outputs", "linear_inputs"]
TENSOR_SETS: tuple[TensorSet, ...] = ("outputs", "linear_inputs")

_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")


class Target(NamedTuple):
    """One tensor to measure."""

    name: str
    """Module, as tables and records call it."""
    module: nn.Module
    tensor_set: TensorSet
    is_hidden_state: bool
    """Whether massive activations are looked for: the stream after a decoder layer."""


def targets(model: nn.Module) -> list[Target]:
    """Find what is measured, by the kind of each module.

    A decoder layer of a depth-routing model returns its whole history; there the stream after the
    layer's MLP is measured in its place.
    """
    layers = _decoder_layers(model)
    found = []
    for name, layer in layers.items():
        port = getattr(layer, "attn_res_mlp", None)
        if isinstance(port, DepthPort):
            tap = f"{name}.attn_res_mlp.taps.residual"
            found.append(Target(tap, port.taps.residual, "outputs", True))
        else:
            found.append(Target(name, layer, "outputs", True))
        found += [
            Target(f"{name}.{child_name}", child, "outputs", False)
            for child_name, child in layer.named_modules()
            if _is_measured_output(child_name, child)
        ]
    found += [
        Target(name, module, "outputs", False)
        for name, module in model.named_modules()
        if _is_norm(module) and not any(name.startswith(f"{layer}.") for layer in layers)
    ]
    for name, layer in layers.items():
        aside = [
            child_name
            for child_name, child in layer.named_modules()
            if isinstance(child, DepthPort | PerHeadGate | ElementwiseGate)
        ]
        found += [
            Target(f"{name}.{child_name}", child, "linear_inputs", False)
            for child_name, child in layer.named_modules()
            if isinstance(child, nn.Linear | Conv1D)
            and not any(child_name.startswith(f"{prefix}.") for prefix in aside)
        ]
    return found


class ActivationWatch:
    """Sums of every tensor that is watched."""

    def __init__(self) -> None:
        self.sums: dict[tuple[TensorSet, str], TensorSums] = {}
        self.unread: dict[str, str] = {}
        """Modules whose tensor could not be told apart into sequences and tokens, and its shape."""
        self.num_sequences = self.num_tokens = 0
        """Of the running pass."""
        self.real_BT: Tensor | None = None
        """Real tokens of the running pass; None: no padding."""
        self._pass: list[tuple[TensorSums, TokenMoments]] = []
        self._last: tuple[Tensor, TokenMoments, Tensor] | None = None
        self._last_input: Tensor | None = None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the targets of `model` for the length of the block."""
        handles = []
        for target in targets(model):
            if target.tensor_set == "outputs":
                hook = partial(self._output, target)
                handles.append(target.module.register_forward_hook(hook))
            else:
                pre_hook = partial(self._input, target)
                handles.append(target.module.register_forward_pre_hook(pre_hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_pass(self) -> None:
        """Sum up a forward pass that has ended."""
        # All tensors of one width at once: dozens of small operations each would cost more than
        # the reduction of the activations.
        by_width: dict[int, list[tuple[TensorSums, TokenMoments]]] = {}
        for entry in self._pass:
            by_width.setdefault(entry[1].num_features, []).append(entry)
        for width, entries in by_width.items():
            peak, mean, second, third, fourth = (
                torch.stack(tensors)
                for tensors in zip(*(moments[:5] for _, moments in entries), strict=True)
            )
            stacked = TokenMoments(peak, mean, second, third, fourth, width)
            sums_GX = sums_over_sequences(stacked, self.real_BT)
            for (sums, _), sums_X in zip(entries, sums_GX, strict=True):
                sums.add(sums_X, self.num_sequences)
        self.drop_pass()

    def drop_pass(self) -> None:
        """Forget the tensors of a forward pass."""
        self._pass.clear()
        self._last = self._last_input = None

    def _output(self, target: Target, _: nn.Module, __: object, output: Any) -> None:
        self._add(target, output[0] if isinstance(output, tuple) else output)

    def _input(self, target: Target, _: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or args[0] is self._last_input:
            return
        self._last_input = args[0]
        self._add(target, args[0])

    def _add(self, target: Target, x: Tensor) -> None:
        shape = (self.num_sequences, self.num_tokens)
        if x.dim() == 4 and x.shape[:3] == (shape[0], 1, shape[1]):
            view_BTF = x[:, 0]  # latent keys and values, before their heads
        elif x.dim() > 3 and x.shape[:2] == shape:
            view_BTF = x.flatten(2)
        elif x.dim() == 2 and x.shape[0] == shape[0] * shape[1]:
            view_BTF = x.unflatten(0, shape)
        elif x.dim() == 3 and x.shape[:2] == shape:
            view_BTF = x
        else:
            # A router of experts hands on some tokens in an order of its own.
            self.unread[target.name] = "x".join(str(size) for size in x.shape)
            return
        if self._last is None or self._last[0] is not x:
            self._last = (x, token_moments(view_BTF), view_BTF)
        _, moments, view_BTF = self._last
        sums = self.sums.setdefault((target.tensor_set, target.name), TensorSums())
        if target.is_hidden_state:
            sums.add_massive(view_BTF, moments, self.real_BT)
        self._pass.append((sums, moments))


def _decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not is_inside:
            found[name] = module
    return found


def _is_measured_output(name: str, module: nn.Module) -> bool:
    """Tell whether a module inside a decoder layer is an MLP, a norm or an output projection."""
    parent, _, own = name.rpartition(".")
    is_linear = isinstance(module, nn.Linear | Conv1D)
    if is_linear:
        return own in _OUTPUT_PROJECTIONS and "att" in parent.lower()
    return parent == "" and (_is_norm(module) or "MLP" in type(module).__name__ or own == "mlp")


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")
