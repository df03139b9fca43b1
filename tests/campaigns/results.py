"""What a results folder holds, but for times."""

from __future__ import annotations

import json
from pathlib import Path

from oasis_eval.record import read_records
from oasis_eval.report.render import render
from oasis_eval.report.tables import build_table, load_spec


def table(folder: Path) -> str:
    """The default table, as CSV with every digit."""
    built = build_table(list(read_records([folder])), load_spec("results"), folders=[folder])
    return render(built, format="csv")


def files(folder: Path) -> dict[str, str]:
    """Every file by name; of records everything but when and how long they were measured."""
    found = {}
    for path in sorted(folder.iterdir()):
        text = path.read_text()
        if path.suffix == ".json":
            value = json.loads(text)
            for name in ("started", "seconds"):
                value["provenance"].pop(name)
            text = json.dumps(value)
        found[path.name] = text
    return found
