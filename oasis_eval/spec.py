"""What was asked for: every setting of the suite, in frozen types that are checked once.

A value of these types is valid wherever it appears: YAML files and command-line text are checked
when they become one (`parsing.parse`), and no code behind that border checks them again.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from oasis_eval.parsing import Spec

Dtype = Literal["fp32", "bf16", "fp16"]
Granularity = Literal["tensor", "channel", "token", "group"]
RangeEstimator = Literal["dynamic", "minmax", "running_minmax", "percentile", "mse"]
Backend = Literal["none", "fake", "torch", "bitsandbytes", "quanto", "torchao", "lm-eval"]
Execution = Literal["none", "fake", "real", "unknown"]
"""`unknown`, with backend `lm-eval`: an imported number whose precision nobody recorded."""
Region = Literal[
    "linear_inputs",
    "linear_outputs",
    "attention_scores",
    "attention_probs",
    "attention_context",
    "attention_gate",
    "kv_cache",
    "depth_router",
    "depth_weights",
    "depth_sources",
    "residual",
    "embedding",
    "lm_head",
]


# --- models -----------------------------------------------------------------------------------


class HubSource(Spec):
    """A repository on the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    repo: str
    """`owner/name`."""
    revision: str
    """Commit hash, tag or branch; a commit hash makes the card reproducible."""


class DirSource(Spec):
    """A local folder in Hugging Face layout with safetensors weights."""

    kind: Literal["dir"] = "dir"
    path: str


class GgufSource(Spec):
    """A local GGUF file."""

    kind: Literal["gguf"] = "gguf"
    path: str


class PackageSource(Spec):
    """Weights that an installed Python package carries."""

    kind: Literal["package"] = "package"
    package: str
    """Import name of the package."""
    install: str
    """The command that installs it, printed when it is missing."""
    file: str | None = None
    """fnmatch pattern of the GGUF file inside the package; exactly one file may match."""
    assemble: str | None = None
    """`module:function` that returns the path of the GGUF file, where it comes in parts."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.file is None) == (self.assemble is None):
            raise ValueError("exactly one of 'file' and 'assemble' must be given")
        return self


class NamedSource(Spec):
    """A name alone, as in an imported result: whether a folder or a repository is not recorded."""

    kind: Literal["name"] = "name"
    name: str


Source = Annotated[
    HubSource | DirSource | GgufSource | PackageSource | NamedSource, Field(discriminator="kind")
]


class ModelCard(Spec):
    """One model: where its weights are and what it is called in tables."""

    name: str = Field(min_length=1)
    """What `evaluate` is given."""
    family: str
    """`model_type` of its configuration, for example `llama`; a mismatch is refused."""
    variant: str = "plain"
    """Architecture variant, for example `vanilla`, `oasis`; `plain` for an unmodified model."""
    source: Source
    dtype: Dtype | None = None
    """Dtype of the stored weights, where the source is known to have one."""
    label: str
    """Row label in tables; says when weights were quantized before (GGUF)."""
    context_length: int | None = Field(default=None, ge=1)
    """Positions the model was trained for; None: the configuration's."""


# --- quantization -----------------------------------------------------------------------------


class TensorFormat(Spec):
    """Integer format of one kind of tensor.

    Levels: symmetric -(2^(b-1)-1)..2^(b-1)-1; asymmetric 0..2^b-1, range extended to hold 0.
    """

    bits: int = Field(ge=2, le=8)
    granularity: Granularity
    """What shares one scale: the tensor, an output channel, a token, or a group of inputs."""
    group_size: int | None = Field(default=None, ge=1)
    """Inputs per group; the last group of a row may be shorter and the coverage says so."""
    symmetric: bool = True
    ranges: RangeEstimator = "minmax"
    """`dynamic` (activations only): from the tensor at hand. Others: fixed before evaluation."""
    percentile: float = Field(default=100.0, gt=50.0, le=100.0)
    """Upper percentile kept as range (the lower one mirrors it); 100 is the extremes."""
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Weight of the old range in `running_minmax`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError("'group_size' goes with granularity 'group' and with no other")
        if self.ranges == "percentile" and self.percentile == 100.0:
            raise ValueError("ranges 'percentile' needs a 'percentile' below 100")
        if self.percentile < 100.0 and self.ranges not in ("percentile", "running_minmax"):
            raise ValueError(f"'percentile' does not apply to ranges {self.ranges!r}")
        return self


