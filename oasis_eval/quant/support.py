"""Which backend can run which scheme here, and why not: known before anything is loaded.

One function a backend, without torch and without importing the backend's library, so that listing
schemes costs nothing and a grid knows its impossible cells before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from oasis_eval.quant import libraries
from oasis_eval.spec import Backend, QuantScheme, Region

_INTEGER_REGIONS: frozenset[Region] = frozenset({"linear_inputs", "lm_head"})
"""Regions that enter integer products."""
_LAYER_REGIONS: frozenset[Region] = frozenset(
    {"linear_inputs", "linear_outputs", "lm_head", "embedding", "attention_gate", "depth_router"}
)
"""Regions that are layers; the others lie between them."""


def unsupported(scheme: QuantScheme) -> str | None:
    """Return in one line why `scheme` cannot be run here; None: it can.

    A reference scheme quantizes nothing and needs no backend.
    """
    if scheme.execution == "none":
        return None
    reason = _REASONS.get(scheme.backend, _unknown)(scheme)
    return None if reason is None else f"scheme {scheme.name!r}: {reason}"


def indivisible(scheme: QuantScheme) -> str | None:
    """Return in one line why `scheme` cannot be put on a part of a model; None: it can."""
    if scheme.execution == "none":
        reason = "it quantizes nothing, so there are no parts to switch; name one that does"
    elif scheme.backend == "torch":
        reason = (
            "integer layers stand for whole layers; fake execution computes the same up to "
            f"rounding and comes apart: use {scheme.name.removesuffix('-real')!r}"
        )
    elif scheme.backend != "fake":
        reason = (
            f"layers of backend {scheme.backend!r} are its library's own and do not come apart; "
            "use a scheme of backend 'fake', for example w8a8 or w4a4"
        )
    elif any(transform.kind == "gptq" for transform in scheme.transforms):
        reason = (
            "GPTQ fits every layer to what the quantized layers before it hand on, so none "
            "stands for itself; leave 'gptq' out"
        )
    else:
        return None
    return f"scheme {scheme.name!r}: {reason}"


def _fake(scheme: QuantScheme) -> str | None:
    if scheme.execution != "fake":
        return "backend 'fake' has execution 'fake' only; real execution is backend 'torch'"
    reason = _between_layers(scheme)
    if reason is not None:
        return reason
    for fmt in (scheme.weights, scheme.activations):
        if fmt is not None and fmt.type in ("nf4", "bnb_fp4"):
            return f"type {fmt.type} is a code book of backend 'bitsandbytes'"
    if scheme.outlier_threshold is not None:
        return "'outlier_threshold' belongs to backend 'bitsandbytes'"
    return None


def _between_layers(scheme: QuantScheme) -> str | None:
    """Return why regions between layers cannot have the scheme's activation format."""
    regions = [region for region in scheme.regions if region not in _LAYER_REGIONS]
    fmt = scheme.activations
    if not regions:
        return None
    named = f"region {', '.join(regions)}"
    if fmt is None:
        return f"{named} is of activations, and the scheme has no 'activations'"
    if fmt.type != "int":
        return f"{named} is quantized to integers only, found type {fmt.type}"
    if scheme.is_static and fmt.granularity != "tensor":
        return f"{named} has static ranges per 'tensor' only, found {fmt.granularity!r}"
    if not scheme.is_static and fmt.granularity not in ("token", "group"):
        return f"{named} has dynamic ranges per 'token' or 'group' only, found {fmt.granularity!r}"
    return None


def _torch(scheme: QuantScheme) -> str | None:
    if scheme.execution != "real":
        return "backend 'torch' has execution 'real' only; fake execution is backend 'fake'"
    weights, activations = scheme.weights, scheme.activations
    foreign = [region for region in scheme.regions if region not in _INTEGER_REGIONS]
    if foreign:
        return (
            f"region {', '.join(foreign)} has no integer product; real execution covers "
            f"{' and '.join(sorted(_INTEGER_REGIONS))}, use 'fake' for the rest"
        )
    if weights is None:
        return "real execution stores integer weights, and the scheme leaves them alone; use 'fake'"
    for fmt in (weights, activations):
        if fmt is not None and fmt.type != "int":
            return f"type {fmt.type} has no integer codes; use 'fake'"
    if weights.bits not in (4, 8):
        return f"weights of {weights.bits} bits have no storage here, 4 and 8 have; use 'fake'"
    if activations is not None and activations.granularity not in ("token", "group"):
        if activations.granularity == "channel":
            return "a scale per input channel cannot be taken out of an integer sum; use 'fake'"
        if not scheme.is_static:
            return "dynamic ranges are per token or group in real execution; use 'fake'"
    if scheme.outlier_threshold is not None:
        return "'outlier_threshold' belongs to backend 'bitsandbytes'"
    return None


def _unknown(scheme: QuantScheme) -> str | None:
    return f"backend {scheme.backend!r} is only a name in imported results"


_REASONS: Mapping[Backend, Callable[[QuantScheme], str | None]] = MappingProxyType(
    {
        "fake": _fake,
        "torch": _torch,
        "bitsandbytes": libraries.bitsandbytes,
        "quanto": libraries.quanto,
        "torchao": libraries.torchao,
    }
)
