"""The statistics by their definitions, in float64, on saved tensors of one unpadded sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def kurtosis(x: Tensor, eps: float = 0.0) -> float:
    """Raw kurtosis with the unbiased standard deviation."""
    x = x.double().flatten()
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / (len(x) - 1)
    return float(((x - mean) ** 4).mean() / (variance**2 + eps))


@dataclass
class Saved:
    """Whole activations of one forward pass."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)


def save_activations(model: Any, ids_1T: Tensor) -> Saved:
    """Run the backbone and keep what every module reads and returns."""
    saved = Saved()
    handles = []
    for name, module in model.named_modules():

        def keep(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, Tensor):
                saved.outputs[name] = value.detach().clone()
            if args and isinstance(args[0], Tensor):
                saved.inputs[name] = args[0].detach().clone()

        handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model.model(input_ids=ids_1T, use_cache=False)
    for handle in handles:
        handle.remove()
    return saved


@dataclass
class NaiveHead:
    """Statistics of one head of one sequence."""

    sink_mass: float
    sink_mass_renormalised: float
    null_mass: float
    mean_distance: float
    near_mass: float


def head_statistics(probs_TS: Tensor, visible_TS: Tensor, null_T: Tensor | None) -> NaiveHead:
    """Loop over the queries of a whole map."""
    sink, share, null, distance, near = [], [], [], [], []
    for t, row in enumerate(probs_TS.double()):
        total = float(row.sum())
        null.append(1.0 - total if null_T is None else float(null_T[t]))
        if bool(visible_TS[t, 0]):
            sink.append(float(row[0]))
            share.append(float(row[0]) / total if total > 0 else 0.0)
        if total > 0:
            distance.append(sum(float(p) * abs(t - j) for j, p in enumerate(row)) / total)
            near.append(sum(float(p) for j, p in enumerate(row) if t - j < 16) / total)

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values) if values else math.nan

    return NaiveHead(mean(sink), mean(share), mean(null), mean(distance), mean(near))


def gap(scores_TS: Tensor, visible_TS: Tensor) -> float:
    """Mean of largest minus median visible score over 16 evenly spread queries."""
    length = len(scores_TS)
    chosen = sorted({round(i * (length - 1) / 15) for i in range(16)})
    gaps = []
    for t in chosen:
        row = sorted(scores_TS[t][visible_TS[t]].double().tolist())
        middle = (row[(len(row) - 1) // 2] + row[len(row) // 2]) / 2
        gaps.append(row[-1] - middle)
    return sum(gaps) / len(gaps)
