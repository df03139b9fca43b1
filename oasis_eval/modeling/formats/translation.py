"""What a public format is: a test, and a translation of configuration and tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from oasis_eval.errors import CheckpointError
from oasis_eval.modeling.config import OasisConfig
from oasis_eval.modeling.formats.keys import KeyMap

RawConfig = Mapping[str, object]
"""Content of a `config.json`, as it stands."""
Names = frozenset[str]
"""Names of the tensors of a checkpoint."""

_Value = TypeVar("_Value")
_BACKBONES: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# `auto_map` points to the publisher's Python code, which is never run.
_NOT_OURS = ("model_type", "architectures", "auto_map", "transformers_version")


class Translation(NamedTuple):
    """A public checkpoint in our terms."""

    config: OasisConfig
    keys: KeyMap
    notes: tuple[str, ...] = ()
    """What a reader of results must know about how the format was read."""


@dataclass(frozen=True, slots=True)
class PublicFormat:
    """One public format."""

    name: str
    matches: Callable[[RawConfig, Names], bool]
    """Whether a checkpoint claims to be of this format."""
    translate: Callable[[RawConfig, Names], Translation]
    """Raises `CheckpointError`, by name, for what the format has and the decoder has not."""


def setting(raw: RawConfig, name: str, kind: type[_Value], default: _Value) -> _Value:
    """Return a value of a configuration after checking its type; null counts as absent.

    Raises:
        CheckpointError: It is of another type.
    """
    value = raw.get(name)
    if value is None:
        return default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise CheckpointError(f"config.json: {name} is {value!r}; expected {kind.__name__}")
    return value


def required(raw: RawConfig, name: str) -> int:
    """Return a positive integer of a configuration.

    Raises:
        CheckpointError: It is missing or something else.
    """
    value = raw.get(name)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {name} is {value!r}; expected a positive integer")
    return value


def refuse_unless(supported: bool, what: str, instead: str) -> None:
    """Refuse a feature of a format that the decoder does not have.

    Raises:
        CheckpointError: Names what was found and what is supported.
    """
    if not supported:
        raise CheckpointError(f"config.json: {what} is not supported; supported: {instead}")


def backbone_config(model_type: str, raw: RawConfig, *, without: Names) -> PreTrainedConfig:
    """Return the plain backbone's configuration behind a public one.

    Args:
        model_type: Of the backbone, `llama` or `qwen3`.
        raw: The public configuration.
        without: Fields that are the format's own.

    Raises:
        CheckpointError: Another backbone, quantized weights, or a field that cannot be.
    """
    if model_type not in _BACKBONES:
        raise CheckpointError(
            f"config.json: a backbone of model_type {model_type!r} is not supported with depth "
            f"routing; supported: {', '.join(sorted(_BACKBONES))}"
        )
    if raw.get("quantization_config") is not None:
        raise CheckpointError("config.json: quantization_config: expected unquantized weights")
    fields = {
        name: value for name, value in raw.items() if name not in _NOT_OURS and name not in without
    }
    try:
        config: PreTrainedConfig = _BACKBONES[model_type].from_dict(fields)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        cause = " ".join(str(error).split())[:300]
        raise CheckpointError(f"config.json: not a {model_type} configuration: {cause}") from error
    return config


def blocks_of(num_units: int, block_size: int, *, unit: str) -> int:
    """Return the number of equal blocks, for formats that give their size.

    Raises:
        CheckpointError: The last block would be shorter, where ours is the longest.
    """
    if num_units % block_size:
        raise CheckpointError(
            f"config.json: blocks of {block_size} {unit} leave a shorter last block of "
            f"{num_units % block_size}; supported: a size that divides {num_units}"
        )
    return num_units // block_size
