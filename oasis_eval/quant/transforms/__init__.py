"""What is done to a model before it is quantized: SmoothQuant, Hadamard rotation, GPTQ.

The first two change weights and not the function of the model, so that what is quantized afterwards
has an easier shape; GPTQ decides the codes of the weights. Each can be undone bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from oasis_eval.errors import QuantizationError, UnsupportedSchemeError
from oasis_eval.quant.targets import select
from oasis_eval.quant.transforms.edits import Edits
from oasis_eval.quant.transforms.hessians import gptq_codes
from oasis_eval.quant.transforms.smooth import smooth_
from oasis_eval.quant.transforms.stream import rotate_
from oasis_eval.quant.weights import WeightCodes
from oasis_eval.spec import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor, nn

    from oasis_eval.quant.calibrate import Batch

_PROBE_TOKENS = 16
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.25
"""Largest change of a logit, as a share of the largest one, that counts as rounding. A transform
that does not fit a model is off by more than that; in 16 bits rounding alone reaches percents."""

_SMOOTHING_TAKEN_BACK = (
    "rotating the residual stream moves the gains of norms into the layers behind them, which "
    "takes SmoothQuant back there; it stays on the inputs of o_proj and down_proj"
)


@dataclass(slots=True)
class Transformed:
    """The transforms of a scheme in effect on a model."""

    codes: Mapping[str, WeightCodes] = field(default_factory=dict)
    """By layer name: codes that GPTQ chose; other layers are rounded to nearest."""
    undos: list[Callable[[], None]] = field(default_factory=list)
    """What takes the transforms back, in the order in which they were made."""
    notes: list[str] = field(default_factory=list)
    """What was done in another way than a reader would expect, or not at all."""

    def undo(self) -> None:
        """Take the transforms back, last first."""
        while self.undos:
            self.undos.pop()()


def transform_(
    model: nn.Module, scheme: QuantScheme, batches: Sequence[Batch] | None
) -> Transformed:
    """Apply the transforms of `scheme` to `model` in place.

    Args:
        model: A causal language model in floating point.
        scheme: Its `transforms` are applied in order.
        batches: Calibration text, which SmoothQuant and GPTQ need.

    Raises:
        UnsupportedSchemeError: The model's structure does not allow a transform.
        QuantizationError: Calibration failed.
    """
    transformed = Transformed()
    try:
        _transform(model, scheme, batches or [], transformed)
    except BaseException:
        transformed.undo()
        raise
    return transformed


def _transform(
    model: nn.Module, scheme: QuantScheme, batches: Sequence[Batch], transformed: Transformed
) -> None:
    notes = transformed.notes
    kinds = [transform.kind for transform in scheme.transforms]
    for transform in scheme.transforms:
        selection = select(model, scheme)
        if transform.kind == "gptq":
            assert scheme.weights is not None  # the spec sees to it
            transformed.codes, more = gptq_codes(
                model, transform, scheme.weights, selection, batches
            )
            notes += more
            continue
        before = _probe(model)
        edits = Edits()
        transformed.undos.append(edits.undo)
        if transform.kind == "smooth":
            notes += smooth_(model, transform, selection, batches, edits, run=lambda: _probe(model))
        else:
            rotated = rotate_(model, transform, selection, edits)
            notes += rotated.notes
            if rotated.along_stream and "smooth" in kinds:
                notes.append(_SMOOTHING_TAKEN_BACK)
        _check_unchanged(before, _probe(model), f"scheme {scheme.name!r}: {transform.kind}")


def _probe(model: nn.Module) -> Tensor:
    """Return the logits of a few tokens."""
    device = next(model.parameters()).device
    embedding = cast("nn.Module", model.get_input_embeddings())  # type: ignore[operator]  # as every causal LM has
    vocabulary = cast("Tensor", embedding.weight).shape[0]
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(vocabulary, (1, _PROBE_TOKENS), generator=generator).to(device)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids_BT, use_cache=False).logits
    return logits


def _check_unchanged(before: Tensor, after: Tensor, what: str) -> None:
    """Refuse a transform that has changed what the model computes.

    Raises:
        UnsupportedSchemeError: The logits differ by more than rounding.
        QuantizationError: They are finite no longer.
    """
    if not bool(torch.isfinite(before).all()):
        return
    if not bool(torch.isfinite(after).all()):
        raise QuantizationError(f"{what}: the transformed model overflows; use a wider dtype")
    deviation = float((after.double() - before.double()).abs().max() / before.abs().max())
    tolerance = _TOLERANCES.get(before.dtype, _HALF_TOLERANCE)
    if deviation > tolerance:
        raise UnsupportedSchemeError(
            f"{what} changes what the model computes by {deviation:.1%} of the largest logit, so "
            "its structure is not what the transform expects; leave the transform out"
        )