class Calibration(Spec):
    """Text that fixes static activation ranges."""

    corpus: str = "builtin"
    """`builtin` (the text shipped with the suite), a data-set name of `tasks`, or a path."""
    split: str | None = None
    """Split of a named data set."""
    num_batches: int = Field(default=4, ge=1)
    batch_size: int = Field(default=1, ge=1)
    length: int = Field(default=512, ge=2)
    """Tokens per sequence."""
    seed: int = 0
    """Which sequences of the text are taken."""
    special_tokens: bool = True
    """Whether the tokenizer's default special tokens head each sequence."""


class QuantScheme(Spec):
    """What is quantized, how, and by whom."""

    name: str = Field(min_length=1)
    description: str = ""
    """One line for `oasis-eval schemes` and table footnotes."""
    backend: Backend = "fake"
    execution: Execution = "fake"
    dtype: Dtype | None = None
    """Compute dtype of a reference scheme (`fp32`, `bf16`, `fp16`); None: the run's."""
    weights: TensorFormat | None = None
    activations: TensorFormat | None = None
    regions: tuple[Region, ...] = ("linear_inputs",)
    """Where `activations` applies; weights of every covered Linear follow `weights`."""
    skip: tuple[str, ...] = ()
    """fnmatch patterns on whole dotted module names; the LM head stays protected besides."""
    calibration: Calibration | None = None
    """Required by static activation ranges."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.backend == "none") != (self.execution == "none"):
            raise ValueError("backend 'none' goes with execution 'none'")
        quantizes = self.weights is not None or self.activations is not None
        if (self.backend == "lm-eval") != (self.execution == "unknown"):
            raise ValueError("backend 'lm-eval' goes with execution 'unknown'")
        if self.execution == "unknown":
            if quantizes:
                raise ValueError("what an imported number was quantized to is not known")
            return self
        if (self.execution == "none") == quantizes:
            raise ValueError("a scheme quantizes weights or activations unless execution is 'none'")
        if self.execution == "none" and self.dtype is None:
            raise ValueError("a reference scheme states its 'dtype'")
        if self.weights is not None:
            if self.weights.ranges in ("dynamic", "running_minmax"):
                raise ValueError(f"weights cannot have ranges {self.weights.ranges!r}")
            if self.weights.granularity == "token":
                raise ValueError("weights have no tokens: use 'channel', 'group' or 'tensor'")
        if self.activations is not None:
            static = self.activations.ranges != "dynamic"
            if static and self.calibration is None:
                raise ValueError("static activation ranges need 'calibration'")
            if static and self.activations.granularity not in ("tensor", "channel"):
                raise ValueError("static activation ranges are per 'tensor' or per 'channel'")
            if not self.regions:
                raise ValueError("'activations' need at least one region")
        return self

    @property
    def is_static(self) -> bool:
        """Whether activation ranges are fixed by calibration."""
        return self.activations is not None and self.activations.ranges != "dynamic"


# --- runs -------------------------------------------------------------------------------------


class TaskRef(Spec):
    """One task, how it is scored, and on which text."""

    name: str
    """`wikitext2`, `wiki40b`, `bookcorpus`, `gsm8k`, or `text` for a file of one's own."""
    protocol: str
    """Named protocol; for GSM8K it is `gsm8k-5shot` or one with another number of shots."""
    data: str | None = None
    """Local file that replaces the data set, same code path; None: the hub."""
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


