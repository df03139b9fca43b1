"""Schemes by name or from YAML, and one line of text about each.

A preset is nothing but a `QuantScheme` constant, so whatever a preset does can be written out in
YAML and changed there. The names are a grammar, see `names.py`. No torch here: listing schemes must
cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from oasis_eval.errors import SpecError, UnknownNameError
from oasis_eval.parsing import parse, read_yaml
from oasis_eval.quant.names import FULL_GRAPH, REFERENCES, explain, scheme_of
from oasis_eval.spec import QuantScheme, TensorFormat

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
    "w8a8-static",
    "w4a4-static",
    "w8a8-smooth",
    "w4a4-smooth",
    "w4a4-rot",
    "w4a4-gptq",
    "w4a4-rot-gptq",
    "w4a16-g128-gptq",
    "w8a8-real",
    "w4a4-real",
    "fp8",
    "mxfp4",
    "nvfp4",
    "llm-int8",
    "nf4",
    "fp4",
    "quanto-w8a8",
    "quanto-w8a16",
    "quanto-w4a16",
    "torchao-w8a8",
)
_TYPES = {
    "fp8_e4m3": "8 bits float e4m3",
    "fp4_e2m1": "4 bits float e2m1",
    "nf4": "4 bits normal float",
    "bnb_fp4": "4 bits float of bitsandbytes",
}


def resolve(name_or_path: str) -> QuantScheme:
    """Return the scheme that a name or a YAML file means.

    Whether it can be run here is another question, see `support.unsupported`.

    Args:
        name_or_path: A preset, any name of the grammar (`w4a8-g64`), or the path of a YAML file
            (it ends in `.yaml` or `.yml`). Names are taken without regard to case.

    Raises:
        UnknownNameError: The name means nothing.
        UnsupportedSchemeError: The parts of the name contradict each other, or one is out of range.
        SpecError: The file is missing or not a scheme.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        return _from_yaml(Path(name_or_path))
    scheme = scheme_of(name_or_path.lower())
    if scheme is None:
        explain(name_or_path.lower())
        raise UnknownNameError("scheme", name_or_path, presets())
    return _described(scheme)


def to_yaml(scheme: QuantScheme) -> str:
    """Return a scheme as the text of a YAML file that `resolve` reads as the same scheme."""
    import yaml

    fields = scheme.model_dump(mode="json", exclude_none=True, exclude={"description"})
    return "# A scheme with settings of its own needs a name of its own, too.\n" + yaml.safe_dump(
        fields, sort_keys=False, default_flow_style=False, allow_unicode=True
    )


def presets() -> Mapping[str, QuantScheme]:
    """Return the schemes that `oasis-eval schemes` lists, by name, in reading order."""
    return MappingProxyType({name: resolve(name) for name in (*REFERENCES, *_LISTED)})


def describe(scheme: QuantScheme) -> str:
    """Return one line that says what `scheme` quantizes and how."""
    if scheme.execution == "none":
        return f"reference in {scheme.dtype}, nothing quantized"
    parts = [_transform(scheme)] if scheme.transforms else []
    parts.append(
        f"weights {_format(scheme.weights, 'output channel')}"
        if scheme.weights
        else "weights in floating point"
    )
    if scheme.activations is not None:
        where = ", ".join(region.replace("_", " ") for region in scheme.regions)
        if set(FULL_GRAPH) <= set(scheme.regions):
            rest = [region for region in scheme.regions if region not in FULL_GRAPH]
            where = ", ".join(["full graph", *(region.replace("_", " ") for region in rest)])
        parts.append(f"{where} {_format(scheme.activations, 'input channel')}")
    else:
        parts.append("activations in floating point")
    if scheme.outlier_threshold is not None:
        parts.append(f"input columns beyond {scheme.outlier_threshold:g} in floating point")
    if scheme.backend == "torch":
        parts.append("integer codes and products")
    elif scheme.backend != "fake":
        parts.append(f"run by {scheme.backend}")
    return "; ".join(parts)


def _transform(scheme: QuantScheme) -> str:
    names = []
    for transform in scheme.transforms:
        if transform.kind == "smooth":
            names.append(f"SmoothQuant (alpha {transform.alpha:g})")
        elif transform.kind == "hadamard":
            names.append("Hadamard rotation" if transform.online else "offline Hadamard rotation")
        else:
            names.append("GPTQ")
    return "after " + " and ".join(names)


def _format(fmt: TensorFormat, channel: str) -> str:
    shared = {"channel": channel, "group": f"group of {fmt.group_size} inputs"}
    ranges = {
        "minmax": "min-max",
        "running_minmax": "static running min-max",
        "percentile": f"percentile {fmt.percentile:g}",
        "mse": "least squared error",
    }
    span = ranges.get(fmt.ranges, fmt.ranges)
    if fmt.ranges == "running_minmax" and fmt.percentile < 100.0:
        span += f" of percentile {fmt.percentile:g}"
    kind = _TYPES.get(fmt.type) or (
        f"{fmt.bits} bits {'symmetric' if fmt.symmetric else 'asymmetric'}"
    )
    scales = {"fp32": "", "e8m0": ", power-of-two scales", "e4m3": ", 8-bit float scales"}
    return f"{kind} per {shared.get(fmt.granularity, fmt.granularity)}{scales[fmt.scales]}, {span}"


def _described(scheme: QuantScheme) -> QuantScheme:
    return scheme.model_copy(update={"description": describe(scheme)})


def _from_yaml(path: Path) -> QuantScheme:
    scheme = parse(QuantScheme, read_yaml(path), origin=str(path))
    named = scheme_of(scheme.name.lower())
    if named is not None:
        fields = {"description", "name"}
        if scheme.model_dump(exclude=fields) != named.model_dump(exclude=fields):
            raise SpecError(
                f"{path}: name {scheme.name!r} is a preset with other settings; "
                "give this scheme a name of its own"
            )
        return _described(named)
    return scheme if scheme.description else _described(scheme)
