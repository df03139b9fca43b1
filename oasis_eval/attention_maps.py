"""Attention maps as a file: a few layers and heads of one model on one short text.

The file is safetensors: two arrays and one JSON text, so that it is small, opens anywhere and runs
nothing. Who captures maps and who draws them meet here; neither needs the other.

Shapes: L layers, H heads, T tokens (queries and keys).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from oasis_eval.errors import RecordError
from oasis_eval.parsing import Spec, explain

Array = NDArray[np.float32]
SUFFIX = ".safetensors"
_KEY = "attention_maps"


class MapInfo(Spec):
    """What the maps are of."""

    label: str
    """Of the model."""
    scheme: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    tokens: tuple[str, ...]
    """Text of each token."""
    token_ids: tuple[int, ...]
    checkpoint_sha256: str
    text_sha256: str
    """Of the corpus that the tokens begin."""


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """Maps and what they are of."""

    info: MapInfo
    weights: Array
    """[L, H, T, T], queries by keys; what is hidden is 0."""
    null: Array
    """[L, H, T]: mass of a query that goes to no key."""


def write(path: Path, maps: AttentionMaps) -> None:
    """Write one file; the same maps give the same bytes.

    Raises:
        RecordError: It cannot be written there.
    """
    arrays = {"weights": maps.weights, "null": maps.null}
    content = save(arrays, metadata={_KEY: maps.info.model_dump_json()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from error


def read(path: Path) -> AttentionMaps:
    """Read one file.

    Raises:
        RecordError: It is missing, damaged, or holds something else.
    """
    if not path.is_file():
        raise RecordError(f"{path}: no such file of attention maps")
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(_KEY)
            if text is None:
                raise RecordError(
                    f"{path}: safetensors without attention maps; expected a file that "
                    "`oasis-eval attention` wrote"
                )
            info = MapInfo.model_validate(json.loads(text))
            weights, null = (file.get_tensor(name) for name in ("weights", "null"))
    except ValidationError as error:
        raise RecordError(f"{path}: damaged attention maps: {explain(error, MapInfo)}") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read as attention maps ({error})") from error
    shape = (len(info.layers), len(info.heads), len(info.tokens))
    if null.shape != shape or weights.shape != (*shape, shape[-1]):
        raise RecordError(
            f"{path}: damaged attention maps: arrays {weights.shape} and {null.shape} for "
            f"{shape[0]} layers, {shape[1]} heads and {shape[2]} tokens"
        )
    return AttentionMaps(info, weights, null)
