"""Two folders of records with samples, to be compared."""

from __future__ import annotations

import math
import random
from pathlib import Path

from oasis_eval.record import RunRecord, write_record, write_samples
from tests.report.samples import NASTY, record

TOKENS = 1023
Rows = list[dict[str, object]]


def windows(
    mean: float, *, seed: int, num: int = 24, shift: float = 0.0, noise: float = 0.01
) -> Rows:
    """Losses of the same windows of a text; `seed` is the model's own part of them."""
    text, own = random.Random(7), random.Random(seed)
    return [
        {
            "document": 0,
            "window": index,
            "nll_nats": TOKENS * (mean + text.gauss(0, 0.3) + shift + own.gauss(0, noise)),
            "num_tokens": TOKENS,
            "squares": 0.0,
        }
        for index in range(num)
    ]


def answers(share: float, *, seed: int, num: int = 60, like: Rows | None = None) -> Rows:
    """Answers to the same questions, the first four out of five as in `like`."""
    chance = random.Random(seed)
    rows: Rows = []
    for index in range(num):
        right = chance.random() < share
        if like is not None and index % 5:
            right = bool(like[index]["strict"])
        rows.append(
            {
                "question": index,
                "text": f"How many {index}?",
                "reference": f"#### {index}",
                "strict": right,
                "flexible": right or index % 10 == 0,
                "answer_nll_nats": 20.0 + index % 3 + chance.gauss(0, 1),
                "answer_tokens": 10 + index % 4,
            }
        )
    return rows


def text_record(rows: Rows, *where: object, **settings: object) -> RunRecord:
    """Make the record whose samples are `rows`."""
    metrics = {
        "nll_nats": math.fsum(float(row["nll_nats"]) for row in rows),  # type: ignore[arg-type]
        "num_tokens": math.fsum(float(row["num_tokens"]) for row in rows),  # type: ignore[arg-type]
    }
    extra = settings.pop("more", {})
    settings.setdefault("count", len(rows))
    return record(*where, metrics=metrics | extra, **settings)  # type: ignore[arg-type,operator]


def question_record(rows: Rows, *where: object, **settings: object) -> RunRecord:
    """Make the record of GSM8K whose samples are `rows`."""

    def mean(name: str) -> float:
        return sum(float(row[name]) for row in rows) / len(rows)  # type: ignore[arg-type]

    metrics = {
        "pass@1": mean("strict"),
        "pass@1_flexible": mean("flexible"),
        "answer_nll_per_token": mean("answer_nll_nats") / mean("answer_tokens"),
    }
    return record(*where, "gsm8k", metrics=metrics, count=len(rows), **settings)  # type: ignore[arg-type]


def store(folder: Path, found: RunRecord, rows: Rows) -> RunRecord:
    """Write a record and its samples."""
    write_record(folder, found)
    if rows:
        write_samples(folder, found.key, rows)
    return found


def two_folders(root: Path) -> tuple[Path, Path]:
    """Write what the golden files show: gains, losses, ties, NaN, infinity, failures, odd names."""
    first, second = root / "a", root / "b"
    reference = windows(3.0, seed=1)
    broken = [{**row, "nll_nats": math.nan} if at == 3 else row for at, row in enumerate(reference)]
    huge = [{**row, "nll_nats": TOKENS * 800.0} for row in reference]
    for model, rows in {
        "tiny": windows(3.0, seed=2, shift=0.02),
        NASTY: reference,
        "broken": broken,
        "huge": huge,
        "short": reference[:1],
    }.items():
        own = reference[: len(rows)]
        store(first, text_record(own, model, "fp32"), own)
        store(second, text_record(rows, model, "w8a8"), rows)
    store(first, text_record(reference, "crashed", "fp32"), reference)
    store(second, record("crashed", "w8a8", status="failed", reason="out of memory"), [])
    right = answers(0.6, seed=3)
    changed = answers(0.2, seed=4, like=right)
    store(first, question_record(right, "tiny", "fp32"), right)
    store(second, question_record(changed, "tiny", "w8a8"), changed)
    store(first, text_record(reference, "tiny", "fp32", "wiki40b"), reference)
    return first, second
