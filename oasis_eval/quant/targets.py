"""Which layers of a model a scheme covers, and why the others are left alone.

Layers are found by type, never by name, and the LM head by asking the model for its output
embeddings. Whatever multiplies activations by weights and is not a plain Linear (raw expert
tensors, subclasses with a forward pass of their own) is refused unless the scheme skips it: a
"4-bit" model of which most is not quantized must be somebody's decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple, NoReturn

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oasis_eval.errors import QuantizationError, SpecError, UnsupportedSchemeError
from oasis_eval.quant.mixtures import Mixtures, mixtures_of
from oasis_eval.quant.regions import EVERYWHERE, RegionSite, running_taps, tap_sites
from oasis_eval.spec import QuantScheme, Region

_NEVER_ABSENT: frozenset[Region] = frozenset(
    {"linear_inputs", "linear_outputs", "lm_head", "embedding"}
)
_LARGEST_RAW_SHARE = 0.25
"""Elements of raw weights over those of linear layers; positions and the like are well below."""


class Target(NamedTuple):
    """A layer to quantize."""

    name: str
    module: nn.Module
    is_copy: bool
    """Whether something that stays in floating point (the embedding of a tied head) uses the same
    weight, so that a copy of it is quantized."""
    region: Region = "linear_inputs"
    """`linear_inputs` for ordinary layers; small projections, embeddings and the head differ."""

    @property
    def weight(self) -> Tensor:
        """The layer's weight as it is stored: [N, K], for Conv1D [K, N]."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is stored as [inputs, outputs]."""
        return isinstance(self.module, Conv1D)


class Skipped(NamedTuple):
    """A layer, embedding or raw weight that is left in floating point."""

    name: str
    reason: str


class Selection(NamedTuple):
    """What a scheme means for a model."""

    targets: tuple[Target, ...]
    skipped: tuple[Skipped, ...]
    num_linear: int
    """Linear and Conv1D layers, the LM head included."""
    embeddings: tuple[Target, ...] = ()
    """Embeddings whose weights are quantized."""
    sites: tuple[RegionSite, ...] = ()
    """Where activations are quantized outside of layers."""
    absent: tuple[Region, ...] = ()
    """Regions of the scheme that the model does not have."""


def select(model: nn.Module, scheme: QuantScheme) -> Selection:
    """Decide for every layer and region of `model` whether `scheme` quantizes it.

    Where the scheme names regions outside of layers, a few tokens are run through the model.

    Raises:
        SpecError: A skip pattern matches nothing.
        UnsupportedSchemeError: A region that every transformer has cannot be found in this one.
        QuantizationError: A layer can be neither quantized nor left alone silently, or nothing
            would be quantized at all.
    """
    modules = dict(model.named_modules())
    linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear | Conv1D)}
    embeddings = {name: m for name, m in modules.items() if isinstance(m, nn.Embedding)}
    raw = dict(_raw_weights(model))
    # Without a format for activations there is nothing to quantize between layers.
    regions = scheme.regions if scheme.activations is not None else ()
    taps = [tap for tap in tap_sites(model) if tap.region in regions]
    names = [*linears, *raw, *(tap.name for tap in taps)]
    _check_patterns(scheme, names + list(embeddings if "embedding" in scheme.regions else ()))
    head = _head(model, linears)
    mixtures = mixtures_of(model)
    region_of: dict[str, Region] = {
        name: "lm_head" if module is head else _region_of(module, mixtures)
        for name, module in linears.items()
    }
    covered: dict[str, nn.Module] = {}
    skipped = []
    for name, module in linears.items():
        region = region_of[name]
        reason = _skip_reason(name, region, scheme)
        if reason is None and id(module) in mixtures.routing:
            reason = "router of experts, or a part of one"
        if reason is None:
            _refuse_foreign(name, module)
            covered[name] = module
        else:
            skipped.append(Skipped(name, reason))
    skipped += _skipped_raw(raw, scheme, mixtures, list(linears.values()))
    tables: dict[str, nn.Module] = {}
    for name, module in embeddings.items():
        reason = _embedding_reason(name, scheme)
        if reason is None:
            tables[name] = module
        else:
            skipped.append(Skipped(name, reason))
    for name, module in modules.items():
        if isinstance(module, nn.modules.conv._ConvNd):
            skipped.append(Skipped(name, "convolution, not a Linear"))
    sites = _sites(model, scheme, taps)
    skipped += sites.skipped
    present = sites.present | set(region_of.values()) | _NEVER_ABSENT
    absent = tuple(region for region in scheme.regions if region not in present)
    _refuse_missing(model, scheme, absent)
    if not (covered or tables or sites.chosen):
        _refuse_nothing(scheme, len(linears), skipped, absent)
    others = _weights_of_others(model, [*covered.values(), *tables.values()])
    return Selection(
        tuple(
            Target(name, m, id(m.weight) in others, region_of[name]) for name, m in covered.items()
        ),
        tuple(skipped),
        len(linears),
        tuple(Target(name, m, id(m.weight) in others, "embedding") for name, m in tables.items()),
        tuple(sites.chosen),
        absent,
    )


