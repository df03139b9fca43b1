"""Records and samples with everything that a report shows, for its tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from oasis_eval.record import Coverage, LayerStat, ModuleCoverage, RunRecord, write_record
from tests.report.comparisons import (
    answers,
    question_record,
    store,
    text_record,
    windows,
)
from tests.report.samples import gallery, record

EVIL = (
    "</script><script>alert(1)</script>"
    "<img src=x onerror=alert(1)>\"'&amp;|_%<!--\u202egnp\u2066\x00\x1b[31m\u2028 שלום"
)
"""A text that would do something anywhere it is not escaped."""
SHIFTS = {"fp32": 0.0, "w8a8": 0.02, "w4a4": 0.9}
NUM_LAYERS = 3


def layers(scheme: str) -> tuple[LayerStat, ...]:
    """Return diagnostics of three layers, two heads and three routers, with NaN and infinity."""
    factor = {"fp32": 1.0, "w8a8": 1.1, "w4a4": 30.0}[scheme]
    return tuple(_stats(factor, broken=scheme == "w4a4"))


def _stats(factor: float, *, broken: bool) -> Iterator[LayerStat]:
    for layer in range(NUM_LAYERS):
        stem = f"model.layers.{layer}"
        for part, size in (("mlp", 2.0), ("self_attn", 1.0)):
            for tensors in ("outputs", "linear_inputs"):
                norm = factor * size * 10.0 ** (layer + 1)
                yield LayerStat(module=f"{stem}.{part}", name=f"{tensors}.max_inf_norm", value=norm)
                kurtosis = (
                    math.nan
                    if broken and layer == 1 and part == "self_attn"
                    else 3.0 + factor * size
                )
                yield LayerStat(module=f"{stem}.{part}", name=f"{tensors}.kurtosis", value=kurtosis)
        for head in range(2):
            mass = 0.2 + 0.5 * head
            yield LayerStat(module=f"{stem}.self_attn", name=f"head.{head}.sink_mass", value=mass)
            yield LayerStat(module=f"{stem}.self_attn", name=f"head.{head}.null_mass", value=0.0)
        for source in range(layer + 2):
            weight = math.inf if broken and layer == source == 0 else 1.0 / (layer + 2)
            name = f"depth.source.{source}.weight"
            yield LayerStat(module=f"{stem}.router", name=name, value=weight)
    yield LayerStat(module="model.norm", name="outputs.max_inf_norm", value=factor)
    yield LayerStat(module="model.norm", name="outputs.kurtosis", value=3.0)


def coverage() -> Coverage:
    """Return three quantized layers, a short last group, and a head that is left alone."""
    modules = [
        ModuleCoverage(
            module=f"model.layers.{layer}.mlp.up_proj",
            quantized=True,
            weight_bits=8,
            weight_granularity="channel",
            activation_bits=8,
            activation_granularity="token",
            activation_static=False,
            note="a short last group" if layer == 2 else None,
        )
        for layer in range(NUM_LAYERS)
    ]
    modules.append(ModuleCoverage(module="lm_head", quantized=False, reason="the head stays"))
    return Coverage(
        modules=tuple(modules),
        num_linear=4,
        num_quantized=3,
        effective_weight_bits=8.25,
        bytes_before=4_000_000,
        bytes_after=1_040_000,
    )


def completed(rows: list[dict[str, object]], scheme: str) -> list[dict[str, object]]:
    """Add completions to answers."""
    return [
        {
            **row,
            "completion": f" {scheme} says {index}.\n#### {index if row['strict'] else -1}",
            "cut": index % 7 == 0,
            "unread": index % 11 == 0,
        }
        for index, row in enumerate(rows)
    ]


def write_gallery(folder: Path) -> Path:
    """Write what the golden file shows: the tables' gallery, samples, layers, an evil name."""
    for item in gallery():
        write_record(folder, item)
    right = answers(0.6, seed=3)
    for number, (scheme, shift) in enumerate(SHIFTS.items()):
        rows = right if number == 0 else answers(0.5 / number, seed=number, like=right)
        rows = completed(rows, scheme)
        rows[2]["completion"] = EVIL
        asked = store(folder, question_record(rows, "tiny", scheme), rows)
        path = folder / f"{asked.key}.samples.jsonl"
        # Half a surrogate pair, as another program's JSON may hold it.
        path.write_text(path.read_text("utf-8").replace("fp32 says 0", r"\ud800 says 0"), "utf-8")
        text = windows(3.0, seed=number, shift=shift)
        found = text_record(text, "tiny", scheme, limit=8).model_copy(
            update={
                "layers": layers(scheme),
                "coverage": coverage() if number else None,
                "warnings": ("read from /home/someone/private/deep/text.raw",) if number else (),
            }
        )
        store(folder, found, text)
    write_record(folder, evil_failure())
    return folder


def evil_failure() -> RunRecord:
    """Return a failed record in which every text is hostile."""
    failed = record(EVIL, "w4a4", limit=8, status="failed", reason=EVIL, label=EVIL, key="evil")
    return failed.model_copy(
        update={"traceback": f'Traceback:\n  File "/home/someone/private/lib/x.py"\n{EVIL}'}
    )


def many(number: int) -> list[RunRecord]:
    """Return that many records of models, schemes and two tasks, some failed, with layers."""
    schemes = ["fp32", "w8a8", "w4a4", "w6a6", "w8a4"]
    records = []
    for at in range(number):
        model, scheme = f"model-{at // 10}", schemes[at // 2 % 5]
        task = ("wikitext2", "wiki40b")[at % 2]
        if at % 37 == 36:
            records.append(record(model, scheme, task, status="failed", reason="out of memory"))
            continue
        found = record(
            model, scheme, task, metrics={"token_perplexity": 10.0 + at % 13 + at / number}
        )
        known = scheme if scheme in SHIFTS else "w8a8"
        records.append(found.model_copy(update={"layers": layers(known), "coverage": coverage()}))
    return records
