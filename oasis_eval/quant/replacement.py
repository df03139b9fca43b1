"""Layers of other libraries in the place of a model's own, and what holds for all of them.

A library's backend says how one Linear becomes one of its layers and what that layer really is;
this module finds the layers, puts the new ones in, takes them out again, and watches them run.
What a report says comes from the layers that are there, never from what was asked for.

Dimensions: M rows (tokens), N output channels, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from oasis_eval.errors import QuantizationError, UnsupportedSchemeError
from oasis_eval.quant.coverage import COPY_NOTE, Layer, assemble, sizes
from oasis_eval.quant.effects import Changed, check_effect, check_undo
from oasis_eval.quant.stored import StoredLayer
from oasis_eval.quant.targets import Target, select
from oasis_eval.record import Coverage, ModuleCoverage
from oasis_eval.spec import QuantScheme

_WATCHED_ROWS = 8
_LEAST_CHANGE = 2e-3
"""Relative change of an output that only quantized inputs explain: rounding to bf16 makes half of
it at most, 8-bit inputs make several times as much."""


class Facts(NamedTuple):
    """What a library's layer really is."""

    covered: ModuleCoverage
    stored_bits: int
    """Bits of its codes, scales and offsets."""


class Complaint(NamedTuple):
    """A tensor of a stored layer that no quantizer makes."""

    tensor: str
    """Its name within the layer."""
    found: str
    """What it holds."""


