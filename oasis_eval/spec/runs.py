"""Runs: one cell, one call of `evaluate`, and what is known of an imported result."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from oasis_eval.parsing import Spec
from oasis_eval.spec.models import Dtype
from oasis_eval.spec.quantization import QuantScheme


class TaskRef(Spec):
    """One task, how it is scored, and on which text."""

    name: str
    """`wikitext2`, `wiki40b`, `bookcorpus`, `gsm8k`, `mini_ppl`, `mini_gsm`, `passkey`, or `text`
    for one's own file."""
    protocol: str
    """Named protocol; for GSM8K it is `gsm8k-5shot` or one with another number of shots."""
    data: str | None = None
    """Local file that replaces the data set, same code path; None: the hub, or what the suite
    generates."""
    limit: int | None = Field(default=None, ge=1)
    """Windows or blocks (perplexity), documents (rolling protocols), questions (GSM8K)."""
    max_new_tokens: int | None = Field(default=256, ge=1)
    """Generation budget of a question; None: not recorded (an imported number)."""
    chat_template: bool = False
    """Whether prompts go through the tokenizer's chat template."""


class RunSpec(Spec):
    """One cell: a model under a scheme on a task."""

    model: str
    scheme: QuantScheme
    task: TaskRef
    dtype: Dtype
    """Dtype in which a quantized model computes; a reference scheme brings its own."""
    seed: int = 0
    batch_size: int = Field(default=1, ge=1)
    device: str = "cpu"
    diagnostics: bool = False
    """Whether outliers, attention and depth routing are measured on the scored windows too."""
    fidelity: Dtype | None = None
    """Dtype of the unquantized model that predictions and answers are compared with; None: they
    are not."""


class ImportedRun(Spec):
    """One result of another program; None is what its file does not say."""

    importer: Literal["lm-eval"]
    """Program that wrote the file."""
    results_sha256: str
    """Of the file."""
    model: str
    scheme: QuantScheme
    task: TaskRef
    dtype: Dtype | None = None
    seed: int = 0
    batch_size: int | None = None
    device: str | None = None
    model_type: str
    """lm-eval's `--model`, for example `hf`."""
    model_args: dict[str, str] = Field(default={})
    task_version: str | None = None
    num_fewshot: int | None = None


class Settings(Spec):
    """How cells are measured, whatever models, schemes and tasks they combine."""

    protocols: tuple[str, ...] = ()
    """Protocols, each used by the tasks it fits; a task that none fits uses its default."""
    window: int | None = Field(default=None, ge=2)
    """Window of every perplexity protocol, which thereby gets another name."""
    data: dict[str, str] = Field(default={})
    """Local files by task name; `gsm8k:train` (examples) and `calibration` have own keys."""
    limit: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Generation budget of a question; None: the task's own."""
    chat_template: bool = False
    batch_size: int = Field(default=1, ge=1)
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:1`, `mps`, `xpu`, ..."""
    dtype: Dtype | None = None
    """None: fp32 on the CPU, bf16 on an accelerator."""
    diagnostics: bool = False
    """Whether outliers, attention and depth routing are measured on the windows of every
    perplexity task, in a second pass, and predictions and answers compared with those of the
    unquantized model."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        if not re.fullmatch(r"(cpu|mps|(cuda|xpu)(:\d+)?)", name):
            raise ValueError("expected cpu, cuda, cuda:1, mps or xpu")
        return name


class EvaluationSpec(Settings):
    """One call of `evaluate`: every combination of models, schemes and tasks is a cell."""

    models: tuple[str, ...] = Field(min_length=1)
    """Card names, folders, GGUF files, `package:NAME` or hub ids with a revision."""
    schemes: tuple[str, ...] = Field(default=("fp32", "w8a8", "w4a4"), min_length=1)
    """Preset names or YAML files."""
    tasks: tuple[str, ...] = Field(default=("wikitext2",), min_length=1)
    seed: int | None = None
    """Seed that the models were trained with; None: what their cards say, or 0."""
