"""Models: where weights are and what a model is called."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from oasis_eval.parsing import Spec

Dtype = Literal["fp32", "bf16", "fp16"]


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
    seed: int | None = Field(default=None, ge=0)
    """Seed that the model was trained with, which tables average over; None: not known."""
