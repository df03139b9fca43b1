"""Schemes by name or from YAML, and the names that are known but cannot be run yet.

A preset is nothing but a `QuantScheme` constant, so whatever a preset does can be written out in
YAML and changed there. Names follow a grammar, `w<weight bits>a<activation bits>` and a suffix, so
that `w5a7-g64` needs no entry anywhere. No torch here: listing schemes must cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from oasis_eval.errors import SpecError, UnknownNameError, UnsupportedSchemeError
from oasis_eval.parsing import parse, read_yaml
from oasis_eval.spec import Calibration, Dtype, QuantScheme, TensorFormat

RUNNABLE_REGIONS = ("linear_inputs", "linear_outputs", "lm_head")
"""Regions that fake quantization covers; the others are inside attention or between layers."""

_GRAMMAR = re.compile(
    r"w(?P<weights>[2-8]|16)a(?P<activations>[2-8]|16)"
    r"(?:-g(?P<group>[1-9][0-9]{0,5}))?(?P<suffix>-[a-z-]+)?"
)
_REFERENCES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")
_LISTED = (
    "w8a8",
    "w6a6",
    "w4a8",
    "w4a4",
    "w8a16",
    "w4a16",
    "w8a8-g128",
    "w4a8-g128",
    "w4a4-g128",
    "w4a16-g128",
    "w8a8-static-linear",
    "w4a4-static-linear",
)
_REFUSED_FORMATS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "nf4": ("4-bit normal-float weights (bitsandbytes)", "w4a16-g128"),
        "fp4": ("4-bit float weights (bitsandbytes)", "w4a16-g128"),
        "llm-int8": ("8-bit weights and activations with an outlier split (bitsandbytes)", "w8a8"),
        "fp8": ("8-bit float weights and activations", "w8a8"),
        "mxfp4": ("4-bit floats in blocks of 32 with power-of-two scales", "w4a4-g32"),
        "nvfp4": ("4-bit floats in blocks of 16 with 8-bit float scales", "w4a4-g16"),
    }
)
_REFUSED_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {
        "static": "static ranges over the full graph (attention internals, residual, depth)",
        "smooth": "quantization after SmoothQuant",
        "rot": "quantization after a Hadamard rotation",
        "gptq": "GPTQ weights",
        "real": "real execution (integer codes and integer products)",
    }
)


def resolve(name_or_path: str) -> QuantScheme:
    """Return the scheme that a name or a YAML file means.

    Args:
        name_or_path: A preset, any name of the grammar (`w4a8-g64`), or the path of a YAML file
            (it ends in `.yaml` or `.yml`). Names are taken without regard to case.

    Raises:
        UnknownNameError: The name means nothing.
        UnsupportedSchemeError: The scheme is known and this version cannot run it.
        SpecError: The file is missing or not a scheme.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        return _from_yaml(Path(name_or_path))
    name = name_or_path.lower()
    scheme = _from_name(name)
    if scheme is not None:
        return scheme
    reason = refused().get(name) or _refused_by_grammar(name)
    if reason is not None:
        raise UnsupportedSchemeError(reason)
    raise UnknownNameError("scheme", name_or_path, [*presets(), *refused()])


def presets() -> Mapping[str, QuantScheme]:
    """Return the schemes that `oasis-eval schemes` lists, by name, in reading order."""
    schemes = {}
    for name in (*_REFERENCES, *_LISTED):
        scheme = _from_name(name)
        assert scheme is not None
        schemes[name] = scheme
    return MappingProxyType(schemes)


def refused() -> Mapping[str, str]:
    """Return the known names that this version cannot run, each with its one-line reason."""
    reasons = {name: _refused_format(name) for name in _REFUSED_FORMATS}
    for base in ("w8a8", "w4a4"):
        for suffix in _REFUSED_SUFFIXES:
            reasons[f"{base}-{suffix}"] = _refused_suffix(base, "", [suffix])
    return MappingProxyType(reasons)


def refusal(scheme: QuantScheme) -> str | None:
    """Return why fake quantization cannot run `scheme`, or None if it can.

    A reference scheme (execution `none`) quantizes nothing and is never refused.
    """
    if scheme.execution == "none":
        return None
    if scheme.execution == "real":
        return f"scheme {scheme.name!r}: real execution cannot be run by this version; use 'fake'"
    if scheme.backend != "fake":
        return (
            f"scheme {scheme.name!r}: backend {scheme.backend!r} cannot be run by this version; "
            "use 'fake'"
        )
    foreign = [region for region in scheme.regions if region not in RUNNABLE_REGIONS]
    if foreign:
        return (
            f"scheme {scheme.name!r}: region {', '.join(foreign)} cannot be quantized by this "
            f"version; it can do {', '.join(RUNNABLE_REGIONS)}"
        )
    return None


