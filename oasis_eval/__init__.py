"""What low-bit quantization does to a language model, measured.

    from oasis_eval import EvaluationSpec, evaluate
    report = evaluate(EvaluationSpec(models=("./my-model",)), Path("results/runs"))

Names are imported on first use, so that `import oasis_eval` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oasis_eval.loading import load, prepare
    from oasis_eval.pipeline import evaluate
    from oasis_eval.quant.backends import quantize_
    from oasis_eval.record import read_records
    from oasis_eval.registry import resolve as resolve_model
    from oasis_eval.report.tables import build_table
    from oasis_eval.spec import EvaluationSpec

__version__ = "0.1.0"

_PUBLIC = {
    "EvaluationSpec": ("oasis_eval.spec", "EvaluationSpec"),
    "build_table": ("oasis_eval.report.tables", "build_table"),
    "evaluate": ("oasis_eval.pipeline", "evaluate"),
    "load": ("oasis_eval.loading", "load"),
    "prepare": ("oasis_eval.loading", "prepare"),
    "quantize_": ("oasis_eval.quant.backends", "quantize_"),
    "read_records": ("oasis_eval.record", "read_records"),
    "resolve_model": ("oasis_eval.registry", "resolve"),
}

__all__ = [
    "EvaluationSpec",
    "__version__",
    "build_table",
    "evaluate",
    "load",
    "prepare",
    "quantize_",
    "read_records",
    "resolve_model",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'oasis_eval' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
