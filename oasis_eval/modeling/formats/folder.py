"""Checkpoint folders in a public format: what one holds, and the same in our layout.

Strict: a tensor that is missing, unexpected or of another shape is an error that names it, before
anything is written. Weights are read shard by shard and keep their dtype; nothing but JSON and
safetensors is opened.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from oasis_eval.errors import CheckpointError
from oasis_eval.modeling.config import OasisConfig
from oasis_eval.modeling.formats.fla import FLA
from oasis_eval.modeling.formats.keys import Mapped, Shape, public_shape, shape_as_ours
from oasis_eval.modeling.formats.kimi import KIMI
from oasis_eval.modeling.formats.oasis_repo import OASIS_REPO
from oasis_eval.modeling.formats.open_attnres import OPEN_ATTNRES
from oasis_eval.modeling.formats.translation import Names, PublicFormat, RawConfig, Translation
from oasis_eval.modeling.registration import FAMILIES

FORMATS: tuple[PublicFormat, ...] = (OPEN_ATTNRES, FLA, OASIS_REPO, KIMI)
"""In the order in which they are tried."""

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_OWN_TYPES = frozenset(config_class.model_type for config_class, _, _ in FAMILIES)
_ROUTING = re.compile(r"(attn|mlp|attention|final)_res_(proj|norm|bias|sa|mlp)\b")


@dataclass(frozen=True, slots=True)
class PublicCheckpoint:
    """A recognised folder and how it is read."""

    folder: Path
    format: PublicFormat
    translation: Translation
    shards: Mapping[str, Mapping[str, Shape]]
    """Shapes by public tensor name by file name."""


def read_public(folder: Path) -> PublicCheckpoint | None:
    """Recognise a checkpoint folder; None where transformers (or we) load it as it stands.

    Raises:
        CheckpointError: It is of a public format with a feature that is not supported, or holds
            depth routers in a layout that no known format has.
    """
    raw = read_config(folder)
    if raw.get("model_type") in _OWN_TYPES:
        return None
    shards = _read_shards(folder)
    names = frozenset(name for shapes in shards.values() for name in shapes)
    found = recognise(raw, names)
    if found is None:
        return None
    try:
        translation = found.translate(raw, names)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} ({found.name}): {error}") from error
    return PublicCheckpoint(folder, found, translation, shards)


def recognise(raw: RawConfig, names: Names) -> PublicFormat | None:
    """Return the public format of a configuration and its tensor names; None: none of them.

    Raises:
        CheckpointError: Tensors of depth routers without a format. Loaded as a plain model they
            would be dropped.
    """
    for candidate in FORMATS:
        if candidate.matches(raw, names):
            return candidate
    stray = sorted(name for name in names if _ROUTING.search(name))
    if stray:
        raise CheckpointError(
            f"tensor {stray[0]} belongs to a depth router, but neither config.json nor the other "
            f"tensors say of which format; known: {', '.join(known.name for known in FORMATS)}"
        )
    return None


def write_as_ours(checkpoint: PublicCheckpoint, target: Path) -> None:
    """Write a recognised checkpoint in our layout, with the files beside its weights.

    Raises:
        CheckpointError: A tensor is missing, unexpected or of the wrong shape.
    """
    names = _check(checkpoint)
    weight_map: dict[str, str] = {}
    total_size = 0
    for shard in checkpoint.shards:
        tensors = {}
        with safe_open(checkpoint.folder / shard, framework="pt") as file:
            for public in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if public not in names:
                    continue
                ours, form = names[public]
                tensors[ours] = shape_as_ours(file.get_tensor(public), form).contiguous()
        weight_map |= dict.fromkeys(tensors, shard)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, target / shard, metadata={"format": "pt"})
    if list(checkpoint.shards) != [_WEIGHTS]:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (target / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for pattern in _COMPANIONS:
        for path in checkpoint.folder.glob(pattern):
            if path.name not in (_CONFIG, _INDEX) and path.is_file():
                shutil.copyfile(path, target / path.name)
    config = checkpoint.translation.config
    config.architectures = [causal_class(config).__name__]
    config.save_pretrained(target)


def expected_shapes(config: OasisConfig) -> dict[str, Shape]:
    """Return the shape of every tensor that a checkpoint of a configuration holds.

    The head counts although a checkpoint with tied embeddings need not have it.
    """
    with torch.device("meta"):
        model = causal_class(config)(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def causal_class(config: OasisConfig) -> type[torch.nn.Module]:
    """Return the language model of a configuration."""
    for config_class, _, causal_class in FAMILIES:
        if isinstance(config, config_class):
            return causal_class
    raise AssertionError(type(config))


def read_config(folder: Path) -> RawConfig:
    """Return `config.json` of a folder.

    Raises:
        CheckpointError: It is missing or no JSON object.
    """
    path = folder / _CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return raw


def _check(checkpoint: PublicCheckpoint) -> dict[str, Mapped]:
    """Return our name of every public tensor to be written, after comparing names and shapes."""
    config, keys, _ = checkpoint.translation
    where = f"{checkpoint.folder} ({checkpoint.format.name})"
    expected = expected_shapes(config)
    found = {name: shape for shapes in checkpoint.shards.values() for name, shape in shapes.items()}
    names: dict[str, Mapped] = {}
    for public, shape in found.items():
        mapped = keys.to_ours(public)
        if mapped is None or mapped.name not in expected:
            raise CheckpointError(f"{where}: tensor {public} is not expected in this format")
        wanted = public_shape(expected[mapped.name], mapped.form)
        if shape != wanted:
            raise CheckpointError(
                f"{where}: tensor {public} has shape {list(shape)}, expected {list(wanted)}"
            )
        names[public] = mapped
    missing = expected.keys() - {mapped.name for mapped in names.values()}
    if config.tie_word_embeddings:
        missing.discard(_HEAD)
        names = {public: mapped for public, mapped in names.items() if mapped.name != _HEAD}
        _check_tied(checkpoint, where)
    if missing:
        first = keys.to_public(min(missing))
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        name = min(missing) if first is None else first.name
        raise CheckpointError(f"{where}: tensor {name} is missing{more}")
    return names


def _check_tied(checkpoint: PublicCheckpoint, where: str) -> None:
    """Refuse a head of its own in a checkpoint whose configuration ties it to the embedding."""
    tied = []
    for shard, shapes in checkpoint.shards.items():
        for name in shapes:
            mapped = checkpoint.translation.keys.to_ours(name)
            if mapped is not None and mapped.name in (_HEAD, _EMBEDDING):
                with safe_open(checkpoint.folder / shard, framework="pt") as file:
                    tied.append(file.get_tensor(name))
    if len(tied) == 2 and not torch.equal(*tied):
        raise CheckpointError(
            f"{where}: {_HEAD} differs from the embedding, but tie_word_embeddings is true"
        )


def _read_shards(folder: Path) -> dict[str, dict[str, Shape]]:
    """Return shapes by tensor name by file; only files that transformers would read."""
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    elif (folder / _WEIGHTS).is_file():
        files = [_WEIGHTS]
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    shards: dict[str, dict[str, Shape]] = {}
    for name in files:
        try:
            with safe_open(folder / name, framework="pt") as file:
                shards[name] = {
                    key: tuple(file.get_slice(key).get_shape())
                    for key in file.keys()  # noqa: SIM118 - safe_open is no mapping
                }
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name}: not readable ({error})") from error
    return shards
