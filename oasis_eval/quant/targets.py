"""Which layers of a model a scheme covers, and why the others are left alone.

Layers are found by type, never by name, and the LM head by asking the model for its output
embeddings. Whatever multiplies activations by weights and is not a plain Linear (raw expert
tensors, subclasses with a forward pass of their own) is refused unless the scheme skips it: a
"4-bit" model of which most is not quantized must be somebody's decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oasis_eval.errors import QuantizationError, SpecError
from oasis_eval.spec import QuantScheme


class Target(NamedTuple):
    """A layer to quantize."""

    name: str
    module: nn.Module
    is_copy: bool
    """Whether something that stays in floating point (the embedding of a tied head) uses the same
    weight, so that a copy of it is quantized."""

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


def select(model: nn.Module, scheme: QuantScheme) -> Selection:
    """Decide for every layer of `model` whether `scheme` quantizes it.

    Raises:
        SpecError: A skip pattern matches nothing.
        QuantizationError: A layer can be neither quantized nor left alone silently, or nothing
            would be quantized at all.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    raw = dict(_raw_weights(model))
    _check_patterns(scheme, [*linears, *raw])
    head = _head(model, linears)
    covered, skipped = {}, []
    for name, module in linears.items():
        reason = _skip_reason(name, module, scheme, is_head=module is head)
        if reason is None:
            _refuse_foreign(name, module)
            covered[name] = module
        else:
            skipped.append(Skipped(name, reason))
    for name, parameter in raw.items():
        shape = "x".join(str(size) for size in parameter.shape)
        pattern = _matching(name, scheme)
        if pattern is not None:
            skipped.append(Skipped(name, f"skip pattern {pattern!r} (raw weight of {shape})"))
        elif parameter.dim() == 3:
            raise QuantizationError(
                f"{name}: a raw {shape} weight (experts in one tensor), which this version cannot "
                f"quantize; add {name!r} or a pattern to the scheme's 'skip' to leave it in "
                "floating point"
            )
        else:
            skipped.append(Skipped(name, f"raw weight of {shape}, not a Linear"))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            skipped.append(Skipped(name, "embedding: the region is not in the scheme"))
        elif isinstance(module, nn.modules.conv._ConvNd):
            skipped.append(Skipped(name, "convolution, not a Linear"))
    if not covered:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in skipped[:3])
        raise QuantizationError(
            f"scheme {scheme.name!r} would quantize none of {len(linears)} linear layers"
            + (f" ({reasons})" if reasons else "")
        )
    chosen = {id(module) for module in covered.values()}
    left_alone = {
        id(parameter)
        for module in model.modules()
        if id(module) not in chosen
        for parameter in module.parameters(recurse=False)
    }
    targets = [Target(name, m, id(m.weight) in left_alone) for name, m in covered.items()]
    return Selection(tuple(targets), tuple(skipped), len(linears))


def quantizes_inputs(scheme: QuantScheme) -> bool:
    """Return whether activations are quantized where they enter a covered layer.

    `lm_head` alone names a layer and no side of it, and means the input.
    """
    return scheme.activations is not None and not (
        "linear_outputs" in scheme.regions and "linear_inputs" not in scheme.regions
    )


def quantizes_outputs(scheme: QuantScheme) -> bool:
    """Return whether activations are quantized where they leave a covered layer."""
    return scheme.activations is not None and "linear_outputs" in scheme.regions


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


def _skip_reason(name: str, module: nn.Module, scheme: QuantScheme, *, is_head: bool) -> str | None:
    pattern = _matching(name, scheme)
    if pattern is not None:
        return f"skip pattern {pattern!r}"
    if is_head:
        return None if "lm_head" in scheme.regions else "LM head: the region is not in the scheme"
    region = getattr(module, "quantization_region", "linear_inputs")
    if region != "linear_inputs":
        return f"belongs to region {region}, which is quantized in the full graph only"
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
