"""The coverage report: what was really quantized and what it would take in storage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from oasis_eval.quant.regions import ROWS, RegionSite, is_static
from oasis_eval.quant.targets import Selection, Target, quantizes_inputs
from oasis_eval.record import Coverage, ModuleCoverage
from oasis_eval.spec import QuantScheme, ScaleType, TensorFormat

_SCALE_BITS: Mapping[ScaleType, int] = MappingProxyType({"fp32": 32, "e8m0": 8, "e4m3": 8})
COPY_NOTE = "a copy of the weight is quantized; it is tied to a layer that is not"
_TOP_SCALE_BITS = 32
"""Of the scale above the e4m3 scales of a tensor."""


def weight_bits_stored(num_outputs: int, num_inputs: int, fmt: TensorFormat) -> int:
    """Return the bits that a weight's codes, scales and zero points take in storage.

    Codes are packed without gaps, to whole bytes per weight; a zero point takes a code's width.
    """
    if fmt.granularity == "group":
        assert fmt.group_size is not None
        num_scales = num_outputs * math.ceil(num_inputs / fmt.group_size)
    else:
        num_scales = num_outputs if fmt.granularity == "channel" else 1
    per_scale = _SCALE_BITS[fmt.scales] + (0 if fmt.symmetric else fmt.bits)
    top = _TOP_SCALE_BITS if fmt.scales == "e4m3" else 0
    bits = num_outputs * num_inputs * fmt.bits + num_scales * per_scale + top
    return 8 * math.ceil(bits / 8)


class Size(NamedTuple):
    """What a parameter takes."""

    elements: int
    bits: int
    """All of it."""


Sizes = Mapping[int, Size]
"""By the identity of each parameter, so that tied ones count once."""


class Layer(NamedTuple):
    """A quantized layer in the report."""

    covered: ModuleCoverage
    stored_bits: int | None
    """Bits of its codes and scales; None where the weight is as it was."""
    parameter: int
    """Identity of the weight, a key of the sizes."""
    is_copy: bool
    """Whether that weight stays besides."""


def sizes(parameters: Iterable[Tensor]) -> Sizes:
    """Return what each parameter of a model takes."""
    return {id(p): Size(p.numel(), 8 * p.numel() * p.element_size()) for p in parameters}


def report(scheme: QuantScheme, selection: Selection, parameters: Sequence[Tensor]) -> Coverage:
    """Make the coverage report of a scheme that is carried out to the letter.

    Args:
        scheme: What was applied.
        selection: What it was applied to.
        parameters: Every parameter of the model as it was before, each once.
    """
    layers = []
    for target in selection.targets:
        stored = None
        if scheme.weights is not None:
            stored = weight_bits_stored(*_outputs_and_inputs(target), scheme.weights)
        covered = _covered(target, scheme)
        layers.append(Layer(covered, stored, id(target.weight), target.is_copy))
    for target in selection.embeddings:
        assert scheme.weights is not None
        stored = weight_bits_stored(*_outputs_and_inputs(target), scheme.weights)
        covered = _covered_embedding(target, scheme.weights)
        layers.append(Layer(covered, stored, id(target.weight), target.is_copy))
    sites = [_covered_site(site, scheme) for site in selection.sites]
    return assemble(selection, layers, sizes(parameters), sites=sites)


def assemble(
    selection: Selection,
    layers: Sequence[Layer],
    before: Sizes,
    *,
    sites: Sequence[ModuleCoverage] = (),
) -> Coverage:
    """Make the coverage report of quantized layers.

    Args:
        selection: What was asked for.
        layers: What became of each target.
        before: The model's parameters as they were.
        sites: What became of regions between layers.
    """
    bits_after = {key: size.bits for key, size in before.items()}
    copies = 0
    for layer in layers:
        if layer.stored_bits is None:
            continue
        if layer.is_copy:
            copies += layer.stored_bits
        else:
            bits_after[layer.parameter] = layer.stored_bits
    total = sum(bits_after.values()) + copies
    skipped = [
        ModuleCoverage(module=item.name, quantized=False, reason=item.reason)
        for item in selection.skipped
    ]
    return Coverage(
        modules=(*(layer.covered for layer in layers), *sites, *skipped),
        num_linear=selection.num_linear,
        num_quantized=sum(layer.covered.region != "embedding" for layer in layers),
        num_sites=len(sites),
        absent_regions=selection.absent,
        effective_weight_bits=total / sum(size.elements for size in before.values()),
        bytes_before=sum(size.bits for size in before.values()) // 8,
        bytes_after=total // 8,
    )


def _outputs_and_inputs(target: Target) -> tuple[int, int]:
    first, second = target.weight.shape
    return (second, first) if target.is_transposed else (first, second)


def _group(fmt: TensorFormat | None, width: int) -> int | None:
    """Return the group size really used on rows of `width`."""
    return None if fmt is None or fmt.group_size is None else min(fmt.group_size, width)


def _covered(target: Target, scheme: QuantScheme) -> ModuleCoverage:
    weights, activations = scheme.weights, scheme.activations
    num_outputs, num_inputs = _outputs_and_inputs(target)
    width = num_inputs if quantizes_inputs(scheme, target.region) else num_outputs
    notes = []
    if target.is_copy and weights is not None:
        notes.append(COPY_NOTE)
    for what, group, row in (
        ("weight", _group(weights, num_inputs), num_inputs),
        ("activation", _group(activations, width), width),
    ):
        if group is not None and row % group:
            notes.append(f"last {what} group has {row % group} of {group}")
    return ModuleCoverage(
        module=target.name,
        quantized=True,
        region=None if target.region == "linear_inputs" else target.region,
        note="; ".join(notes) or None,
        weight_bits=weights.bits if weights else None,
        weight_granularity=weights.granularity if weights else None,
        weight_group_size=_group(weights, num_inputs),
        activation_bits=activations.bits if activations else None,
        activation_granularity=activations.granularity if activations else None,
        activation_group_size=_group(activations, width),
        activation_static=scheme.is_static if activations else None,
    )


def _covered_embedding(target: Target, weights: TensorFormat) -> ModuleCoverage:
    _, width = target.weight.shape
    group = _group(weights, width)
    notes = [COPY_NOTE] if target.is_copy else []
    if group is not None and width % group:
        notes.append(f"last weight group has {width % group} of {group}")
    return ModuleCoverage(
        module=target.name,
        quantized=True,
        region="embedding",
        note="; ".join(notes) or None,
        weight_bits=weights.bits,
        weight_granularity=weights.granularity,
        weight_group_size=group,
    )


def _covered_site(site: RegionSite, scheme: QuantScheme) -> ModuleCoverage:
    fmt = scheme.activations
    assert fmt is not None
    static = is_static(site.region, scheme)
    row = None if static else ROWS.get(site.region)
    grouped = fmt.granularity == "group" and row is None
    return ModuleCoverage(
        module=site.name,
        quantized=True,
        region=site.region,
        note=row and f"one range per {row}",
        activation_bits=fmt.bits,
        activation_granularity=fmt.granularity if static or grouped else "token",
        activation_group_size=fmt.group_size if grouped else None,
        activation_static=static,
    )
