"""SmoothQuant: divide input channels of a layer by factors, and multiply its weights by them.

With s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), the division moves into whatever made the input:

- a norm: gain and bias / s, and every layer that reads the norm * s;
- `v_proj` before `o_proj`, `up_proj` before `down_proj`: output rows / s. Query heads that share a
  key-value head share s; gates between the layers multiply channel by channel and do not matter.

Everything else (an input made by an activation function, a norm that is read by something other
than linear layers) is left alone and named.

Source: Xiao et al., "SmoothQuant", ICML 2023.
Dimensions: D width, N outputs, K inputs of a layer, H heads, R repeats of a head, C head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.calibrate import Batch, Site, attach, evaluation_mode, runner, tokens_of
from oasis_eval.quant.padding import PaddingContext
from oasis_eval.quant.targets import Selection, Target
from oasis_eval.quant.transforms.edits import Edits, matrix_of, shape_of, wide
from oasis_eval.quant.transforms.norms import Norm, Readers, norm_of, trace_readers
from oasis_eval.quant.transforms.structure import ChannelPair, channel_pairs
from oasis_eval.spec import SmoothQuant

_SMALLEST, _LARGEST = 1e-5, 1e5


@dataclass(slots=True)
class _Factors:
    """What one layer's weight [N, K] and bias [N] will be multiplied by."""

    layer: nn.Module
    rows_N: Tensor  # noqa: N815 - shape suffix
    columns_K: Tensor  # noqa: N815 - shape suffix

    @classmethod
    def of(cls, layer: nn.Module) -> _Factors:
        num_rows, num_columns = shape_of(layer)
        rows_N = torch.ones(num_rows, dtype=torch.float64)
        return cls(layer, rows_N, torch.ones(num_columns, dtype=torch.float64))

    def matrix(self) -> Tensor:
        matrix_NK = matrix_of(self.layer)
        return matrix_NK * self.rows_N.to(matrix_NK)[:, None] * self.columns_K.to(matrix_NK)


def smooth_(  # noqa: PLR0913, PLR0917 - a transform's own five, and how to run the model
    model: nn.Module,
    spec: SmoothQuant,
    selection: Selection,
    batches: Sequence[Batch],
    edits: Edits,
    run: Callable[[], object],
) -> list[str]:
    """Smooth the inputs of the layers that will be quantized, without changing the function.

    Args:
        model: A causal language model in floating point.
        spec: Alpha.
        selection: The layers that will be quantized.
        batches: Calibration text.
        edits: Takes note of every change.
        run: Runs the model once on a few tokens.

    Returns:
        Notes: layers left alone.

    Raises:
        QuantizationError: There is no text, or an input is not finite.
    """
    readers = trace_readers(model, run)
    largest = _largest_inputs(model, selection.targets, batches)
    modules = dict(model.named_modules())
    shared = _shared_weights(model)
    factors: dict[str, _Factors] = {}
    smoothed: set[str] = set()
    for pair in channel_pairs(model):
        if pair.second_name in largest and not shared & {
            id(pair.first.weight),
            id(pair.second.weight),
        }:
            _smooth_pair(pair, largest[pair.second_name], spec.alpha, factors)
            smoothed.add(pair.second_name)
    for name, reading in readers.items():
        norm = norm_of(modules[name])
        covered = [item for item in reading.linear.values() if item.name in largest]
        if norm is None or not covered or not _is_foldable(norm, reading, shared):
            continue
        scale_D = _smooth_readers(norm, reading, largest, spec.alpha, factors)
        norm.set_gain(norm.gain_D / scale_D.to(norm.gain_D), edits)
        smoothed |= {item.name for item in covered}
    for item in factors.values():
        edits.set_matrix(item.layer, item.matrix())
        bias = item.layer._parameters.get("bias")
        if bias is not None and not bool((item.rows_N == 1).all()):
            wide_bias = wide(bias)
            edits.set_parameter(item.layer, "bias", wide_bias * item.rows_N.to(wide_bias))
    return _left_alone([target.name for target in selection.targets], smoothed)


def scales(inputs_K: Tensor, weights_K: Tensor, alpha: float) -> Tensor:
    """Return the factors of input channels.

    Args:
        inputs_K: Largest absolute input of each channel.
        weights_K: Largest absolute weight of each channel.
        alpha: Share of the spread that moves into weights.

    Returns:
        Float64 between 1e-5 and 1e5; 1 where a channel has no input or no weight, since nothing is
        gained there.
    """
    inputs_K, weights_K = inputs_K.double(), weights_K.double()
    scale_K = inputs_K.pow(alpha) / weights_K.pow(1.0 - alpha)
    is_empty = (inputs_K == 0) | (weights_K == 0)
    return torch.where(is_empty, torch.ones_like(scale_K), scale_K.clamp(_SMALLEST, _LARGEST))


