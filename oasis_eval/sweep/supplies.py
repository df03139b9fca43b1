"""What a cell may read of the folder of records, for where that folder is not."""

from __future__ import annotations

from pathlib import Path

from oasis_eval.baseline import answers_key
from oasis_eval.cells import Cell
from oasis_eval.errors import RecordError
from oasis_eval.lookup import keys_with_less
from oasis_eval.record import read_record


def supplies(out: Path, cell: Cell) -> dict[str, str]:
    """Return files by name: scores that are there already, and answers to compare with.

    Args:
        out: Folder of records.
        cell: With its texts and the digest of its checkpoint.
    """
    answers = answers_key(cell)
    keys = [cell.key, *keys_with_less(cell), *([answers] if answers else [])]
    found: dict[str, str] = {}
    for key in keys:
        path = out / f"{key}.json"
        if not path.exists() or _has_no_numbers(path):
            continue
        for file in (path, out / f"{key}.samples.jsonl"):
            if file.exists():
                found[file.name] = file.read_text(encoding="utf-8", errors="replace")
    return found


def _has_no_numbers(path: Path) -> bool:
    try:
        return read_record(path).status != "ok"
    except RecordError:  # it is as damaged where it goes
        return False
