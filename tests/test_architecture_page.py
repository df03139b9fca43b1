"""The page of layers names what is there, in the order that the import contracts hold."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def layers_of_page() -> list[set[str]]:
    """Return the modules of each row of the table of layers."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Layers")[1].split("## Doors")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [set(re.findall(r"`(\w+)`", row)) for row in rows]


def test_every_module_has_a_layer_on_the_page() -> None:
    """One that nobody can place belongs nowhere."""
    package = ROOT / "oasis_eval"
    there = {path.stem for path in package.glob("*.py")} - {"__init__"}
    there |= {path.parent.name for path in package.glob("*/__init__.py")}

    named = [name for layer in layers_of_page() for name in layer]
    assert set(named) == there
    assert len(named) == len(there)


def test_the_layers_are_those_of_the_contract() -> None:
    """Row for row; the entry point of `python -m` stands with the command line."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )
    expected = [set(re.findall(r"oasis_eval\.(\w+)", layer)) for layer in contract]

    found = layers_of_page()
    found[0] -= {"__main__"}
    assert found == expected