def _largest_inputs(
    model: nn.Module, targets: Sequence[Target], batches: Sequence[Batch]
) -> dict[str, Tensor]:
    """Return the largest absolute input [K] of every layer over real tokens, float64.

    Layers that no token reaches are left out.
    """
    if not any(bool(batch.attention_mask_BT.any()) for batch in batches):
        raise QuantizationError("SmoothQuant needs calibration text, and there is none")
    largest: dict[str, Tensor] = {}

    def observer(name: str) -> Callable[[Tensor, int], None]:
        def observe(x_TK: Tensor, _: int) -> None:
            seen_K = wide(x_TK.abs().amax(0))
            largest[name] = torch.maximum(largest.get(name, seen_K), seen_K)

        return observe

    context = PaddingContext()
    sites = [Site(target.name, target.module, "input") for target in targets]
    run = runner(model, sites)
    handles = [attach(site, observer(site.name), context) for site in sites]
    try:
        with torch.no_grad(), evaluation_mode(model):
            for batch in batches:
                context.enter(tokens_of(batch))
                run(batch)
                context.leave()
    finally:
        for handle in handles:
            handle.remove()
    for name, seen_K in largest.items():
        if not bool(torch.isfinite(seen_K).all()):
            raise QuantizationError(f"{name}: inputs on the calibration text are not finite")
    return largest


def _smooth_pair(
    pair: ChannelPair, inputs_K: Tensor, alpha: float, factors: dict[str, _Factors]
) -> None:
    first = _factors_of(factors, pair.first_name, pair.first)
    second = _factors_of(factors, pair.second_name, pair.second)
    shape = (pair.num_heads, pair.repeats, -1)
    weights_K = second.matrix().abs().amax(0)
    inputs_HC = inputs_K.to(weights_K).reshape(shape).amax(1)
    scale_HC = scales(inputs_HC, weights_K.reshape(shape).amax(1), alpha).cpu()
    rows = slice(pair.start, pair.start + scale_HC.numel())
    first.rows_N[rows] /= scale_HC.flatten()
    repeated = scale_HC.unsqueeze(1).expand(-1, pair.repeats, -1)
    second.columns_K *= repeated.flatten()


def _smooth_readers(
    norm: Norm,
    reading: Readers,
    largest: dict[str, Tensor],
    alpha: float,
    factors: dict[str, _Factors],
) -> Tensor:
    """Multiply the columns of a norm's readers; return the scales [D]."""
    inputs_D = torch.zeros_like(norm.gain_D)
    weights_D = torch.zeros_like(norm.gain_D)
    for reader in reading.linear.values():
        part = slice(reader.start, reader.stop)
        item = _factors_of(factors, reader.name, reader.layer)
        if reader.name in largest:
            seen = largest[reader.name].to(inputs_D)
            inputs_D[part] = torch.maximum(inputs_D[part], seen)
            weights = item.matrix().abs().amax(0)
            weights_D[part] = torch.maximum(weights_D[part], weights)
    scale_D = scales(inputs_D, weights_D, alpha)
    for reader in reading.linear.values():
        factors[reader.name].columns_K *= scale_D[reader.start : reader.stop].cpu()
    return scale_D


def _factors_of(factors: dict[str, _Factors], name: str, layer: nn.Module) -> _Factors:
    if name not in factors:
        factors[name] = _Factors.of(layer)
    return factors[name]


def _is_foldable(norm: Norm, reading: Readers, shared: set[int]) -> bool:
    """Whether nothing but linear layers of its own reads the norm."""
    names = [reader.name for reader in reading.linear.values()]
    weights = {id(reader.layer.weight) for reader in reading.linear.values()}
    width = norm.gain_D.shape[0]
    fits = all(reader.stop <= width for reader in reading.linear.values())
    return not reading.other and fits and len(set(names)) == len(names) and not weights & shared


def _shared_weights(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules own."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice


def _left_alone(names: list[str], smoothed: set[str]) -> list[str]:
    """Name the layers whose inputs are as they were, one note for all."""
    left = [name for name in names if name not in smoothed]
    if not left:
        return []
    kinds = sorted({name.rsplit(".", 1)[-1] for name in left})
    shown = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
    return [
        f"SmoothQuant left {len(left)} of {len(names)} quantized layers alone, whose inputs no "
        f"norm or linear layer can absorb ({', '.join(kinds)}): {shown}"
    ]
