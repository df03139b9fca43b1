"""What backends have in common once a scheme is on: did it have an effect, can it be taken off."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import nn

from oasis_eval.errors import QuantizationError
from oasis_eval.spec import QuantScheme

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+$")
"""A layer of one expert among several, of which a few tokens reach some."""


class Original(NamedTuple):
    """What taking a scheme off one layer takes."""

    module: nn.Module
    kind: type[nn.Module]
    weight: nn.Parameter | None
    """None: not kept."""


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
    busy = {match[1] for name in called if (match := _EXPERT.match(name))}
    idle = [
        name
        for name in covered
        if name not in called and not ((match := _EXPERT.match(name)) and match[1] in busy)
    ]
    if idle:
        warnings.append(
            f"{len(idle)} of {len(covered)} quantized {what} have not run: "
            + ", ".join(idle[:3])
            + (", ..." if len(idle) > 3 else "")
        )
    return tuple(warnings)


def check_undo(scheme: QuantScheme, kept: Sequence[bool]) -> None:
    """Refuse to take a scheme off a second time, or without the original weights.

    Args:
        scheme: What was applied.
        kept: For each changed layer, whether its original is there; empty: nothing is changed.

    Raises:
        QuantizationError: It cannot be taken off.
    """
    if not kept:
        raise QuantizationError(f"scheme {scheme.name!r} has been undone already")
    if not all(kept):
        raise QuantizationError(
            f"scheme {scheme.name!r} cannot be undone: the original weights were not kept; load "
            "the checkpoint again, or quantize with keep_reference"
        )
