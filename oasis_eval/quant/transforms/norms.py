"""Normalization layers: what their gain is, and which linear layers read what they return.

Both are found by trying. A norm is run on random vectors to see whether it multiplies by `weight`
or by `1 + weight` (Gemma) and whether it subtracts the mean. The model is run on a few tokens to
see where the very tensor goes that a norm returned: a gain can move from a norm into its readers
exactly where those are linear layers and nothing else reads it.

Dimensions: D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from oasis_eval.quant.transforms.edits import Edits, keep_dtype_, wide

_SAME_CHANNELS = frozenset(
    {"view", "reshape", "flatten", "unflatten", "contiguous", "to", "type", "type_as", "float"}
    | {"unsqueeze", "squeeze", "detach", "clone", "dropout"}
)
"""Functions after which the last dimension still holds the same channels, if its size is."""
_SLICES = frozenset({"chunk", "split"})


class Norm(NamedTuple):
    """A normalization layer whose computation is known."""

    module: nn.Module
    offset: float
    """Gain is offset + weight: 0, or 1 for Gemma."""
    is_centred: bool
    """Whether the mean is subtracted."""

    @property
    def gain_D(self) -> Tensor:  # noqa: N802 - shape suffix
        """Factors of the channels, float64."""
        return wide(cast(Tensor, self.module.weight)) + self.offset

    @property
    def has_bias(self) -> bool:
        """Whether something is added after the gain."""
        return getattr(self.module, "bias", None) is not None

    def set_gain(self, gain_D: Tensor, edits: Edits) -> None:
        """Give the norm another gain, and its bias the same factor.

        A gain of 1 + weight near 0 has no digits left in a narrow weight; such norms compute in
        fp32 whatever the dtype of the weight, which may therefore be wider.
        """
        weight = cast(Tensor, self.module.weight)
        if self.has_bias:
            bias = wide(cast(Tensor, self.module.bias))
            edits.set_parameter(self.module, "bias", bias * gain_D / self.gain_D)
        dtype = torch.promote_types(weight.dtype, torch.float32) if self.offset else None
        new = edits.set_parameter(self.module, "weight", gain_D - self.offset, dtype=dtype)
        if dtype is not None:
            keep_dtype_(new)


class Reader(NamedTuple):
    """A linear layer that reads what a norm returns, or a slice of it."""

    name: str
    layer: nn.Module
    start: int
    stop: int
    """Channels of the norm that the layer reads."""


@dataclass(slots=True)
class Readers:
    """Everything that reads what one norm returns."""

    linear: dict[tuple[str, int], Reader] = field(default_factory=dict)
    """By layer name and first channel."""
    other: set[str] = field(default_factory=set)
    """Functions that are no linear layers; a gain cannot move into them."""


def norm_of(module: nn.Module) -> Norm | None:
    """Return what a normalization layer computes; None: something else."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or next(module.children(), None) is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    # Not around 0, or subtracting the mean would make no difference.
    noise = torch.randn(4, weight.shape[0], generator=generator, dtype=torch.float64) + 1.0
    x = noise.to(weight.dtype).to(weight.device)
    try:
        with torch.no_grad():
            found = module(x)
    except (TypeError, RuntimeError, NotImplementedError):
        return None  # a module that takes other arguments or shapes is no norm
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return None
    bias = getattr(module, "bias", None)
    found = wide(found) - (wide(bias) if bias is not None else 0.0)
    wide_x = wide(x)
    tolerance = 1e-3 if torch.finfo(weight.dtype).bits >= 32 else 3e-2
    for is_centred in (False, True):
        centred = wide_x - wide_x.mean(-1, keepdim=True) if is_centred else wide_x
        normed = centred * centred.square().mean(-1, keepdim=True).rsqrt()
        for offset in (0.0, 1.0):
            expected = normed * (wide(weight) + offset)
            if bool((found - expected).abs().max() <= tolerance * (1.0 + expected.abs().max())):
                return Norm(module, offset, is_centred)
    return None


def candidate_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have one vector as weight and whose type is called a norm."""
    return {
        name: module
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        and (weight := module._parameters.get("weight")) is not None
        and weight.dim() == 1
    }


def trace_readers(model: nn.Module, run: Callable[[], object]) -> dict[str, Readers]:
    """Return who reads what each norm returns, by the norm's name.

    Args:
        model: Has the norms.
        run: Runs the model once; layers that do not run are not seen.
    """
    tracer = _Tracer(
        {
            id(module.weight): (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
        }
    )
    handles = [
        module.register_forward_hook(tracer.follow(name))
        for name, module in candidate_norms(model).items()
    ]
    try:
        with torch.no_grad(), tracer:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return tracer.readers


class _Followed(NamedTuple):
    tensor: Tensor
    """Kept alive, so that its id stays its own."""
    norm: str
    start: int


class _Tracer(TorchFunctionMode):
    """Follows tensors through a forward pass by identity."""

    def __init__(self, layers: Mapping[int, tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.readers: dict[str, Readers] = {}
        self._layers = layers
        self._followed: dict[int, _Followed] = {}

    def follow(self, norm: str) -> Callable[[nn.Module, object, object], None]:
        """Return a forward hook that starts to follow a norm's result."""

        def hook(_: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor):
                self.readers.setdefault(norm, Readers())
                self._followed[id(output)] = _Followed(output, norm, 0)

        return hook

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        given = list(_tensors((*args, *(kwargs or {}).values())))
        for tensor in given:
            followed = self._followed.get(id(tensor))
            if followed is not None:
                self._note(followed, getattr(func, "__name__", str(func)), given, result)
        return result

    def _note(
        self, followed: _Followed, function: str, given: list[Tensor], result: object
    ) -> None:
        tensor, norm, start = followed
        layers = [self._layers[id(item)] for item in given if id(item) in self._layers]
        if layers:
            for name, layer in layers:
                reader = Reader(name, layer, start, start + tensor.shape[-1])
                self.readers[norm].linear[name, start] = reader
            return
        results = list(_tensors((result,)))
        if not results:
            return  # a shape or a dtype
        width = tensor.shape[-1]
        if function in _SAME_CHANNELS and [item.shape[-1] for item in results] == [width]:
            self._followed[id(results[0])] = _Followed(results[0], norm, start)
        elif function in _SLICES and sum(item.shape[-1] for item in results) == width:
            for item in results:
                self._followed[id(item)] = _Followed(item, norm, start)
                start += item.shape[-1]
        else:
            self.readers[norm].other.add(function)


def _tensors(values: tuple[object, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(tuple(value))
