"""Tensor names of a public format and ours, both ways.

A map is a list of rules, one per kind of tensor. A name without a rule is the same on both sides,
which is true of almost everything: only depth routing has names of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from torch import Tensor

Form = Literal["same", "row", "scalar"]
"""What the public tensor looks like: ours; [1, D] where ours is [D]; [] where ours is [1]."""
Shape = tuple[int, ...]

_LAYER = re.compile(r"(?<=model\.layers\.)\d+(?=\.)")
_PLACE = "{layer}"


class Rule(NamedTuple):
    """One kind of tensor; `{layer}` in both names stands for the number of the layer."""

    public: str
    ours: str
    form: Form = "same"


class Mapped(NamedTuple):
    """The other side's name of a tensor."""

    name: str
    form: Form


@dataclass(frozen=True)
class KeyMap:
    """Rules of one format."""

    rules: tuple[Rule, ...] = ()

    @cached_property
    def _by_public(self) -> dict[str, Rule]:
        return {rule.public: rule for rule in self.rules}

    @cached_property
    def _by_ours(self) -> dict[str, Rule]:
        return {rule.ours: rule for rule in self.rules}

    def to_ours(self, name: str) -> Mapped | None:
        """Return our name of a public tensor; None where the format has no such name."""
        template, layer = _split(name)
        rule = self._by_public.get(template)
        if rule is not None:
            return Mapped(_join(rule.ours, layer), rule.form)
        # Our own name of a renamed tensor means nothing in the public format.
        return None if template in self._by_ours else Mapped(name, "same")

    def to_public(self, name: str) -> Mapped | None:
        """Return the public name of one of our tensors; None where the format has none."""
        template, layer = _split(name)
        rule = self._by_ours.get(template)
        if rule is not None:
            return Mapped(_join(rule.public, layer), rule.form)
        return None if template in self._by_public else Mapped(name, "same")


def public_shape(shape: Shape, form: Form) -> Shape:
    """Return the public shape of a tensor that has `shape` with us."""
    if form == "row":
        return (1, *shape)
    return () if form == "scalar" else shape


def shape_as_ours(tensor: Tensor, form: Form) -> Tensor:
    """Return a public tensor in our shape."""
    if form == "row":
        return tensor.squeeze(0)
    return tensor.reshape(1) if form == "scalar" else tensor


def shape_as_public(tensor: Tensor, form: Form) -> Tensor:
    """Return one of our tensors in its public shape."""
    if form == "row":
        return tensor.unsqueeze(0)
    return tensor.reshape(()) if form == "scalar" else tensor


def _split(name: str) -> tuple[str, str | None]:
    found = _LAYER.search(name)
    if found is None:
        return name, None
    return name[: found.start()] + _PLACE + name[found.end() :], found.group()


def _join(template: str, layer: str | None) -> str:
    return template if layer is None else template.replace(_PLACE, layer)
