"""The documentation page of the variants says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from oasis_eval.modeling.config import OasisSettings
from oasis_eval.modeling.variants import VARIANT_NAMES, resolve_variant

PAGE = Path(__file__).parents[2] / "docs" / "variants.md"


def test_example_runs_and_shows_the_no_op() -> None:
    """The first Python block is run as it stands."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    names: dict[str, float] = {}

    exec(block.group(1), names)

    assert names["kimi_exact"] < 1e-5
    assert names["kimi_exact"] < names["kimi_usual"] < names["repo"]
    assert names["kimi_partial"] > 1e-2
    assert names["repo"] > 1e-2


def test_table_lists_every_variant_with_its_settings() -> None:
    """One row per name, in the order of the code."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [row for row in rows if row[0] in VARIANT_NAMES]

    assert [name for name, _ in listed] == [
        name for name in VARIANT_NAMES if not name.startswith("residual-")
    ]
    for name, cells in listed:
        settings = resolve_variant(name)
        assert cells.split(" | ") == _cells(settings), name


def _cells(settings: OasisSettings) -> list[str]:
    learned = {"learned": ", learned null", "fixed": ""}
    return [
        settings.token_normalizer + learned[settings.token_null],
        settings.depth_normalizer + learned[settings.depth_null],
        "on" if settings.null_coupling else "off",
        settings.attention_gate,
    ]