class EvaluationSpec(Spec):
    """One call of `evaluate`: every combination of models, schemes and tasks is a cell."""

    models: tuple[str, ...] = Field(min_length=1)
    """Card names, folders, GGUF files, `package:NAME` or hub ids with a revision."""
    schemes: tuple[str, ...] = Field(default=("fp32", "w8a8", "w4a4"), min_length=1)
    """Preset names or YAML files."""
    tasks: tuple[str, ...] = Field(default=("wikitext2",), min_length=1)
    protocols: tuple[str, ...] = ()
    """Protocols, each used by the tasks it fits; a task that none fits uses its default."""
    window: int | None = Field(default=None, ge=2)
    """Window of every perplexity protocol, which thereby gets another name."""
    data: dict[str, str] = Field(default={})
    """Local files by task name; `gsm8k:train` and `calibration` have keys of their own."""
    limit: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)
    chat_template: bool = False
    batch_size: int = Field(default=1, ge=1)
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:1`, `mps`, `xpu`, ..."""
    dtype: Dtype | None = None
    """None: fp32 on the CPU, bf16 on an accelerator."""
    seed: int = 0
    diagnostics: bool = False
    """Whether outliers, attention and depth routing are measured on the windows of every
    perplexity task, in a second pass."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        if not re.fullmatch(r"(cpu|mps|(cuda|xpu)(:\d+)?)", name):
            raise ValueError("expected cpu, cuda, cuda:1, mps or xpu")
        return name


# --- tables -----------------------------------------------------------------------------------


Dimension = Literal["model", "family", "variant", "scheme", "task", "protocol", "metric", "seed"]


class TableSpec(Spec):
    """Rows, columns and decorations of a result table."""

    name: str = Field(default="results", min_length=1)
    """Label of the LaTeX table, `tab:<name>`."""
    caption: str | None = None
    """Plain text; every format escapes it by its own rules."""
    rows: tuple[Dimension, ...] = Field(default=("model",), min_length=1)
    """Dimensions down the side, outermost first."""
    columns: tuple[Dimension, ...] = Field(
        default=("task", "protocol", "metric", "scheme"), min_length=1
    )
    """Dimensions across the top, outermost first; `protocol` is printed only where it is needed
    to tell columns apart, since a footnote names it anyway."""
    metrics: tuple[str, ...] = Field(
        default=("token_perplexity", "word_perplexity", "pass@1"), min_length=1
    )
    """Metrics to show, in this order; one that a task does not have takes no column."""
    show: Literal["all", "first"] = "all"
    """Whether a task under a protocol shows all of these metrics or the first that it has."""
    where: dict[str, tuple[str, ...]] = Field(default={})
    """Keep only records whose field matches one of the patterns (fnmatch); fields are the columns
    of the long form, for example `{protocol: [gptq-2048], limit: ["8"]}`."""
    order: dict[Dimension, tuple[str, ...]] = Field(default={})
    """Values that come first in a dimension; the rest follow in natural order."""
    baseline: str | None = None
    """Model, label, variant or scheme that relative changes refer to; `reference` is the scheme
    that quantizes nothing."""
    change: Literal["rows", "columns"] = "rows"
    """Whether relative changes (%) are rows under their values or columns beside them."""
    uncertainty: Literal["none", "seeds", "all"] = "seeds"
    """What follows a value after `±`: nothing; the standard deviation over seeds; and for a single
    run its standard error too, where that is known."""

    best: Literal["none", "significant"] = "none"
    """Whether the best of each column is bold: only if a paired test tells it from the next, else
    those that are not told apart share the bold. Needs the samples beside the records."""
    change_interval: bool = False
    """Whether relative changes of perplexities have their paired interval, where there are samples
    of both."""

    @model_validator(mode="after")
    def _dimensions_once(self) -> Self:
        used = self.rows + self.columns
        twice = sorted({item for item in used if used.count(item) > 1})
        if twice:
            raise ValueError(f"dimensions used twice in rows and columns: {', '.join(twice)}")
        return self
