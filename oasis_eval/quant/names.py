"""The grammar of scheme names: every name means one `QuantScheme`, and no table lists them all.

    w4a8-g128-smooth-rot-gptq-real
    |    |    |               |
    |    |    |               execution: integer codes and products instead of fake quantization
    |    |    what is done to the model before: smooth (or smooth0.75), rot, gptq
    |    groups of inputs; or static, static-linear
    bits of weights and activations; or fp8, mxfp4, nvfp4

and what other libraries run: `llm-int8`, `nf4`, `fp4` (bitsandbytes), `quanto-w8a8`,
`torchao-w8a8`. No torch here: listing schemes must cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from oasis_eval.errors import UnsupportedSchemeError
from oasis_eval.spec import (
    Backend,
    Calibration,
    Dtype,
    Gptq,
    Hadamard,
    QuantScheme,
    Region,
    SmoothQuant,
    TensorFormat,
    Transform,
)

REFERENCES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")
FULL_GRAPH: tuple[Region, ...] = (
    "linear_inputs",
    "linear_outputs",
    "attention_scores",
    "attention_probs",
    "attention_context",
    "attention_gate",
    "kv_cache",
    "depth_router",
    "depth_sources",
    "residual",
    "embedding",
)
"""Everything but the head, the depth weights and the query vectors of depth routers."""
GRAMMAR = "wXaY[-gN | -static | -static-linear][-smooth][-rot][-gptq][-real]"
"""For messages and help."""

_NAME = re.compile(
    r"(?:(?P<library>bnb|quanto|torchao)-)?"
    r"(?:w(?P<weights>[2-8]|16)a(?P<activations>[2-8]|16)|(?P<float>fp8|mxfp4|nvfp4))"
    r"(?:-g(?P<group>[1-9][0-9]{0,5}))?(?P<static>-static(?:-linear)?)?"
    r"(?P<smooth>-smooth(?P<alpha>0\.[0-9]{1,3})?)?(?P<rot>-rot)?(?P<gptq>-gptq)?(?P<real>-real)?"
)
_BITSANDBYTES = re.compile(
    r"(?P<base>llm-int8|nf4|fp4)(?P<smooth>-smooth(?P<alpha>0\.[0-9]{1,3})?)?(?P<rot>-rot)?"
)
_LIBRARIES: dict[str, Backend] = {"bnb": "bitsandbytes", "quanto": "quanto", "torchao": "torchao"}
_OUTLIER_THRESHOLD = 6.0


def scheme_of(name: str) -> QuantScheme | None:
    """Return the scheme that a lower-case name means, without a description; None: it means none.

    Raises:
        UnsupportedSchemeError: The name is well formed and its parts contradict each other.
    """
    for dtype in REFERENCES:
        if name == dtype:
            return QuantScheme(name=name, backend="none", execution="none", dtype=dtype)
    own = _BITSANDBYTES.fullmatch(name)
    if own is not None:
        return _bitsandbytes(name, own)
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    _check(name, match)
    weights, activations = _formats(match)
    transforms = tuple(_transforms(match))
    library = _LIBRARIES.get(match["library"] or "")
    is_static = bool(match["static"]) or (library == "quanto" and activations is not None)
    needs_text = is_static or any(item.kind != "hadamard" for item in transforms)
    is_real = library is not None or bool(match["real"])
    return QuantScheme(
        name=name,
        backend=library or ("torch" if is_real else "fake"),
        execution="real" if is_real else "fake",
        weights=weights,
        activations=activations,
        regions=FULL_GRAPH if match["static"] == "-static" else ("linear_inputs",),
        calibration=Calibration(num_batches=4) if needs_text else None,
        transforms=transforms,
    )


def _bitsandbytes(name: str, match: re.Match[str]) -> QuantScheme:
    """Return a scheme that has the library's own name."""
    transforms = tuple(_transforms(match))
    if match["base"] == "llm-int8":
        return QuantScheme(
            name=name,
            backend="bitsandbytes",
            execution="real",
            weights=TensorFormat(bits=8, granularity="channel"),
            activations=TensorFormat(bits=8, granularity="token", ranges="dynamic"),
            outlier_threshold=_OUTLIER_THRESHOLD,
            calibration=Calibration(num_batches=4) if match["smooth"] else None,
            transforms=transforms,
        )
    if match["smooth"]:
        raise UnsupportedSchemeError(
            f"scheme {name!r}: SmoothQuant is for activations, which it leaves alone; use "
            f"{match['base']!r}"
        )
    return QuantScheme(
        name=name,
        backend="bitsandbytes",
        execution="real",
        weights=TensorFormat(
            type="nf4" if match["base"] == "nf4" else "bnb_fp4",
            bits=4,
            granularity="group",
            group_size=64,
        ),
        transforms=transforms,
    )


