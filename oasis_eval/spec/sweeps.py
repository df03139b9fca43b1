"""Sweeps: grids of models, schemes, tasks and seeds."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from oasis_eval.parsing import Spec
from oasis_eval.spec.runs import Settings

SEED = "{seed}"
"""Stands in a model's name for each of the seeds."""


class Exclusion(Spec):
    """Cells that a grid leaves out: those that match every field that is given."""

    models: tuple[str, ...] = ()
    """Names as in the grid, or fnmatch patterns of them; one of them has to match."""
    schemes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _not_everything(self) -> Self:
        if not any((self.models, self.schemes, self.tasks, self.protocols, self.seeds)):
            raise ValueError("an exclusion without a field would leave out every cell")
        return self


class Inclusion(Settings):
    """Cells that a grid has besides its product; what is not given is as in the grid.

    A cell that the grid has already, by model, scheme, task, protocol and seed, is replaced.
    """

    models: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("an inclusion without a field would add nothing")
        return self


class SweepSpec(Settings):
    """A grid: every combination of models, schemes, tasks and seeds is a cell."""

    name: str = Field(default="sweep", min_length=1, max_length=100)
    """What it is called in messages; a file without it is called as the file is."""
    models: tuple[str, ...] = Field(min_length=1)
    """As in `evaluate`; `{seed}` in a name stands for each of `seeds`."""
    schemes: tuple[str, ...] = Field(default=("fp32", "w8a8", "w4a4"), min_length=1)
    tasks: tuple[str, ...] = Field(default=("wikitext2",), min_length=1)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Seeds that models were trained with. A model whose name has no `{seed}` is measured once,
    under its card's seed or else the first of them, since nothing else in an evaluation is random.
    """
    exclude: tuple[Exclusion, ...] = ()
    include: tuple[Inclusion, ...] = ()

    @field_validator("models", "schemes", "tasks", "seeds")
    @classmethod
    def _each_once(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        twice = [value for at, value in enumerate(values) if value in values[:at]]
        if twice:
            raise ValueError(f"{twice[0]!r} is there twice")
        return values

    @model_validator(mode="after")
    def _seeds_are_used(self) -> Self:
        names = [*self.models, *(name for part in self.include for name in part.models)]
        if len(self.seeds) > 1 and not any(SEED in name for name in names):
            raise ValueError(
                f"{len(self.seeds)} seeds, but no model has {SEED} in its name, and nothing else "
                "in an evaluation is random"
            )
        return self
