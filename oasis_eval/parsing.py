"""Settings from YAML, JSON and command-line text: one base type, one way in, one message."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from oasis_eval.errors import SpecError


class Spec(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def content_hash(self) -> str:
        """Return the SHA-256 of the value's canonical JSON, as 64 hex digits."""
        return content_hash(self.model_dump(mode="json"))


SpecT = TypeVar("SpecT", bound=Spec)
MAX_YAML_BYTES = 1 << 20


def content_hash(value: object) -> str:
    """Return the SHA-256 of `value` as canonical JSON (sorted keys, no spaces), 64 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without aliases, which is how a few lines become gigabytes, and repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f"key {key!r} is given twice, again on line {line}")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> object:
    """Read one YAML file of at most 1 MiB without aliases or tags.

    Raises:
        SpecError: The file is missing, too large or no YAML.
    """
    try:
        if path.stat().st_size > MAX_YAML_BYTES:
            raise SpecError(f"{path}: larger than 1 MiB; specifications are short YAML files")
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


_PLAIN_WORDS = {
    "tuple_type": "expected a list",
    "dict_type": "expected keys with values",
    "model_type": "expected keys with values",
    "model_attributes_type": "expected keys with values",
}
"""What pydantic says in Python's words."""


def parse(kind: type[SpecT], value: object, *, origin: str) -> SpecT:
    """Check `value` (from YAML or JSON) and turn it into `kind`.

    Args:
        kind: The settings type.
        value: Mapping of its fields.
        origin: What the error message calls the input, usually a path.

    Raises:
        SpecError: One line with every wrong key, what was found and what is expected.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise SpecError(f"{origin}: {explain(error, kind)}") from error


def explain(error: ValidationError, kind: type[BaseModel]) -> str:
    """Put a pydantic error into one line: key, what was found, what was expected."""
    parts = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            *path, name = item["loc"]
            parts.append(f"unknown key {where!r} ({_instead(str(name), _known(kind, path))})")
        elif item["type"] == "missing":
            parts.append(f"key {where!r} is missing")
        else:
            message = _PLAIN_WORDS.get(item["type"]) or item["msg"].removeprefix("Value error, ")
            shown = "" if isinstance(item["input"], dict) else f", found {item['input']!r:.80}"
            parts.append(f"{where}: {message}{shown}" if where else f"{message}{shown}")
    return "; ".join(parts)


def _instead(name: str, known: Iterable[str]) -> str:
    """Return what a wrong key may have been meant to be."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


def _known(kind: type[BaseModel], path: Sequence[int | str]) -> set[str]:
    """Return the keys that settings have at a place inside `kind`."""
    kinds = {kind}
    for part in path:
        fields = [kind.model_fields[part] for kind in kinds if part in kind.model_fields]
        # A position in a list, or the tag of a union, leads to no other type.
        kinds = {found for field in fields for found in _models(field.annotation)} or kinds
    return {name for kind in kinds for name in kind.model_fields}


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the settings types in an annotation, however they are wrapped."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
