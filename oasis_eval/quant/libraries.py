"""What bitsandbytes, optimum-quanto and torchao cannot do, and whether they are installed.

No torch here, and none of the libraries is imported; see `support.py`.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Mapping
from types import MappingProxyType

from oasis_eval.spec import Backend, QuantScheme, Region

PACKAGES: Mapping[Backend, str] = MappingProxyType(
    {"bitsandbytes": "bitsandbytes", "quanto": "optimum-quanto", "torchao": "torchao"}
)
"""What each backend that is another library is called by pip."""
_BITSANDBYTES_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_QUANTO_GROUP = 128
_QUANTO_MOMENTUM = 0.9
_REGIONS: frozenset[Region] = frozenset({"linear_inputs", "lm_head"})


def bitsandbytes(scheme: QuantScheme) -> str | None:
    """Return why bitsandbytes cannot run a scheme."""
    reason = _library(scheme, "bitsandbytes", "pip install bitsandbytes")
    weights, activations = scheme.weights, scheme.activations
    if reason is not None or weights is None:
        return reason or "bitsandbytes quantizes activations with int8 weights only ('llm-int8')"
    if weights.bits == 4:
        if activations is not None:
            return (
                "bitsandbytes has no product of 4-bit weights and quantized activations; use "
                "'nf4' or 'fp4' (activations in floating point) or 'w4a4-real'"
            )
        if weights.type not in ("nf4", "bnb_fp4") or weights.granularity != "group":
            return "4-bit weights of bitsandbytes are types nf4 and bnb_fp4, in groups"
        if weights.group_size not in _BITSANDBYTES_BLOCKS:
            known = ", ".join(str(size) for size in _BITSANDBYTES_BLOCKS)
            return f"bitsandbytes has groups of {known}, found {weights.group_size}"
        if scheme.outlier_threshold is not None:
            return "'outlier_threshold' is for int8 weights"
        return None
    if activations is None:
        return "int8 weights of bitsandbytes go with int8 activations: use 'llm-int8'"
    return _int8(scheme, "bitsandbytes") or _dynamic_per_token(scheme, "bitsandbytes")


def quanto(scheme: QuantScheme) -> str | None:
    """Return why optimum-quanto cannot run a scheme."""
    reason = _library(scheme, "optimum-quanto", "pip install optimum-quanto")
    weights, activations = scheme.weights, scheme.activations
    if reason is not None or weights is None:
        return reason or "optimum-quanto quantizes activations with int8 weights only"
    if scheme.outlier_threshold is not None:
        return "'outlier_threshold' belongs to backend 'bitsandbytes'"
    if weights.bits == 4:
        if activations is not None:
            return (
                "optimum-quanto has no integer product with 4-bit weights (it would multiply in "
                "floating point); use 'quanto-w4a16', or a fake or real scheme of this width"
            )
        if weights.type != "int" or weights.symmetric or weights.ranges != "minmax":
            return "4-bit weights of optimum-quanto are asymmetric min-max integers"
        if weights.granularity != "group" or weights.group_size != _QUANTO_GROUP:
            return f"4-bit weights of optimum-quanto are in groups of {_QUANTO_GROUP}"
        missing = [name for name in ("ninja", "g++") if shutil.which(name) is None]
        if missing:
            return (
                "optimum-quanto compiles C++ for 4-bit weights at first use, which needs "
                f"{' and '.join(missing)} on PATH: install it"
            )
        return None
    if activations is None:
        return _int8(scheme, "optimum-quanto")
    static = (activations.granularity, activations.ranges) == ("tensor", "running_minmax")
    if not static or activations.momentum != _QUANTO_MOMENTUM or activations.percentile < 100:
        return (
            "activations of optimum-quanto are per tensor, static, running min-max with momentum "
            f"{_QUANTO_MOMENTUM:g}"
        )
    return _int8(scheme, "optimum-quanto")


def torchao(scheme: QuantScheme) -> str | None:
    """Return why torchao cannot run a scheme."""
    reason = _library(scheme, "torchao", "pip install 'oasis-eval[torchao]'")
    if reason is not None:
        return reason
    if scheme.outlier_threshold is not None:
        return "'outlier_threshold' belongs to backend 'bitsandbytes'"
    if scheme.weights is None or scheme.activations is None:
        return "this version runs int8 weights with int8 activations of torchao: 'torchao-w8a8'"
    return _int8(scheme, "torchao") or _dynamic_per_token(scheme, "torchao")


def _library(scheme: QuantScheme, package: str, install: str) -> str | None:
    """Return what stands in the way of any scheme of a library, its absence included."""
    if scheme.execution != "real":
        return f"backend {scheme.backend!r} has execution 'real' only"
    if any(transform.kind == "gptq" for transform in scheme.transforms):
        return f"GPTQ decides the codes itself, and {package} takes none; use 'fake' or 'torch'"
    foreign = [region for region in scheme.regions if region not in _REGIONS]
    if foreign:
        return f"{package} does not quantize region {', '.join(foreign)}"
    if not _is_installed(package):
        return f"package {package!r} is not installed; run: {install}"
    return None


def _is_installed(package: str) -> bool:
    # By its metadata: looking for a module inside a package would import that package.
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _int8(scheme: QuantScheme, package: str) -> str | None:
    """Refuse whatever is not symmetric int8, weights by min-max per output channel."""
    for what, fmt in (("weights", scheme.weights), ("activations", scheme.activations)):
        if fmt is not None and (fmt.type, fmt.bits, fmt.symmetric) != ("int", 8, True):
            sign = "" if fmt.symmetric else "asymmetric "
            return f"{package} has no {sign}{fmt.bits}-bit {what} of type {fmt.type} here"
    weights = scheme.weights
    if weights is not None and (weights.granularity, weights.ranges) != ("channel", "minmax"):
        return f"int8 weights of {package} are min-max per output channel"
    return None


def _dynamic_per_token(scheme: QuantScheme, package: str) -> str | None:
    activations = scheme.activations
    if activations is None or (activations.granularity, activations.ranges) != ("token", "dynamic"):
        return f"activations of {package} are dynamic per token"
    return None
