"""What every quantization backend offers, which backend runs a scheme, and the way in.

A new backend is one module, one line in `backend_for`, and one function in `support.py` that says
what it cannot do; its heavy library is imported in its module and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from oasis_eval.errors import UnsupportedSchemeError
from oasis_eval.quant.support import unsupported
from oasis_eval.record import Coverage
from oasis_eval.spec import QuantScheme

if TYPE_CHECKING:
    import torch
    from torch import nn

    from oasis_eval.quant.calibrate import Batch
    from oasis_eval.quant.stored import StoredLayer
    from oasis_eval.quant.transforms import Transformed
    from oasis_eval.quant.weights import WeightCodes


class Applied(Protocol):
    """A scheme in effect on a model."""

    @property
    def coverage(self) -> Coverage:
        """What was quantized and what was not."""
        ...

    def verify(self) -> tuple[str, ...]:
        """Check, after a forward pass, that the scheme had an effect; return warnings.

        Raises:
            QuantizationError: Nothing changed, or the quantized layers were never run.
        """
        ...

    def undo(self) -> None:
        """Restore the model bit for bit.

        Raises:
            QuantizationError: The original weights were not kept, or were restored already.
        """
        ...


@runtime_checkable
class Storable(Applied, Protocol):
    """A scheme in effect whose layers a checkpoint can hold; see `storage`."""

    scheme: QuantScheme
    notes: tuple[str, ...]
    """What `verify` returns besides: warnings from when a checkpoint was written."""

    def stored(self, model: nn.Module) -> Mapping[str, StoredLayer]:
        """Return what a checkpoint holds of each quantized layer, by the layer's name.

        Raises:
            UnsupportedSchemeError: The library cannot give a layer back as it is.
        """
        ...

    def filled_(self, model: nn.Module) -> str | None:
        """Take over the values that the tensors of `stored` were given.

        Returns:
            The first tensor that holds what no quantizer makes, and what that is.
        """
        ...

    def compute_in_(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Expect activations of another dtype, after the rest of the model was cast to it.

        Raises:
            UnsupportedSchemeError: The library's layers cannot be cast.
        """
        ...


class Backend(Protocol):
    """One way to run quantized models."""

    def apply_(
        self,
        model: nn.Module,
        scheme: QuantScheme,
        batches: Sequence[Batch] | None,
        *,
        codes: Mapping[str, WeightCodes],
        keep_reference: bool,
    ) -> Applied:
        """Quantize `model` in place.

        Args:
            model: Any Hugging Face causal language model.
            scheme: What to quantize; `support.unsupported` has found nothing against it.
            batches: Calibration text; needed by static activation ranges only.
            codes: Codes that are decided already, by layer name; others round to nearest.
            keep_reference: Whether to keep the original weights, so that `undo` works.

        Raises:
            SpecError: A skip pattern matches nothing.
            QuantizationError: Nothing would be quantized, a layer cannot be, calibration failed,
                or no weight changed and activations are left alone.
        """
        ...


@runtime_checkable
class StoringBackend(Backend, Protocol):
    """A backend whose layers a checkpoint can hold."""

    def empty_(self, model: nn.Module, scheme: QuantScheme, dtype: torch.dtype) -> Storable:
        """Put quantized layers with any values in the place of those that `scheme` covers.

        Args:
            model: Of the checkpoint's architecture; its weights do not matter.
            scheme: The checkpoint's.
            dtype: Of the parameters that were quantized.

        Raises:
            QuantizationError: The scheme does not fit the model.
        """
        ...


def backend_for(scheme: QuantScheme) -> Backend:
    """Return the backend that runs `scheme`.

    Raises:
        UnsupportedSchemeError: No backend of this version can.
    """
    if scheme.backend == "fake":
        from oasis_eval.quant.fake import FakeBackend

        return FakeBackend()
    if scheme.backend == "torch":
        from oasis_eval.quant.integer import TorchBackend

        return TorchBackend()
    if scheme.backend == "bitsandbytes":
        from oasis_eval.quant.bnb import BitsAndBytesBackend

        return BitsAndBytesBackend()
    if scheme.backend == "quanto":
        from oasis_eval.quant.quanto import QuantoBackend

        return QuantoBackend()
    if scheme.backend == "torchao":
        from oasis_eval.quant.torchao import TorchaoBackend

        return TorchaoBackend()
    raise UnsupportedSchemeError(
        f"scheme {scheme.name!r}: backend {scheme.backend!r} cannot be run by this version"
    )


def quantize_(
    model: nn.Module,
    scheme: QuantScheme,
    batches: Sequence[Batch] | None = None,
    *,
    keep_reference: bool = False,
) -> Applied:
    """Quantize a causal language model in place.

    Args:
        model: Any Hugging Face causal language model.
        scheme: What to quantize, from `oasis_eval.quant.schemes.resolve` or written out.
        batches: Calibration token ids and masks; needed by static activation ranges, SmoothQuant
            and GPTQ.
        keep_reference: Whether to keep the original weights, so that `undo` works. Without it
            each weight is freed as soon as it is quantized.

    Returns:
        The scheme in effect: its coverage, `verify` and `undo`.

    Raises:
        UnsupportedSchemeError: No backend can run the scheme.
        SpecError: A skip pattern matches no module.
        QuantizationError: Nothing would be quantized, a layer cannot be, or calibration failed.
    """
    from oasis_eval.quant.transforms import transform_

    reason = unsupported(scheme)
    if reason is not None:
        raise UnsupportedSchemeError(reason)
    backend = backend_for(scheme)
    transformed = transform_(model, scheme, batches)
    if not keep_reference:
        transformed.undos.clear()
    try:
        applied = backend.apply_(
            model, scheme, batches, codes=transformed.codes, keep_reference=keep_reference
        )
    except BaseException:
        transformed.undo()
        raise
    return AppliedTransformed(applied, transformed) if scheme.transforms else applied


@dataclass(frozen=True, slots=True)
class AppliedTransformed:
    """A scheme in effect on a transformed model."""

    applied: Applied
    transformed: Transformed

    @property
    def coverage(self) -> Coverage:
        """What was quantized; see `Applied`."""
        return self.applied.coverage

    def verify(self) -> tuple[str, ...]:
        """Check, after a forward pass, that the scheme had an effect; see `Applied`."""
        return (*self.applied.verify(), *self.transformed.notes)

    def undo(self) -> None:
        """Restore the model bit for bit; see `Applied`."""
        self.applied.undo()
        self.transformed.undo()
