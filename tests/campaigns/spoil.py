"""Inputs with something wrong in them, made by chance from ones that are right."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NONSENSE: list[Any] = [
    None, [], {}, "", "nonsense", "../../etc/passwd", -1, 0, 3.5, 10**30, True, float("nan"),
    float("inf"), [[]], {"a": {"b": []}}, ["x", 1], "\x00", "{seed}", "!!python/object:os.system",
]  # fmt: skip


def value(original: Any, chance: random.Random) -> tuple[Any, str]:
    """Return a nested value with one thing changed, and what."""
    spoiled = copy.deepcopy(original)
    places = list(_places(spoiled))
    holder, key = chance.choice(places)
    change = chance.choice(["replace", "replace", "remove", "rename", "wrap"])
    if change == "remove":
        del holder[key]
        return spoiled, f"{key!r} removed"
    if change == "rename" and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
        return spoiled, f"{key!r} renamed"
    if change == "wrap":
        holder[key] = [holder[key]] if chance.random() < 0.5 else {"value": holder[key]}
        return spoiled, f"{key!r} wrapped"
    holder[key] = copy.deepcopy(chance.choice(NONSENSE))
    return spoiled, f"{key!r} replaced by {holder[key]!r}"


def _places(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, item in list(items):
        yield tree, key
        if isinstance(item, dict | list):
            yield from _places(item)


def text(original: str, chance: random.Random) -> tuple[bytes, str]:
    """Return a file's text cut off, overwritten, or replaced, and how."""
    content = original.encode()
    kind = chance.choice(["cut", "cut", "overwritten", "empty", "binary", "deep"])
    if kind == "cut":
        at = chance.randrange(1, len(content) - 2)
        return content[:at], f"cut at {at}"
    if kind == "overwritten":
        at = chance.randrange(len(content))
        return content[:at] + b"\xff\xfe\x00[{" + content[at + 5 :], f"overwritten at {at}"
    whole = {"empty": b"", "binary": bytes(chance.randrange(256) for _ in range(300)),
             "deep": b"[" * 100_000}  # fmt: skip
    return whole[kind], kind


# --- checkpoints --------------------------------------------------------------------------------

Damage = Callable[[Path, random.Random], str]


def checkpoint(intact: Path, folder: Path, chance: random.Random) -> str:
    """Copy a checkpoint and damage it so that it cannot be used; return how."""
    shutil.copytree(intact, folder)
    damage = chance.choice(_DAMAGES)
    return f"{damage.__name__}: {damage(folder, chance)}"


def _cut_file(folder: Path, chance: random.Random) -> str:
    names = ["model.safetensors", "config.json", "tokenizer.json"]
    path = folder / chance.choice(names)
    content = path.read_bytes()
    size = chance.randrange(len(content) - 1)
    path.write_bytes(content[:size])
    return f"{path.name} to {size} of {len(content)} bytes"


def _remove_file(folder: Path, chance: random.Random) -> str:
    name = chance.choice(["model.safetensors", "config.json", "tokenizer.json"])
    (folder / name).unlink()
    return name


def _overwrite_header(folder: Path, chance: random.Random) -> str:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    at = chance.choice([0, 1, 5, 8])
    content[at : at + 3] = b"\xff\x01{"
    path.write_bytes(bytes(content))
    return f"at byte {at}"


def _spoil_tensor(folder: Path, chance: random.Random) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    kind = chance.choice(["gone", "renamed", "transposed", "longer", "integers", "empty"])
    tensor = tensors.pop(name)
    if kind == "renamed":
        tensors[f"{name}_"] = tensor
    elif kind == "transposed" and tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
        tensors[name] = tensor.T.contiguous()
    elif kind in ("longer", "transposed"):
        tensors[name] = torch.cat([tensor, tensor[:1]])
    elif kind == "integers":
        tensors[name] = tensor.to(torch.int8)
    elif kind == "empty":
        tensors[name] = tensor[:0].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    return f"{name} {kind}"


def _contradict_config(folder: Path, chance: random.Random) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    name, replacement = chance.choice(
        [
            ("hidden_size", 64), ("hidden_size", "wide"), ("vocab_size", 100), ("vocab_size", -5),
            ("num_hidden_layers", 3), ("num_hidden_layers", [2]), ("intermediate_size", 95),
            ("num_attention_heads", 3), ("num_attention_heads", 0), ("model_type", "no_such"),
            ("model_type", 7), ("model_type", None), ("num_key_value_heads", 4),
            ("hidden_act", "no_such"), ("rope_parameters", 3),
        ]
    )  # fmt: skip
    config[name] = replacement
    path.write_text(json.dumps(config))
    return f"{name} {replacement!r}"


def _only_pickle(folder: Path, chance: random.Random) -> str:
    name = chance.choice(["pytorch_model.bin", "model.pt", "model.ckpt"])
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / name)
    (folder / "model.safetensors").unlink()
    return name


def _index_elsewhere(folder: Path, chance: random.Random) -> str:
    shard = chance.choice(["../model.safetensors", "/etc/passwd", "gone.safetensors", "", 7, None])
    weights = dict.fromkeys(load_file(folder / "model.safetensors"), shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return repr(shard)


_DAMAGES: list[Damage] = [
    _cut_file, _remove_file, _overwrite_header, _spoil_tensor, _spoil_tensor, _contradict_config,
    _contradict_config, _only_pickle, _index_elsewhere,
]  # fmt: skip