def quantizes_inputs(scheme: QuantScheme, region: Region) -> bool:
    """Return whether activations are quantized where they enter a covered layer of `region`.

    Only ordinary layers have a region of their own for either side: the head, gates and routers
    are weights and input wherever they are named.
    """
    outputs_alone = "linear_outputs" in scheme.regions and "linear_inputs" not in scheme.regions
    return scheme.activations is not None and not (region == "linear_inputs" and outputs_alone)


def quantizes_outputs(scheme: QuantScheme, region: Region) -> bool:
    """Return whether activations are quantized where they leave a covered layer of `region`."""
    return (
        scheme.activations is not None
        and region == "linear_inputs"
        and "linear_outputs" in scheme.regions
    )


def _head(model: nn.Module, linears: dict[str, nn.Module]) -> nn.Module | None:
    """Return the LM head as the model itself names it.

    Raises:
        QuantizationError: The model does not say, and a layer looks like one.
    """
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    if isinstance(head, nn.Module):
        return head
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    for name, module in linears.items():
        if vocabulary is not None and getattr(module, "out_features", None) == vocabulary:
            raise QuantizationError(
                f"{name}: looks like the LM head ({vocabulary} outputs), but the model's "
                "get_output_embeddings() does not return it, so it cannot be protected"
            )
    return None


def _raw_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters of two or more dimensions that no known kind of layer owns."""
    known = nn.Linear | Conv1D | nn.Embedding | nn.modules.conv._ConvNd
    for prefix, module in model.named_modules():
        if not isinstance(module, known):
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.dim() >= 2:
                    yield name, parameter


def _skipped_raw(
    raw: dict[str, nn.Parameter],
    scheme: QuantScheme,
    mixtures: Mixtures,
    linears: list[nn.Module],
) -> Iterator[Skipped]:
    left: dict[str, int] = {}
    for name, parameter in raw.items():
        shape = "x".join(str(size) for size in parameter.shape)
        pattern = _matching(name, scheme)
        if pattern is not None:
            yield Skipped(name, f"skip pattern {pattern!r} (raw weight of {shape})")
        elif parameter.dim() == 3 or id(parameter) in mixtures.experts:
            raise QuantizationError(
                f"{name}: a raw {shape} weight (experts in one tensor), which this version cannot "
                f"quantize; add {name!r} or a pattern to the scheme's 'skip' to leave it in "
                "floating point"
            )
        else:
            left[name] = parameter.numel()
            yield Skipped(name, f"raw weight of {shape}, not a Linear")
    share = sum(left.values()) / max(1, sum(_numel(module) for module in linears))
    if linears and share > _LARGEST_RAW_SHARE:
        raise QuantizationError(
            f"{max(left, key=left.__getitem__)} and {len(left) - 1} more raw weights are no Linear "
            f"and have {share:.0%} as many elements as all linear layers, too many to be left out "
            "silently; add patterns to the scheme's 'skip' to leave them in floating point"
        )


def _numel(module: nn.Module) -> int:
    return module.weight.numel()  # type: ignore[operator]  # a Linear's weight


class _Sites(NamedTuple):
    """The places of a scheme's regions outside of layers."""

    chosen: list[RegionSite]
    skipped: list[Skipped]
    present: set[Region]
    """Regions that the model has, skipped or not."""


