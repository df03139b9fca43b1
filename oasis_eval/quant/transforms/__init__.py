"""What is done to a model before it is quantized: SmoothQuant, Hadamard rotation, GPTQ.

The first two change weights and not the function of the model, so that what is quantized afterwards
has an easier shape; GPTQ decides the codes of the weights. Each can be undone bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oasis_eval.errors import UnsupportedSchemeError
from oasis_eval.quant.weights import WeightCodes
from oasis_eval.spec import QuantScheme

if TYPE_CHECKING:
    from torch import nn

    from oasis_eval.quant.calibrate import Batch


@dataclass(slots=True)
class Transformed:
    """The transforms of a scheme in effect on a model."""

    codes: Mapping[str, WeightCodes] = field(default_factory=dict)
    """By layer name: codes that GPTQ chose; other layers are rounded to nearest."""
    undos: list[Callable[[], None]] = field(default_factory=list)
    """What takes the transforms back, in the order in which they were made."""

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
    if scheme.transforms:
        raise UnsupportedSchemeError(f"scheme {scheme.name!r}: transforms cannot be run yet")
    return Transformed()
