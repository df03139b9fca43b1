"""Made records for the tests of tables: any model, scheme, task, outcome."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from oasis_eval.record import (
    DataInfo,
    Metric,
    ProtocolInfo,
    Provenance,
    RunRecord,
    Status,
)
from oasis_eval.spec import (
    Calibration,
    DirSource,
    ModelCard,
    QuantScheme,
    RunSpec,
    TaskRef,
    TensorFormat,
)

SUMMARIES = {
    "gptq-1024": "non-overlapping windows of 1024 tokens, tail dropped, token perplexity",
    "gptq-2048": "non-overlapping windows of 2048 tokens, tail dropped, token perplexity",
    "rolling-word": "documents in rolling windows, perplexity per word",
    "gsm8k-5shot": "5 shots, greedy, first completion",
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def scheme(preset: str, **changes: object) -> QuantScheme:
    """`fp32`, `bf16`, `fp16`, or `w<bits>a<bits>` with anything behind it."""
    value: dict[str, object]
    if preset in ("fp32", "bf16", "fp16"):
        value = {"name": preset, "backend": "none", "execution": "none", "dtype": preset}
        return QuantScheme.model_validate(value | changes)
    digits = [int(character) for character in preset if character.isdigit()]
    value = {
        "name": preset,
        "weights": TensorFormat(bits=digits[0], granularity="channel"),
        "activations": TensorFormat(bits=digits[1], granularity="token", ranges="dynamic"),
        "calibration": Calibration() if "static" in preset else None,
    }
    return QuantScheme.model_validate(value | changes)


def protocol(name: str, **details: str | int | bool | None) -> ProtocolInfo:
    window = {"window": int(name.rsplit("-", 1)[1])} if name[-1].isdigit() else {}
    return ProtocolInfo(
        name=name,
        version=1,
        sha256=digest(name),
        summary=SUMMARIES.get(name, name),
        details={**window, **details},
    )


def record(
    model: str = "tiny",
    scheme_name: str | QuantScheme = "fp32",
    task: str = "wikitext2",
    *,
    metrics: Mapping[str, float | tuple[float, float]] | None = None,
    status: Status = "ok",
    reason: str | None = None,
    protocol_name: str | None = None,
    details: Mapping[str, str | int | bool | None] | None = None,
    limit: int | None = None,
    count: int | None = 8,
    seed: int = 0,
    label: str | None = None,
    variant: str = "plain",
    data_text: str = "text",
    warnings: tuple[str, ...] = (),
    checkpoint: str = "a",
    batch_size: int = 1,
    key: str | None = None,
) -> RunRecord:
    """Make a record; a metric is a value or a pair of value and standard error."""
    name = protocol_name or ("gsm8k-5shot" if task.startswith("gsm8k") else "gptq-1024")
    what = scheme_name if isinstance(scheme_name, QuantScheme) else scheme(scheme_name)
    path = f"/home/someone/private/{task}.raw"
    pairs = {
        item: value if isinstance(value, tuple) else (value, None)
        for item, value in (metrics or {}).items()
    }
    identity = (model, what.name, task, name, seed, limit, batch_size, checkpoint, status)
    return RunRecord(
        key=key or digest(repr(identity))[:16],
        spec=RunSpec(
            model=model,
            scheme=what,
            task=TaskRef(name=task, protocol=name, data=path, limit=limit),
            dtype="fp32",
            seed=seed,
            batch_size=batch_size,
        ),
        card=ModelCard(
            name=model,
            family="llama",
            variant=variant,
            source=DirSource(path="/models/x"),
            label=label or model,
        ),
        status=status,
        reason=reason,
        metrics=tuple(
            Metric(task=task, name=item, value=value, stderr=stderr, count=count, protocol=name)
            for item, (value, stderr) in pairs.items()
        ),
        protocols=(protocol(name, **(details or {})),) if status == "ok" else (),
        data=(
            DataInfo(name=task, origin=path, split="test", sha256=digest(data_text), num_rows=4358),
        )
        if status == "ok"
        else (),
        warnings=warnings,
        provenance=Provenance(
            checkpoint_sha256=digest(model + checkpoint + (f"seed {seed}" if seed else "")),
            versions={"torch": "2.13.0"},
            device="cpu",
            dtype="fp32",
            attention="sdpa",
            started="2026-01-01T00:00:00Z",
            seconds=1.0,
            num_threads=1,
        )
        if status == "ok"
        else None,
    )


NASTY = r"a#1_{x}~^\ $5 <b>&|*`[bold]`%v2--"
"""A name with everything that some format gives a meaning."""


def loss(mean: float, tokens: int = 8184) -> dict[str, float]:
    """Return summed loss and token count whose perplexity is exp(mean)."""
    return {"nll_nats": mean * tokens, "num_tokens": float(tokens)}


def gallery() -> list[RunRecord]:
    """Return records with every kind of cell: the ones the golden files show."""
    llama = {"label": "SmolLM2-135M (from Q4)", "details": {"prefix": "none"}}
    gemma = {"label": "Gemma-3-270M (from Q4)", "details": {"prefix": "<bos>"}}
    nasty = {"label": NASTY, "details": {"prefix": "<s>"}}
    gguf = ("weights were quantized before (GGUF Q4)",)
    return [
        record("smollm2-135m", "fp32", metrics=loss(2.9), limit=8, warnings=gguf, **llama),
        record("smollm2-135m", "w8a8", metrics=loss(2.94), limit=8, warnings=gguf, **llama),
        record("smollm2-135m", "w4a4", metrics=loss(9.7), limit=8, warnings=gguf, **llama),
        record("gemma3-270m", "fp32", metrics=loss(2.7), limit=8, **gemma),
        record("gemma3-270m", "w8a8", metrics={"token_perplexity": math.nan}, limit=8, **gemma),
        record("gemma3-270m", "w4a4", metrics=loss(812.3), limit=8, **gemma),
        *(
            record(NASTY, "fp32", metrics=loss(3.0 + seed / 100), limit=8, seed=seed, **nasty)
            for seed in range(3)
        ),
        *(
            record(NASTY, "w4a4", metrics=loss(6.0 + seed / 10), limit=8, seed=seed, **nasty)
            for seed in range(2)
        ),
        record(NASTY, "w4a4", metrics=loss(900.0), limit=8, seed=2, **nasty),
        record(
            NASTY,
            "w8a8",
            status="unsupported",
            reason="backend 'quanto' has no per-token activations",
            limit=8,
            label=NASTY,
        ),
        record(
            "smollm2-135m", "fp32", "gsm8k", metrics={"pass@1": (0.125, 0.0168)}, count=400, **llama
        ),
        record(
            "smollm2-135m",
            "w8a8",
            "gsm8k",
            metrics={"pass@1": (0.0025, 0.0025)},
            count=400,
            **llama,
        ),
        record(
            "smollm2-135m",
            "w4a4",
            "gsm8k",
            status="failed",
            reason="out of memory after 120 questions (50% done)",
            label=llama["label"],
        ),
        record("gemma3-270m", "fp32", "gsm8k", metrics={"pass@1": (0.0, 0.0)}, count=400, **gemma),
    ]