class Library(Protocol):
    """One library's way of quantizing a Linear."""

    name: str
    """Of the distribution package."""

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the library's layer for a Linear, which stays as it is.

        Raises:
            QuantizationError: The library cannot hold this layer's numbers.
        """
        ...

    def facts(self, name: str, layer: nn.Module) -> Facts:
        """Return what `layer` is, from the tensors in it.

        Raises:
            QuantizationError: It is not quantized.
        """
        ...

    def dequantize(self, layer: nn.Module) -> Tensor:
        """Return the weight [N, K] that the codes of `layer` stand for."""
        ...

    def check_input(self, name: str, layer: nn.Module, x: Tensor) -> None:
        """Look at what enters a layer.

        Raises:
            QuantizationError: The library would turn it into wrong numbers.
        """
        ...

    def empty(self, linear: nn.Linear) -> nn.Module:
        """Return the layer that `convert` would, with any codes and scales."""
        ...

    def stored(self, name: str, layer: nn.Module) -> StoredLayer:
        """Return what a file holds of a layer, under the names of the library's own state.

        Raises:
            UnsupportedSchemeError: The library cannot give it back as it is.
        """
        ...

    def filled_(self, layer: nn.Module) -> Complaint | None:
        """Take over the values that the tensors of `stored` were given.

        Returns:
            What no quantizer makes.
        """
        ...

    def compute_in_(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """Expect inputs of another dtype.

        Raises:
            UnsupportedSchemeError: The layer cannot be cast.
        """
        ...


_Make = Callable[[str, nn.Linear], nn.Module]


class _Place(NamedTuple):
    """Where a layer was replaced."""

    parent: nn.Module
    key: str
    original: nn.Module | None
    """None: not kept."""


@dataclass(slots=True, kw_only=True)
class LibraryApplied:
    """A library's scheme in effect on a model."""

    scheme: QuantScheme
    library: Library
    warnings: tuple[str, ...]
    """What holds for this scheme on any model."""
    notes: tuple[str, ...] = ()
    """See `backends.Storable`."""
    layers: dict[str, nn.Module] = field(default_factory=dict)
    """The library's layers, by name."""
    called: set[str] = field(default_factory=set)
    weights_changed: bool = False
    activation_changed: bool = False
    places: list[_Place] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    _coverage: Coverage | None = None

    @property
    def coverage(self) -> Coverage:
        """What the layers in the model really are."""
        assert self._coverage is not None
        return self._coverage

    def attach_(self, model: nn.Module, make: _Make, *, keep_reference: bool) -> None:
        """Replace the layers that the scheme covers.

        Args:
            model: Has them.
            make: Makes the library's layer from a layer's name and Linear.
            keep_reference: Whether the original layers are kept.
        """
        selection = select(model, self.scheme)
        before = sizes(model.parameters())
        weights = [id(target.weight) for target in selection.targets]
        layers = []
        for target, weight in zip(selection.targets, weights, strict=True):
            if not bool(torch.isfinite(target.weight).all()):
                raise QuantizationError(f"{target.name}: the weight holds non-finite values")
            foreign = bool(target.module._forward_hooks)
            if not any(transform.kind == "hadamard" for transform in self.scheme.transforms):
                foreign = foreign or bool(target.module._forward_pre_hooks)
            if foreign:
                raise QuantizationError(
                    f"{target.name}: has hooks, which {self.library.name}'s layer in its place "
                    "would not have; set them after quantizing"
                )
            facts = self._replace(model, target, make, keep_reference=keep_reference)
            layers.append(Layer(*facts, weight, target.is_copy))
        self._coverage = assemble(selection, layers, before)
        if self.scheme.activations is None and not self.weights_changed:
            raise QuantizationError(
                f"scheme {self.scheme.name!r}: no weight was changed by quantization"
            )

    def detach_(self) -> None:
        """Put the original layers back where they were kept."""
        for handle in self.handles:
            handle.remove()
        for place in reversed(self.places):
            if place.original is not None:
                place.parent._modules[place.key] = place.original
        self.handles.clear()
        self.places.clear()
        self.layers.clear()

    def undo(self) -> None:
        """Restore the model bit for bit; see `backends.Applied`."""
        check_undo(self.scheme, [place.original is not None for place in self.places])
        self.detach_()

    def verify(self) -> tuple[str, ...]:
        """Check, after a forward pass, that the scheme had an effect; see `backends.Applied`."""
        return (
            *check_effect(
                self.scheme,
                tuple(self.layers),
                self.called,
                Changed(self.weights_changed, self.activation_changed),
            ),
            *self.warnings,
            *self.notes,
        )

    def stored(self, model: nn.Module) -> dict[str, StoredLayer]:
        """Return what a checkpoint holds of each layer; see `backends.Storable`."""
        return {name: self.library.stored(name, layer) for name, layer in self.layers.items()}

    def filled_(self, model: nn.Module) -> str | None:
        """Take over what was read; see `backends.Storable`."""
        for name, layer in self.layers.items():
            complaint = self.library.filled_(layer)
            if complaint is not None:
                return f"{name}.{complaint.tensor} holds {complaint.found}"
        return None

    def compute_in_(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Expect activations of another dtype; see `backends.Storable`."""
        for layer in self.layers.values():
            self.library.compute_in_(layer, dtype)

    def _replace(
        self, model: nn.Module, target: Target, make: _Make, *, keep_reference: bool
    ) -> Facts:
        linear = _as_linear(target)
        layer = make(target.name, linear)
        layer.train(target.module.training)
        facts = self.library.facts(target.name, layer)
        if not self.weights_changed:
            weight = self.library.dequantize(layer).to(linear.weight)
            self.weights_changed = not torch.equal(weight, linear.weight)
        self.handles += self._watch(target.name, layer)
        for hook in reversed(target.module._forward_pre_hooks.values()):
            # A rotation of the input, which must come before whatever looks at it.
            self.handles.append(layer.register_forward_pre_hook(hook, prepend=True))
        for parent in list(model.modules()):
            for key, child in parent._modules.items():
                if child is target.module:
                    parent._modules[key] = layer
                    original = target.module if keep_reference else None
                    self.places.append(_Place(parent, key, original))
        self.layers[target.name] = layer
        if not keep_reference:  # so that two copies of one layer are held, not of the model
            target.module._parameters["weight"] = None
        if not target.is_copy:
            return facts
        note = "; ".join(filter(None, (COPY_NOTE, facts.covered.note)))
        return facts._replace(covered=facts.covered.model_copy(update={"note": note}))

    def _watch(self, name: str, layer: nn.Module) -> list[RemovableHandle]:
        """Note that a layer runs, check its input, and see whether it quantizes it."""
        entered: list[Tensor] = []

        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.called.add(name)
            self.library.check_input(name, module, args[0])
            entered.clear()
            if self.scheme.activations is not None and not self.activation_changed:
                entered.append(_first_rows(args[0]))

        def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if entered:
                self.activation_changed = self._quantizes_input(module, entered.pop(), output)

        return [
            # Ahead of the library's own hooks, which may quantize the input.
            layer.register_forward_pre_hook(before, prepend=True),
            layer.register_forward_hook(after),
        ]

    def _quantizes_input(self, layer: nn.Module, x_MK: Tensor, output: Tensor) -> bool:
        """Return whether an output is another than that of the quantized weight alone."""
        bias = layer.bias.float() if isinstance(layer.bias, Tensor) else None
        expected_MN = F.linear(x_MK.float(), self.library.dequantize(layer).float(), bias)
        change = (_first_rows(output).float() - expected_MN).norm()
        return bool(change > _LEAST_CHANGE * expected_MN.norm())


def replace_(
    model: nn.Module,
    scheme: QuantScheme,
    library: Library,
    *,
    keep_reference: bool,
    warnings: tuple[str, ...] = (),
) -> LibraryApplied:
    """Put a library's layers in the place of those that `scheme` covers.

    Raises:
        SpecError: A skip pattern matches nothing.
        QuantizationError: A layer cannot be replaced, or nothing would be.
    """
    applied = LibraryApplied(scheme=scheme, library=library, warnings=warnings)
    try:
        applied.attach_(model, library.convert, keep_reference=keep_reference)
    except BaseException:
        applied.detach_()
        raise
    return applied


def replace_empty_(
    model: nn.Module,
    scheme: QuantScheme,
    library: Library,
    dtype: torch.dtype,
    *,
    warnings: tuple[str, ...] = (),
) -> LibraryApplied:
    """Put a library's layers with any values in; see `backends.StoringBackend.empty_`."""

    def make(name: str, linear: nn.Linear) -> nn.Module:
        return library.empty(linear.to(dtype))

    applied = LibraryApplied(
        scheme=scheme, library=library, warnings=warnings, weights_changed=True
    )
    applied.attach_(model, make, keep_reference=False)
    return applied


def cast_refused(library: str, stored: torch.dtype, asked: torch.dtype) -> UnsupportedSchemeError:
    """Return the refusal to compute in another dtype than layers were quantized in."""
    names = [str(dtype).removeprefix("torch.") for dtype in (stored, asked)]
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(names[0], names[0])
    return UnsupportedSchemeError(
        f"{library} quantized these layers in {names[0]} and cannot run them in {names[1]}; give "
        f"--dtype {short}"
    )


def check_product(
    library: str, product: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> None:
    """Check a library's 8-bit integer product on a device, with random and extreme codes.

    Args:
        library: For the message.
        product: Takes int8 codes [M, K] and [N, K], returns their products [M, N].
        device: Of the model; kernels differ from one to the next.

    Raises:
        QuantizationError: Sums are off by more than fp32 accumulation explains.
    """
    generator = torch.Generator().manual_seed(0)
    first_MK = torch.randint(-128, 128, (32, 1024), generator=generator).to(torch.int8)
    second_NK = torch.randint(-128, 128, (64, 1024), generator=generator).to(torch.int8)
    first_MK[:4], second_NK[:4] = 127, 127
    first_MK[4:8], second_NK[4:8] = -128, -128
    expected_MN = first_MK.double() @ second_NK.double().T
    found_MN = product(first_MK.to(device), second_NK.to(device)).cpu()
    error = float((found_MN.double() - expected_MN).abs().max())
    if error > 1e-6 * float(expected_MN.abs().max()):
        raise QuantizationError(
            f"{library}: its 8-bit integer product is wrong on device {str(device)!r} (off "
            f"by {error:g} where sums are exact); use backend 'fake' or 'torch'"
        )


def _first_rows(x: Tensor) -> Tensor:
    if hasattr(x, "dequantize") and type(x) is not Tensor:
        x = x.dequantize()
    return x.detach().reshape(-1, x.shape[-1])[:_WATCHED_ROWS]


def _as_linear(target: Target) -> nn.Linear:
    """Return a Linear that computes what the target does, on the same parameters."""
    weight = target.weight.detach()
    weight_NK = weight.T.contiguous() if target.is_transposed else weight
    num_outputs, num_inputs = weight_NK.shape
    bias = target.module.bias
    linear = nn.Linear(num_inputs, num_outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    if isinstance(bias, Tensor):
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
