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
    "depth_query",
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


NumberType = Literal["int", "fp8_e4m3", "fp4_e2m1", "nf4", "bnb_fp4"]
ScaleType = Literal["fp32", "e8m0", "e4m3"]


class TensorFormat(Spec):
    """Number format of one kind of tensor.

    Integer levels: symmetric -(2^(b-1)-1)..2^(b-1)-1; asymmetric 0..2^b-1, range extended to
    hold 0. Floats: the finite values of the named type.
    """

    type: NumberType = "int"
    """Integers; OCP floats e4m3 and e2m1; the 4-bit code books of bitsandbytes."""
    bits: int = Field(ge=2, le=8)
    granularity: Granularity
    """What shares one scale: the tensor, an output channel, a token, or a group of inputs."""
    group_size: int | None = Field(default=None, ge=1)
    """Inputs per group; the last group of a row may be shorter and the coverage says so."""
    scales: ScaleType = "fp32"
    """Type of the scales of `fp4_e2m1`: a power of two (MX), or 8-bit floats under one fp32 scale
    per tensor (NV)."""
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
        if self.type != "int":
            self._check_float()
        elif self.scales != "fp32":
            raise ValueError(f"integer formats have fp32 scales, found 'scales: {self.scales}'")
        return self

    def _check_float(self) -> None:
        width = 8 if self.type == "fp8_e4m3" else 4
        if self.bits != width:
            raise ValueError(f"type {self.type!r} has {width} bits, found {self.bits}")
        if not self.symmetric:
            raise ValueError(f"type {self.type!r} is symmetric")
        if self.scales != "fp32" and (self.type, self.granularity) != ("fp4_e2m1", "group"):
            raise ValueError("scales other than fp32 need type 'fp4_e2m1' and granularity 'group'")


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


