"""Hadamard rotation of a model: offline along the residual stream, online before single layers.

Where the structure is known, the gains of the norms move into the layers behind them, and what is
left of a norm, x / rms(x), does not care about a rotation R of x. So everything that writes to the
stream writes x R, everything that reads it undoes that in its weight, and nothing is left to do at
run time:

    embedding E R; o_proj, down_proj R^T W, b R; q, k, v, gate, up, head, routers W diag(gain) R
    depth queries (w * gain) R, for score w . (gain * v / rms(v)) of source v

A gate that reads slices of the normed stream gets it rotated back. What enters `o_proj` and
`down_proj` has no linear layer alone before it and is rotated in the forward pass, P before the
layer and W P in it. Where the structure is not known, every quantized layer is done in that way,
which is exact for any Linear.

Source: Ashkboos et al., "QuaRot", NeurIPS 2024.
Dimensions: D width, N outputs, K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from oasis_eval.errors import UnsupportedSchemeError
from oasis_eval.quant.targets import Selection
from oasis_eval.quant.transforms.edits import Edits, matrix_of, shape_of, wide
from oasis_eval.quant.transforms.rotation import OnlineInput, RotatedInput, Rotation, Rotations
from oasis_eval.quant.transforms.structure import (
    ResidualStream,
    SlicedReader,
    UnknownStructureError,
    residual_stream,
)
from oasis_eval.spec import Hadamard


class Rotated(NamedTuple):
    """How a model was rotated."""

    along_stream: bool
    """Whether offline along the residual stream, which moves the gains of all norms."""
    notes: list[str]


def rotate_(model: nn.Module, spec: Hadamard, selection: Selection, edits: Edits) -> Rotated:
    """Rotate a model in place without changing its function.

    Args:
        model: A causal language model in floating point.
        spec: Seed of the signs, and whether the forward pass may rotate.
        selection: The layers that will be quantized; others are not rotated online.
        edits: Takes note of every change.

    Returns:
        In which way, and notes: blocks instead of whole widths, weights no longer tied.

    Raises:
        UnsupportedSchemeError: The structure is not known and the forward pass may not rotate.
    """
    rotations = Rotations(spec.seed)
    layers = {target.name: target.module for target in selection.targets}
    try:
        stream = residual_stream(model)
    except UnknownStructureError as error:
        if not spec.online:
            raise UnsupportedSchemeError(
                f"Hadamard rotation without online rotations: {error}; allow them ('online: true')"
            ) from error
        _rotate_inputs(layers, rotations, edits)
        notes = [f"rotated before each quantized layer in the forward pass, since {error}"]
        return Rotated(False, notes + rotations.notes() + _unrotated(layers, rotations))
    notes = _rotate_stream(stream, rotations, edits)
    if spec.online:
        _rotate_inputs(_writers(stream, layers), rotations, edits)
    return Rotated(True, notes + rotations.notes())


def rotate_inputs_(model: nn.Module, spec: Hadamard, selection: Selection) -> None:
    """Rotate in the forward pass what `rotate_` does, of a model whose weights are rotated already.

    Args:
        model: Of the architecture that was rotated; its weights do not matter and are left alone.
        spec: As for `rotate_`.
        selection: As for `rotate_`.
    """
    rotations = Rotations(spec.seed)
    layers = {target.name: target.module for target in selection.targets}
    try:
        stream = residual_stream(model)
    except UnknownStructureError:
        chosen: Mapping[str, nn.Module] = layers
    else:
        chosen = _writers(stream, layers) if spec.online else {}
        for sliced, hook in _sliced_hooks(stream, rotations):
            sliced.module.register_forward_pre_hook(hook)
    for layer, _, hook in _input_hooks(chosen, rotations):
        layer.register_forward_pre_hook(hook)


def _rotate_stream(stream: ResidualStream, rotations: Rotations, edits: Edits) -> list[str]:
    head = stream.readers[-1].layer
    is_tied = head.weight is stream.embedding.weight
    rotation = rotations.of(stream.embedding.embedding_dim)
    for reader in stream.readers:
        matrix_NK = matrix_of(reader.layer)
        if reader.norm is not None:
            matrix_NK *= reader.norm.gain_D
        edits.set_matrix(reader.layer, rotation.apply(matrix_NK))
    for writer in stream.writers.values():
        edits.set_matrix(writer, rotation.apply(matrix_of(writer).T).T)
        if writer.bias is not None:
            edits.set_parameter(writer, "bias", rotation.apply(wide(writer.bias)))
    for sliced, hook in _sliced_hooks(stream, rotations):
        gains = sliced.norm.gain_D.split([head.in_features for head in sliced.heads])
        for layer, gain in zip(sliced.heads, gains, strict=True):
            edits.set_matrix(layer, matrix_of(layer) * gain)
        edits.add_hook(sliced.module.register_forward_pre_hook(hook))
    for router in stream.queries:
        _rotate_query(router, rotation, edits)
    edits.set_parameter(stream.embedding, "weight", rotation.apply(wide(stream.embedding.weight)))
    for norm in stream.norms:
        norm.set_gain(torch.ones_like(norm.gain_D), edits)
    if is_tied:
        return ["the head no longer shares the embedding's weight: both were rotated as copies"]
    return []


def _rotate_query(router: nn.Module, rotation: Rotation, edits: Edits) -> None:
    """Move the gain of a router's key norm into its query, and rotate that."""
    query_D = wide(cast(Tensor, router.query))
    key_norm = cast(nn.Module, router.key_norm)
    gain_D = wide(cast(Tensor, key_norm.weight))
    edits.set_parameter(router, "query", rotation.apply(query_D * gain_D))
    edits.set_parameter(key_norm, "weight", torch.ones_like(gain_D))


def _rotate_inputs(layers: Mapping[str, nn.Module], rotations: Rotations, edits: Edits) -> None:
    """Rotate the inputs of layers in the forward pass, and their weights to match."""
    for layer, rotation, hook in _input_hooks(layers, rotations):
        edits.set_matrix(layer, rotation.apply(matrix_of(layer)))
        edits.add_hook(layer.register_forward_pre_hook(hook))


def _input_hooks(
    layers: Mapping[str, nn.Module], rotations: Rotations
) -> Iterator[tuple[nn.Module, Rotation, RotatedInput]]:
    """Yield the layers whose inputs are rotated in the forward pass, and how."""
    memory = OnlineInput()
    for layer in layers.values():
        rotation = rotations.of(shape_of(layer)[1])
        if rotation.blocks.size > 1:
            yield layer, rotation, RotatedInput(rotation, memory)


def _sliced_hooks(
    stream: ResidualStream, rotations: Rotations
) -> Iterator[tuple[SlicedReader, RotatedInput]]:
    """Yield the gates that read slices of the stream, and what takes its rotation back there."""
    rotation = rotations.of(stream.embedding.embedding_dim)
    for sliced in stream.sliced:
        yield sliced, RotatedInput(rotation, None, inverse=True)


def _writers(stream: ResidualStream, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the quantized ones of the layers that write to the stream."""
    return {name: layer for name, layer in stream.writers.items() if name in layers}


def _unrotated(layers: Mapping[str, nn.Module], rotations: Rotations) -> list[str]:
    names = [
        name for name, layer in layers.items() if rotations.of(shape_of(layer)[1]).blocks.size == 1
    ]
    return [f"not rotated, of odd width: {', '.join(names)}"] if names else []