def _sites(model: nn.Module, scheme: QuantScheme, taps: list[RegionSite]) -> _Sites:
    running = running_taps(model, taps)
    sites = _Sites([], [], {tap.region for tap in taps if tap.name in running})
    for tap in taps:
        pattern = _matching(tap.name, scheme)
        if tap.name not in running:
            if tap.region in sites.present:
                sites.skipped.append(Skipped(tap.name, "nothing passes here in this model"))
        elif pattern is not None:
            sites.skipped.append(Skipped(tap.name, f"skip pattern {pattern!r}"))
        else:
            sites.chosen.append(tap)
    return sites


def _region_of(module: nn.Module, mixtures: Mixtures) -> Region:
    if id(module) in mixtures.gates:
        return "attention_gate"
    region: Region = getattr(module, "quantization_region", "linear_inputs")
    return region


def _refuse_missing(model: nn.Module, scheme: QuantScheme, absent: tuple[Region, ...]) -> None:
    missing = [region for region in absent if region in EVERYWHERE]
    if missing:
        raise UnsupportedSchemeError(
            f"scheme {scheme.name!r}: region {', '.join(missing)} cannot be reached in "
            f"{type(model).__name__}, which has no taps there: loading.prepare adds them where it "
            "knows the model; else leave it out of 'regions'"
        )


def _refuse_nothing(
    scheme: QuantScheme, num_linear: int, skipped: list[Skipped], absent: tuple[Region, ...]
) -> NoReturn:
    reasons = [f"the model has no {region}" for region in absent]
    reasons += [f"{item.name}: {item.reason}" for item in skipped]
    raise QuantizationError(
        f"scheme {scheme.name!r} would quantize none of {num_linear} linear layers"
        + (f" ({'; '.join(reasons[:3])})" if reasons else "")
    )


def _weights_of_others(model: nn.Module, chosen: list[nn.Module]) -> set[int]:
    """Return the parameters that something outside of `chosen` uses."""
    quantized = {id(module) for module in chosen}
    return {
        id(parameter)
        for module in model.modules()
        if id(module) not in quantized
        for parameter in module.parameters(recurse=False)
    }


def _embedding_reason(name: str, scheme: QuantScheme) -> str | None:
    pattern = _matching(name, scheme)
    if pattern is not None:
        return f"skip pattern {pattern!r}"
    if "embedding" not in scheme.regions:
        return "embedding: the region is not in the scheme"
    if scheme.weights is None:
        return "embedding: the scheme leaves weights in floating point"
    return None


def _matching(name: str, scheme: QuantScheme) -> str | None:
    return next((pattern for pattern in scheme.skip if fnmatchcase(name, pattern)), None)


def _check_patterns(scheme: QuantScheme, names: list[str]) -> None:
    for pattern in scheme.skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            example = names[0] if names else "none"
            raise SpecError(
                f"scheme {scheme.name!r}: skip pattern {pattern!r} matches none of {len(names)} "
                f"layers; patterns are matched against whole dotted names such as {example!r}"
            )


def _skip_reason(name: str, region: Region, scheme: QuantScheme) -> str | None:
    pattern = _matching(name, scheme)
    if pattern is not None:
        return f"skip pattern {pattern!r}"
    if region == "lm_head":
        return None if region in scheme.regions else "LM head: the region is not in the scheme"
    if region != "linear_inputs":
        if region in scheme.regions:
            return None
        return f"belongs to region {region}, which the scheme does not name"
    if scheme.regions and not {"linear_inputs", "linear_outputs"} & set(scheme.regions):
        return f"the scheme covers only {', '.join(scheme.regions)}"
    return None


def _refuse_foreign(name: str, module: nn.Module) -> None:
    """Refuse a layer whose computation is not the one that would be quantized."""
    kind = type(module)
    plain = Conv1D.forward if isinstance(module, Conv1D) else nn.Linear.forward
    if hasattr(module, "quantization"):
        found = "quantized already; undo that first"
    elif kind.forward is not plain:
        found = f"a {kind.__name__} with a forward pass of its own"
    elif "forward" in vars(module):
        found = "its forward pass was replaced on the object (offloading hooks do this)"
    elif not module.weight.is_floating_point():  # type: ignore[operator]  # a Tensor here
        found = f"its weight is stored as {module.weight.dtype}"
    else:
        return
    raise QuantizationError(
        f"{name}: cannot be quantized ({found}); add it to the scheme's 'skip' to leave it alone"
    )
