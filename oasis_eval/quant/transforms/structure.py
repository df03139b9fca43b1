"""What a causal language model is made of, as far as transforms must know it.

Found by attributes and shapes, not by class: a decoder with an embedding, layers of a pre-normed
attention and a pre-normed gated MLP, a final norm and a head, and, where depth is routed, routers
with a query or with projections. `residual_stream` accounts for every parameter; one that has no
place means an unknown structure, and the caller is told which.

Dimensions: D width, N outputs, K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from oasis_eval.quant.transforms.norms import Norm, norm_of


class StreamReader(NamedTuple):
    """A linear layer whose input is the stream, or the stream normed."""

    name: str
    layer: nn.Linear
    norm: Norm | None


class SlicedReader(NamedTuple):
    """A module whose linear layers read slices of the normed stream, in order."""

    module: nn.Module
    heads: tuple[nn.Linear, ...]
    norm: Norm


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """What writes to and reads from the vectors [D] that layers hand on."""

    embedding: nn.Embedding
    readers: list[StreamReader] = field(default_factory=list)
    """The head is the last one."""
    writers: dict[str, nn.Linear] = field(default_factory=dict)
    """`o_proj` and `down_proj` of each layer by name."""
    sliced: list[SlicedReader] = field(default_factory=list)
    queries: list[nn.Module] = field(default_factory=list)
    """Routers with a `query` [D] and the gain of a norm in `key_norm.weight` [D]."""
    norms: list[Norm] = field(default_factory=list)


class UnknownStructureError(Exception):
    """Some part of a model has no place in what is known here."""


def layers_of(model: nn.Module) -> nn.ModuleList | None:
    """Return the list of decoder layers: of all lists of modules the one with most linear layers.

    A list inside of a layer (experts, heads of a gate) has fewer, and so has a vision tower.
    """

    def count(modules: nn.Module) -> int:
        return sum(isinstance(module, nn.Linear | Conv1D) for module in modules.modules())

    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and not any(isinstance(item, nn.Linear | Conv1D) for item in module)
    ]
    largest = max(lists, key=count, default=None)
    return None if largest is None or count(largest) == 0 else largest


def residual_stream(model: nn.Module) -> ResidualStream:
    """Return the residual stream of a causal language model.

    Raises:
        UnknownStructureError: Names what has no place in it.
    """
    walk = _Walk(model)
    embedding = _ask(model, "get_input_embeddings")
    head = _ask(model, "get_output_embeddings")
    body = getattr(model, "base_model", model)
    layers = getattr(body, "layers", None)
    if not isinstance(embedding, nn.Embedding):
        raise UnknownStructureError("the model names no token embedding")
    if not isinstance(layers, nn.ModuleList):
        raise UnknownStructureError("the model has no list of decoder layers called 'layers'")
    stream = ResidualStream(embedding)
    walk.account(embedding, "weight")
    for layer in layers:
        _attention(layer, stream, walk)
        _mlp(layer, stream, walk)
        for name in ("attn_res_sa", "attn_res_mlp"):
            _router(getattr(layer, name, None), stream, walk)
    _router(getattr(body, "final_res", None), stream, walk)
    stream.readers.append(_reader(head, walk.norm(body, "norm", stream), walk))
    walk.finish(model)
    return stream


class _Walk:
    """Names of modules, and which parameters have a place."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._accounted: set[tuple[int, str]] = set()

    def name_of(self, module: object) -> str:
        return self._names.get(id(module), "the model") or "the model"

    def account(self, module: nn.Module, *names: str) -> None:
        """Note that parameters of a module have a place.

        Raises:
            UnknownStructureError: They had one before: the module is used twice.
        """
        for name in names:
            if (id(module), name) in self._accounted:
                raise UnknownStructureError(f"{self.name_of(module)} has two places in the model")
            self._accounted.add((id(module), name))

    def linear(self, parent: nn.Module, name: str) -> nn.Linear:
        layer = getattr(parent, name, None)
        if not isinstance(layer, nn.Linear):
            raise UnknownStructureError(f"{self.name_of(parent)} has no linear layer {name!r}")
        self.account(layer, "weight", "bias")
        return layer

    def norm(self, parent: nn.Module, name: str, stream: ResidualStream) -> Norm:
        module = getattr(parent, name, None)
        if not isinstance(module, nn.Module):
            raise UnknownStructureError(f"{self.name_of(parent)} has no norm {name!r}")
        norm = norm_of(module)
        if norm is None or norm.is_centred or norm.has_bias:
            raise UnknownStructureError(
                f"{self.name_of(module)} ({type(module).__name__}) is not x / rms(x) times a gain"
            )
        self.account(module, "weight")
        stream.norms.append(norm)
        return norm

    def finish(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and (id(module), name) not in self._accounted:
                    raise UnknownStructureError(
                        f"{self.name_of(module)}.{name} ({type(module).__name__}) has no place "
                        "in a plain pre-normed decoder"
                    )


def _attention(layer: nn.Module, stream: ResidualStream, walk: _Walk) -> None:
    attention = getattr(layer, "self_attn", None)
    if not isinstance(attention, nn.Module):
        raise UnknownStructureError(f"{walk.name_of(layer)} has no 'self_attn'")
    norm = walk.norm(layer, "input_layernorm", stream)
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = walk.linear(attention, name)
        stream.readers.append(StreamReader(walk.name_of(projection), projection, norm))
    writer = walk.linear(attention, "o_proj")
    stream.writers[walk.name_of(writer)] = writer
    for name in ("q_norm", "k_norm"):  # of projected heads, which no rotation touches
        module = getattr(attention, name, None)
        if isinstance(module, nn.Module):
            walk.account(module, *module._parameters)
    walk.account(attention, *attention._parameters)  # logits of nulls and sinks, one a head
    gate = getattr(attention, "gate", None)
    if not isinstance(gate, nn.Module):
        return
    heads = getattr(gate, "heads", None)
    if isinstance(heads, nn.ModuleList):
        sliced = tuple(walk.linear(heads, str(index)) for index in range(len(heads)))
        if sum(head.in_features for head in sliced) != norm.gain_D.shape[0]:
            raise UnknownStructureError(f"{walk.name_of(gate)}: its heads do not share the width")
        stream.sliced.append(SlicedReader(gate, sliced, norm))
    else:
        projection = walk.linear(gate, "proj")
        stream.readers.append(StreamReader(walk.name_of(projection), projection, norm))


def _mlp(layer: nn.Module, stream: ResidualStream, walk: _Walk) -> None:
    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, nn.Module):
        raise UnknownStructureError(f"{walk.name_of(layer)} has no 'mlp'")
    norm = walk.norm(layer, "post_attention_layernorm", stream)
    for name in ("gate_proj", "up_proj"):
        projection = walk.linear(mlp, name)
        stream.readers.append(StreamReader(walk.name_of(projection), projection, norm))
    writer = walk.linear(mlp, "down_proj")
    stream.writers[walk.name_of(writer)] = writer