def explain(name: str) -> None:
    """Refuse a name that means nothing and is nearly one, with what is wrong about it.

    Raises:
        UnsupportedSchemeError: It is.
    """
    found = None
    library = re.fullmatch(r"(llm-int8|nf4|fp4)-(smooth|rot|gptq|real|static).*", name)
    widths = re.match(r"w(\d+)a(\d+)(?:-|$)", name)
    if library:
        found = f"{library[1]} takes -smooth and -rot, in this order; use {library[1]!r}"
    elif widths and not {widths[1], widths[2]} <= {*"2345678", "16"}:
        found = "weights and activations have 2 to 8 bits, or 16 for floating point"
    elif re.search(r"-(gptq.*-(rot|smooth)|rot.*-smooth)", name):
        found = "transforms come in the order smooth, rot, gptq"
    elif re.search(r"-smooth(0|1)(\.[0-9]*)?(-|$)", name):
        found = "alpha is written 0.1 to 0.999, as in smooth0.75; YAML takes 0 and 1 too"
    elif not widths and re.match(r"w\d+(a\d*)?(-|$)", name):
        found = f"expected {GRAMMAR}, such as w4a8"
    if found is not None:
        raise UnsupportedSchemeError(f"scheme {name!r}: {found}")


def _check(name: str, match: re.Match[str]) -> None:
    """Refuse a name whose parts contradict each other."""
    base = name.split("-", 1)[0] if not match["library"] else "-".join(name.split("-")[:2])
    found = None
    if match["weights"] == match["activations"] == "16":
        found = "it quantizes nothing; use 'fp32', 'bf16' or 'fp16'"
    elif match["static"] and match["group"]:
        found = f"static ranges have no groups; use '{base}{match['static']}'"
    elif match["static"] and match["activations"] == "16":
        found = f"static ranges need activations of 2 to 8 bits; use {base!r}"
    elif match["static"] and match["float"]:
        found = f"static ranges need an integer format; use {base!r}"
    elif match["group"] and match["float"] in ("mxfp4", "nvfp4"):
        found = f"its groups are part of the format; use {base!r}"
    elif match["gptq"] and match["weights"] == "16":
        found = f"GPTQ rounds weights, which it leaves alone; use {base!r}"
    elif match["smooth"] and match["activations"] == "16":
        found = f"SmoothQuant is for activations, which it leaves alone; use {base!r}"
    elif match["real"] and match["library"]:
        found = f"{match['library']} is real execution anyway; use {name.removesuffix('-real')!r}"
    if found is not None:
        raise UnsupportedSchemeError(f"scheme {name!r}: {found}")


def _formats(match: re.Match[str]) -> tuple[TensorFormat | None, TensorFormat | None]:
    """Return the formats of weights and activations."""
    if match["float"] == "fp8":
        group = int(match["group"]) if match["group"] else None
        weights = TensorFormat(
            type="fp8_e4m3",
            bits=8,
            granularity="group" if group else "channel",
            group_size=group,
        )
        granularity = "group" if group else "token"
        return weights, weights.model_copy(update={"granularity": granularity, "ranges": "dynamic"})
    if match["float"]:
        is_mx = match["float"] == "mxfp4"
        weights = TensorFormat(
            type="fp4_e2m1",
            bits=4,
            granularity="group",
            group_size=32 if is_mx else 16,
            scales="e8m0" if is_mx else "e4m3",
        )
        return weights, weights.model_copy(update={"ranges": "dynamic"})
    return _weight_format(match), _activation_format(match)


def _weight_format(match: re.Match[str]) -> TensorFormat | None:
    bits = int(match["weights"])
    if bits == 16:
        return None
    if match["static"]:
        return TensorFormat(bits=bits, granularity="tensor")
    group = int(match["group"]) if match["group"] else None
    if match["library"] == "quanto" and bits == 4:
        return TensorFormat(bits=4, granularity="group", group_size=group or 128, symmetric=False)
    return TensorFormat(bits=bits, granularity="group" if group else "channel", group_size=group)


def _activation_format(match: re.Match[str]) -> TensorFormat | None:
    bits = int(match["activations"])
    if bits == 16:
        return None
    if match["library"] == "quanto":
        return TensorFormat(bits=bits, granularity="tensor", ranges="running_minmax")
    if match["static"]:
        return TensorFormat(
            bits=bits,
            granularity="tensor",
            symmetric=False,
            ranges="running_minmax",
            percentile=99.999 if match["static"] == "-static" else 100.0,
        )
    group = int(match["group"]) if match["group"] else None
    return TensorFormat(
        bits=bits, granularity="group" if group else "token", group_size=group, ranges="dynamic"
    )


def _transforms(match: re.Match[str]) -> Iterator[Transform]:
    if match["smooth"]:
        yield SmoothQuant(alpha=float(match["alpha"])) if match["alpha"] else SmoothQuant()
    if match["rot"]:
        yield Hadamard()
    if match.groupdict().get("gptq"):
        yield Gptq()
