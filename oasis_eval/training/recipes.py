"""Training recipes by name or path."""

from __future__ import annotations

from pathlib import Path

from oasis_eval.errors import UnknownNameError
from oasis_eval.parsing import parse, read_yaml
from oasis_eval.paths import data_folder
from oasis_eval.spec import TrainRecipe


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes that ship with the suite."""
    folder = data_folder("models") / "recipes"
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def resolve(name: str) -> TrainRecipe:
    """Return a recipe.

    Args:
        name: One of `recipe_names`, or the path of a `*.yaml` file.

    Raises:
        UnknownNameError: Neither.
        SpecError: The file is missing or no recipe.
    """
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        if name not in recipe_names():
            raise UnknownNameError("recipe", name, recipe_names())
        path = data_folder("models") / "recipes" / f"{name}.yaml"
    return parse(TrainRecipe, read_yaml(path), origin=str(path))
