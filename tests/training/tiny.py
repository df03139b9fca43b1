"""A tiny recipe on a tiny text: a run of a dozen steps takes about a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from oasis_eval.parsing import parse
from oasis_eval.spec import TrainRecipe
from oasis_eval.training.run import Plan
from tests.tiny import build_tokenizer, prose, write_jsonl

STEPS = 12


def settings(folder: Path, **changes: object) -> dict[str, Any]:
    """A recipe as YAML has it, with its tokenizer and text in `folder`."""
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        build_tokenizer(adds_start=True).save_pretrained(tokenizer)
        write_jsonl(folder / "text.jsonl", [prose(150 + 7 * n, seed=n) for n in range(12)])
    return {
        "name": "tiny",
        "backbone": {
            "family": "llama",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "num_blocks": 2,
        "tokenizer": str(tokenizer),
        "context": 16,
        "data": [{"name": "prose"}],
        "steps": STEPS,
        "batch_size": 4,
        "micro_batch_size": 2,
        "learning_rate": 0.01,
        "schedule": "cosine",
        "final_rate": 0.1,
        "warmup_steps": 3,
        "betas": [0.9, 0.95],
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "weights": "fp32",
        "log_every": 2,
        "save_every": 4,
        "probe_every": 6,
        "probe_windows": 3,
        **changes,
    }


def recipe(folder: Path, **changes: object) -> TrainRecipe:
    """The recipe as the code has it."""
    return parse(TrainRecipe, settings(folder, **changes), origin="test")


def recipe_file(folder: Path, **changes: object) -> Path:
    """The recipe as a file."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings(folder, **changes)))
    return path


def plan(folder: Path, *, variant: str = "vanilla", seed: int = 0, **changes: Any) -> Plan:
    """A plan of the tiny recipe; `recipe` replaces it."""
    given = {"recipe": changes.pop("recipe", None) or recipe(folder)}
    data = changes.pop("data", {"prose": str(folder / "text.jsonl")})
    return Plan(**given, variant=variant, seed=seed, data=data, **changes)