def _router(router: nn.Module | None, stream: ResidualStream, walk: _Walk) -> None:
    if router is None or not any(True for _ in router.parameters()):
        return
    scalars = [name for name, p in router._parameters.items() if p is not None and p.numel() == 1]
    walk.account(router, *scalars)
    if isinstance(getattr(router, "q_proj", None), nn.Linear):
        for name in ("q_proj", "k_proj"):
            projection = walk.linear(router, name)
            stream.readers.append(StreamReader(walk.name_of(projection), projection, None))
        return
    key_norm = getattr(router, "key_norm", None)
    if router._parameters.get("query") is None or not isinstance(key_norm, nn.Module):
        raise UnknownStructureError(f"{walk.name_of(router)} has neither a query nor projections")
    walk.account(router, "query")
    walk.account(key_norm, "weight")
    stream.queries.append(router)


def _reader(head: object, norm: Norm, walk: _Walk) -> StreamReader:
    if not isinstance(head, nn.Linear):
        raise UnknownStructureError("the model names no linear head")
    walk.account(head, "weight", "bias")
    return StreamReader(walk.name_of(head), head, norm)


def _ask(model: nn.Module, method: str) -> object:
    ask = getattr(model, method, None)
    return ask() if callable(ask) else None


class ChannelPair(NamedTuple):
    """Two linear layers between which every channel only passes through linear maps of its own.

    Output rows of the first may be divided by factors that the inputs of the second are multiplied
    by.
    """

    first_name: str
    first: nn.Module
    start: int
    """First output row that belongs to the pair."""
    second_name: str
    second: nn.Module
    num_heads: int
    """Heads of the first; 1 where there are none."""
    repeats: int
    """Heads of the second that read one head of the first, side by side."""


def channel_pairs(model: nn.Module) -> Iterator[ChannelPair]:
    """Yield value and output projections, and up and down projections of gated MLPs.

    Attention mixes tokens and never channels of a value, and gates multiply channel by channel.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def pair(
        first: nn.Module, start: int, second: nn.Module, heads: int, repeats: int
    ) -> ChannelPair:
        return ChannelPair(
            names[id(first)], first, start, names[id(second)], second, heads, repeats
        )

    for module in model.modules():
        children = dict(module.named_children())
        if any(
            "norm" in type(child).__name__.lower() and name not in ("q_norm", "k_norm")
            for name, child in children.items()
        ):
            continue  # on values, or between the two layers (BitNet)
        value, output = children.get("v_proj"), children.get("o_proj")
        width = getattr(module, "head_dim", None)
        if (
            isinstance(value, nn.Linear)
            and isinstance(output, nn.Linear)
            and isinstance(width, int)
            and value.out_features % width == output.in_features % value.out_features == 0
        ):
            repeats = output.in_features // value.out_features
            yield pair(value, 0, output, value.out_features // width, repeats)
        fused, output = children.get("c_attn"), children.get("c_proj")
        if isinstance(fused, Conv1D) and isinstance(output, Conv1D):
            inputs = output.weight.shape[0]
            if fused.weight.shape[1] == 3 * inputs:
                yield pair(fused, 2 * inputs, output, 1, 1)
        up, down = children.get("up_proj"), children.get("down_proj")
        if isinstance(up, nn.Linear) and isinstance(down, nn.Linear) and "gate_proj" in children:
            yield pair(up, 0, down, 1, 1)
