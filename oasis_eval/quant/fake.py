"""Fake quantization: quantize-dequantize in the compute dtype, any bit width, any device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from oasis_eval.quant.backends import Applied
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.schemes import refusal
from oasis_eval.spec import QuantScheme


class FakeBackend:
    """Runs every integer format of `linear_inputs`, `linear_outputs` and `lm_head`."""

    def unsupported(self, scheme: QuantScheme) -> str | None:
        """Return why `scheme` cannot be run, or None if it can."""
        return refusal(scheme)

    def apply_(
        self,
        model: nn.Module,
        scheme: QuantScheme,
        batches: Sequence[Batch] | None,
        *,
        keep_reference: bool,
    ) -> Applied:
        """Quantize `model` in place."""
        raise NotImplementedError
