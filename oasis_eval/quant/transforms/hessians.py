"""GPTQ over a whole model: layer after layer, each on what its quantized predecessors hand on.

The model runs on the calibration text once for every decoder layer, and only that layer computes:
those before it return what they returned when their turn was over, and behind it the pass ends.
All projections of a decoder layer see one pass, so o_proj is fitted to what full-precision q, k
and v of its own layer make. Nothing is assumed about what a layer takes or returns, so models that
route depth are no special case.

The cost is two forward passes over the text (before and after each layer's turn), and the outputs
of all decoder layers on it are kept in memory meanwhile.

Dimensions: T real tokens of one sequence, N outputs, K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.calibrate import (
    Batch,
    Site,
    attach,
    evaluation_mode,
    runner,
    tokens_of,
)
from oasis_eval.quant.padding import PaddingContext
from oasis_eval.quant.targets import Selection, Target
from oasis_eval.quant.transforms.edits import Edits, matrix_of, wide
from oasis_eval.quant.transforms.gptq import quantize_weight
from oasis_eval.quant.transforms.structure import layers_of
from oasis_eval.quant.weights import WeightCodes, decode
from oasis_eval.spec import Gptq, TensorFormat


def gptq_codes(
    model: nn.Module,
    spec: Gptq,
    fmt: TensorFormat,
    selection: Selection,
    batches: Sequence[Batch],
) -> tuple[dict[str, WeightCodes], list[str]]:
    """Choose codes for the weights of every layer that will be quantized.

    Args:
        model: A causal language model in floating point; it is left as it was.
        spec: Damping and the order of inputs.
        fmt: Format of the weights.
        selection: The layers that will be quantized.
        batches: Calibration text; padding is left out.

    Returns:
        Codes by layer name, and notes on layers that are rounded to nearest instead.

    Raises:
        QuantizationError: There is no text, or values are not finite.
    """
    if not any(bool(batch.attention_mask_BT.any()) for batch in batches):
        raise QuantizationError("GPTQ needs calibration text, and there is none")
    targets, notes = _own_weights(selection)
    stages = _stages(model, targets)
    if not isinstance(layers_of(model), nn.ModuleList):
        notes.append("GPTQ found no decoder layers: every layer is fitted to unquantized inputs")
    codes: dict[str, WeightCodes] = {}
    unseen: list[str] = []
    edits = Edits()
    text = _Text(model, targets, batches)
    try:
        with torch.no_grad(), evaluation_mode(model), _replaying(layers_of(model), text):
            for stage, layer_targets in enumerate(stages):
                text.stage = stage
                for name, hessian_KK in text.hessians(layer_targets).items():
                    if hessian_KK is None:
                        unseen.append(name)
                        continue
                    target = next(item for item in layer_targets if item.name == name)
                    chosen = _quantize(target, hessian_KK, fmt, spec, edits)
                    codes[name] = chosen
                if stage + 1 < len(stages):
                    text.run()
    finally:
        edits.undo()
    if unseen:  # experts, by the hundred
        some = ", ".join(unseen[:3]) + (", ..." if len(unseen) > 3 else "")
        count = f" ({len(unseen)} layers)" if len(unseen) > 1 else ""
        notes.append(f"{some}{count}: rounded to nearest, saw no calibration text")
    return codes, notes


def _quantize(
    target: Target, hessian_KK: Tensor, fmt: TensorFormat, spec: Gptq, edits: Edits
) -> WeightCodes:
    dtype = target.weight.dtype
    weight_NK = matrix_of(target.module).to(dtype)
    codes = quantize_weight(weight_NK, hessian_KK, fmt, spec, name=target.name)
    edits.set_matrix(target.module, decode(codes, dtype).double())
    return codes


def _own_weights(selection: Selection) -> tuple[list[Target], list[str]]:
    """Leave out layers that share a weight with something else that is quantized."""
    owners: dict[int, list[str]] = {}
    for target in (*selection.targets, *selection.embeddings):
        owners.setdefault(id(target.weight), []).append(target.name)
    shared = [name for names in owners.values() if len(names) > 1 for name in names]
    notes = [f"rounded to nearest, for sharing a weight: {', '.join(shared)}"] if shared else []
    return [target for target in selection.targets if target.name not in shared], notes


def _stages(model: nn.Module, targets: Sequence[Target]) -> list[list[Target]]:
    """Return the targets of each decoder layer, and last those outside of all."""
    layers = layers_of(model)
    inside = [{id(module) for module in layer.modules()} for layer in layers or ()]
    stages = [[target for target in targets if id(target.module) in ids] for ids in inside]
    found = {target.name for stage in stages for target in stage}
    return [*stages, [target for target in targets if target.name not in found]]


class _PassEndsError(Exception):
    """Ends a forward pass behind the decoder layer whose turn it is."""


class _Text:
    """Runs the calibration text up to the decoder layer whose turn it is."""

    def __init__(
        self, model: nn.Module, targets: Sequence[Target], batches: Sequence[Batch]
    ) -> None:
        self.stage = 0
        """Index of the decoder layer whose turn it is; past the last one, the whole model runs."""
        self.batch = 0
        """Index of the batch that runs."""
        self.outputs: dict[tuple[int, int], object] = {}
        """What decoder layers returned, by layer and batch."""
        self._batches = batches
        self._context = PaddingContext()
        self._run = runner(model, [Site(item.name, item.module, "input") for item in targets])

    def run(self) -> None:
        """Run all batches; every decoder layer before the stage returns what it returned last."""
        for index, batch in enumerate(self._batches):
            self.batch = index
            self._context.enter(tokens_of(batch))
            try:
                self._run(batch)
            except _PassEndsError:
                pass
            finally:
                self._context.leave()

    def hessians(self, targets: Sequence[Target]) -> dict[str, Tensor | None]:
        """Return the mean of x x^T over real tokens x that enter each layer, [K, K] float64.

        None: no token did.
        """
        moments = {target.name: _Moments() for target in targets}
        handles = [
            attach(
                Site(target.name, target.module, "input"),
                moments[target.name].observe,
                self._context,
            )
            for target in targets
        ]
        try:
            if targets:
                self.run()
        finally:
            for handle in handles:
                handle.remove()
        return {name: item.mean() for name, item in moments.items()}


class _Moments:
    """Sum of x x^T."""

    def __init__(self) -> None:
        self._sum_KK: Tensor | None = None
        self._count = 0

    def observe(self, x_TK: Tensor, _: int) -> None:
        # fp32 products of one sequence, float64 sums over sequences.
        product_KK = wide(x_TK.T @ x_TK)
        self._sum_KK = product_KK if self._sum_KK is None else self._sum_KK.add_(product_KK)
        self._count += len(x_TK)

    def mean(self) -> Tensor | None:
        return None if self._sum_KK is None else self._sum_KK / self._count


@contextmanager
def _replaying(layers: nn.ModuleList | None, text: _Text) -> Iterator[None]:
    """Let decoder layers compute in their turn only."""

    def make(index: int, compute: Callable[..., object]) -> Callable[..., object]:
        def forward(*args: Any, **kwargs: Any) -> object:
            if index < text.stage:
                return text.outputs[index, text.batch]
            text.outputs[index, text.batch] = compute(*args, **kwargs)
            raise _PassEndsError

        return forward

    own = [(layer, vars(layer).get("forward")) for layer in layers or ()]
    try:
        for index, (layer, _) in enumerate(own):
            layer.forward = make(index, layer.forward)
        yield
    finally:
        for layer, forward in own:
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward
