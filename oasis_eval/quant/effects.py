"""Whether a scheme did anything: asked of every backend after a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from oasis_eval.errors import QuantizationError
from oasis_eval.spec import QuantScheme


class Changed(NamedTuple):
    """What quantization has changed so far."""

    weights: bool
    activations: bool


def check_effect(
    scheme: QuantScheme,
    covered: Sequence[str],
    called: Collection[str],
    changed: Changed,
    *,
    what: str = "layers",
) -> tuple[str, ...]:
    """Return warnings about what has not run and about halves of a scheme without effect.

    Args:
        scheme: What was applied.
        covered: Names of what it quantizes in a forward pass.
        called: Those that have run.
        changed: Whether quantization changed any weight, and any activation.
        what: What the names are, for messages.

    Raises:
        QuantizationError: No weight and no activation changed, or nothing that is covered ran.
    """
    if covered and not called:
        raise QuantizationError(
            f"scheme {scheme.name!r}: none of {len(covered)} quantized {what} has run; the model "
            "does not call them"
        )
    if not changed.weights and not changed.activations:
        raise QuantizationError(
            f"scheme {scheme.name!r}: no weight and no activation was changed by quantization"
        )
    warnings = []
    if scheme.weights is not None and not changed.weights:
        warnings.append("no weight was changed by quantization")
    if scheme.activations is not None and not changed.activations:
        warnings.append("no activation was changed by quantization")
    idle = [name for name in covered if name not in called]
    if idle:
        warnings.append(
            f"{len(idle)} of {len(covered)} quantized {what} have not run: "
            + ", ".join(idle[:3])
            + (", ..." if len(idle) > 3 else "")
        )
    return tuple(warnings)
