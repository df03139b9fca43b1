"""Quantization: number formats, regions, transforms, and the scheme that they make up."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from oasis_eval.parsing import Spec
from oasis_eval.spec.models import Dtype

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
    """Text that fixes static activation ranges, and that SmoothQuant and GPTQ look at."""

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