def describe(scheme: QuantScheme) -> str:
    """Return one line that says what `scheme` quantizes and how."""
    if scheme.execution == "none":
        return f"reference in {scheme.dtype}, nothing quantized"
    parts = [
        f"weights {_format(scheme.weights, 'output channel')}"
        if scheme.weights
        else "weights in floating point"
    ]
    if scheme.activations is not None:
        where = ", ".join(region.replace("_", " ") for region in scheme.regions)
        parts.append(f"{where} {_format(scheme.activations, 'input channel')}")
    else:
        parts.append("activations in floating point")
    return "; ".join(parts)


def _format(fmt: TensorFormat, channel: str) -> str:
    shared = {"channel": channel, "group": f"group of {fmt.group_size} inputs"}
    ranges = {
        "minmax": "min-max",
        "running_minmax": "static running min-max",
        "percentile": f"percentile {fmt.percentile:g}",
        "mse": "least squared error",
    }
    return (
        f"{fmt.bits} bits {'symmetric' if fmt.symmetric else 'asymmetric'} per "
        f"{shared.get(fmt.granularity, fmt.granularity)}, {ranges.get(fmt.ranges, fmt.ranges)}"
    )


def _from_name(name: str) -> QuantScheme | None:
    """Build the scheme of a runnable name; None if the name is unknown or refused."""
    for dtype in _REFERENCES:
        if name == dtype:
            return _described(QuantScheme(name=name, backend="none", execution="none", dtype=dtype))
    match = _GRAMMAR.fullmatch(name)
    if match is None or match["suffix"] not in (None, "-static-linear"):
        return None
    weight_bits, activation_bits = int(match["weights"]), int(match["activations"])
    group = int(match["group"]) if match["group"] else None
    if match["suffix"] is None:
        if weight_bits == activation_bits == 16:
            return None
        granularity: Literal["group"] | None = "group" if group else None
        weights = TensorFormat(
            bits=min(weight_bits, 8), granularity=granularity or "channel", group_size=group
        )
        activations = TensorFormat(
            bits=min(activation_bits, 8),
            granularity=granularity or "token",
            group_size=group,
            ranges="dynamic",
        )
        calibration = None
    else:
        if group or activation_bits == 16:
            return None
        weights = TensorFormat(bits=min(weight_bits, 8), granularity="tensor")
        activations = TensorFormat(
            bits=activation_bits, granularity="tensor", symmetric=False, ranges="running_minmax"
        )
        calibration = Calibration(num_batches=4)
    scheme = QuantScheme(
        name=name,
        weights=weights if weight_bits < 16 else None,
        activations=activations if activation_bits < 16 else None,
        calibration=calibration,
    )
    return _described(scheme)


def _described(scheme: QuantScheme) -> QuantScheme:
    return scheme.model_copy(update={"description": describe(scheme)})


def _refused_format(name: str) -> str:
    what, nearest = _REFUSED_FORMATS[name]
    return f"scheme {name!r}: {what} cannot be run by this version; the nearest is {nearest!r}"


def _refused_suffix(base: str, group: str, suffixes: list[str]) -> str:
    name = "-".join([base + group, *suffixes])
    what = " and ".join(_REFUSED_SUFFIXES[suffix] for suffix in suffixes)
    nearest = f"{base}-static-linear" if suffixes == ["static"] and not group else base + group
    return f"scheme {name!r}: {what} cannot be run by this version; the nearest is {nearest!r}"


def _refused_by_grammar(name: str) -> str | None:
    """Return why a well-formed name is refused, or None if it is not well formed."""
    match = _GRAMMAR.fullmatch(name)
    if match is None:
        return None
    base = f"w{match['weights']}a{match['activations']}"
    group = f"-g{match['group']}" if match["group"] else ""
    suffix = match["suffix"] or ""
    if base == "w16a16":
        return f"scheme {name!r}: it quantizes nothing; use 'fp32', 'bf16' or 'fp16'"
    if suffix == "-static-linear":
        if group:
            return f"scheme {name!r}: static ranges have no groups; use '{base}-static-linear'"
        return f"scheme {name!r}: static ranges need activations of 2 to 8 bits; use {base!r}"
    suffixes = suffix.removeprefix("-").split("-")
    if suffixes and all(item in _REFUSED_SUFFIXES for item in suffixes):
        return _refused_suffix(base, group, suffixes)
    return None


def _from_yaml(path: Path) -> QuantScheme:
    scheme = parse(QuantScheme, read_yaml(path), origin=str(path))
    preset = _from_name(scheme.name)
    if preset is not None:
        fields = {"description"}
        if scheme.model_dump(exclude=fields) != preset.model_dump(exclude=fields):
            raise SpecError(
                f"{path}: name {scheme.name!r} is a preset with other settings; "
                "give this scheme a name of its own"
            )
        return preset
    reason = refusal(scheme)
    if reason is not None:
        raise UnsupportedSchemeError(f"{path}: {reason}")
    return scheme if scheme.description else _described(scheme)