class SmoothQuant(Spec):
    """Moves the spread of activations into weights, input channel by input channel.

    Source: Xiao et al., "SmoothQuant", ICML 2023.
    """

    kind: Literal["smooth"] = "smooth"
    alpha: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the spread that moves: scales are max|X|^alpha / max|W|^(1 - alpha)."""


class Hadamard(Spec):
    """Rotates the residual stream, and what enters `o_proj` and `down_proj`, by Hadamard matrices.

    Source: Ashkboos et al., "QuaRot", NeurIPS 2024.
    """

    kind: Literal["hadamard"] = "hadamard"
    seed: int = 0
    """Of the random signs."""
    online: bool = True
    """Whether inputs of `o_proj` and `down_proj` are rotated in the forward pass, too."""


class Gptq(Spec):
    """Rounds weights one input at a time and lets the rest make up for the error.

    Source: Frantar et al., "GPTQ", ICLR 2023.
    """

    kind: Literal["gptq"] = "gptq"
    damping: float = Field(default=0.01, gt=0.0)
    """Share of the mean diagonal that is added to the Hessian."""
    order: Literal["natural", "activation"] = "natural"
    """Inputs from left to right, or those of largest activations first."""


Transform = Annotated[SmoothQuant | Hadamard | Gptq, Field(discriminator="kind")]


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
    """Required by static activation ranges, SmoothQuant and GPTQ."""
    transforms: tuple[Transform, ...] = ()
    """What is done to the model before it is quantized, in this order."""
    outlier_threshold: float | None = Field(default=None, gt=0.0)
    """`bitsandbytes` int8: input columns with a value this large stay in floating point."""

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
        self._check_transforms()
        return self

    def _check_transforms(self) -> None:
        kinds = [transform.kind for transform in self.transforms]
        if kinds != [kind for kind in ("smooth", "hadamard", "gptq") if kind in kinds]:
            raise ValueError("'transforms' are smooth, hadamard, gptq in this order, each once")
        if "gptq" in kinds and self.weights is None:
            raise ValueError("GPTQ rounds weights, and the scheme has no 'weights'")
        if self.calibration is None and {"smooth", "gptq"} & set(kinds):
            raise ValueError("SmoothQuant and GPTQ need 'calibration'")
        if self.execution == "none" and kinds:
            raise ValueError("a reference scheme transforms nothing")

    @property
    def is_static(self) -> bool:
        """Whether activation ranges are fixed by calibration."""
        return self.activations is not None and self.activations.ranges != "dynamic"


# --- runs -------------------------------------------------------------------------------------


class TaskRef(Spec):
    """One task, how it is scored, and on which text."""

    name: str
    """`wikitext2`, `wiki40b`, `bookcorpus`, `gsm8k`, `mini_ppl`, `mini_gsm`, or `text` for one's
    own file."""
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


# --- training ---------------------------------------------------------------------------------


class BackboneSpec(Spec):
    """Sizes of a decoder that is trained from scratch."""

    family: Literal["llama", "qwen3"]
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    """Decoder layers; each is two sublayers of depth routing."""
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    """None: hidden_size / num_heads."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Rows of the embedding; None: as many as the tokenizer has tokens."""
    tie_embeddings: bool = True
    """Whether the output head is the embedding."""
    rope_theta: float = Field(default=10000.0, gt=0.0)
    rms_norm_eps: float = Field(default=1e-5, gt=0.0)
    initializer_range: float = Field(default=0.02, gt=0.0)
    """Standard deviation of initial weights."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_heads {self.num_heads}; "
                "give 'head_dim'"
            )
        return self


class TextSource(Spec):
    """One text that a recipe trains on."""

    name: str = Field(min_length=1)
    """`mini` (the suite's own text, generated), a data set (`wiki40b`, `bookcorpus`, ...), or any
    other name, which then needs its file: `--data NAME=FILE`."""
    split: str = "train"
    """Split of a data set on the hub."""
    share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Part of the training blocks; None for all sources: in proportion to their sizes."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that are used, from the start; None: all. `mini`, which never ends, needs it."""
    problem_share: float | None = Field(default=None, ge=0.0, le=1.0)
    """`mini`: part of the documents that are arithmetic problems, not stories."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.name == "mini" and self.max_tokens is None:
            raise ValueError("'mini' is generated without end: give 'max_tokens'")
        if self.name != "mini" and self.problem_share is not None:
            raise ValueError("'problem_share' goes with 'mini' and with nothing else")
        return self


class TrainRecipe(Spec):
    """How a model is trained: sizes, text, optimizer, schedule. Variant and seed come beside it."""

    name: str = Field(min_length=1)
    description: str = ""
    backbone: BackboneSpec
    """Not used where training starts from a checkpoint, which brings its own."""
    num_blocks: int = Field(default=8, ge=1)
    """Blocks of depth routing, for wirings that have blocks."""
    tokenizer: str = Field(min_length=1)
    """`mini`, a folder, or `owner/name@revision` on the hub."""
    context: int = Field(ge=2)
    """Tokens of a training sequence; documents are packed and cut into blocks of this length."""
    start_each_block: bool = False
    """Whether a block begins with the tokenizer's start tokens, wherever the cut is, as the windows
    of `diagnose` do. Without, they stand at the beginnings of documents only."""
    data: tuple[TextSource, ...] = Field(min_length=1)
    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_size: int = Field(ge=1)
    """Sequences of one step, over all devices and accumulated passes."""
    micro_batch_size: int = Field(ge=1)
    """Sequences of one forward pass on one device; the rest of a batch is accumulated."""
    learning_rate: float = Field(gt=0.0)
    """At the end of the warm-up."""
    schedule: Literal["linear", "cosine", "constant"]
    """From the end of the warm-up to the last step."""
    final_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """Learning rate at the last step, as a part of the highest one; `constant` has none."""
    warmup_steps: int = Field(ge=0)
    """Steps of linear growth from 0."""
    betas: tuple[float, float]
    """AdamW's decay rates of the mean and of the square of the gradient."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """AdamW's addition to the root of the square."""
    weight_decay: float = Field(ge=0.0)
    decay: Literal["matrices", "matrices_and_vectors"] = "matrices"
    """What decays: tensors of two dimensions, or also norm weights and router queries. Biases,
    null logits and coupling strengths never do."""
    clip_norm: float | None = Field(gt=0.0)
    """Largest norm of the gradient; None: not clipped."""
    gradient_checkpointing: bool = False
    """Whether layers are computed again in the backward pass, which saves memory."""
    weights: Literal["fp32", "bf16"]
    """Dtype of the weights that are written in the end; training keeps fp32."""
    log_every: int = Field(ge=1)
    """Steps between lines of the log."""
    save_every: int = Field(ge=1)
    """Steps between the checkpoints that training can be resumed from."""
    probe_every: int = Field(ge=1)
    """Steps between probes: loss, sinks and outliers on text that is kept out of training."""
    probe_windows: int = Field(default=8, ge=1)
    """Sequences of that text."""

    @field_validator("betas")
    @classmethod
    def _betas_are_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError("both must be at least 0 and below 1")
        return betas

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [(source.name, source.split) for source in self.data]
        if len(set(names)) < len(names):
            raise ValueError("'data' names one text twice")
        shares = [source.share for source in self.data if source.share is not None]
        if shares and (len(shares) < len(self.data) or abs(sum(shares) - 1.0) > 1e-6):
            raise ValueError("'share' must be given for every text and add up to 1, or for none")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is no multiple of micro_batch_size "
                f"{self.micro_batch_size}"
            )
        if self.save_every % self.log_every:
            raise ValueError(
                f"save_every {self.save_every} is no multiple of log_every {self.log_every}; a "
                "resumed run could not repeat the mean losses of the log"
            )
        if self.schedule == "constant" and self.final_rate != 0.0:
            raise ValueError("'final_rate' does not apply to schedule 'constant'")
        return self
