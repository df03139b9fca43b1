"""Training: a recipe, its backbone and its texts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from oasis_eval.parsing import Spec


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
    """`mini`: part of the text that is arithmetic problems, not stories."""
    repeat_share: float | None = Field(default=None, ge=0.0, le=1.0)
    """`mini`: part of the stories' documents that are a passage told twice."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.name == "mini" and self.max_tokens is None:
            raise ValueError("'mini' is generated without end: give 'max_tokens'")
        for name in ("problem_share", "repeat_share"):
            if self.name != "mini" and getattr(self, name) is not None:
                raise ValueError(f"'{name}' goes with 'mini' and with nothing else")
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
