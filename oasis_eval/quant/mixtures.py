"""Mixtures of experts: what chooses experts, what weighs them, and weights that hide in them.

Routers are known by the class that a model declares as the source of its router logits, never by a
name. Whether a router is a Linear, has one inside or holds a raw matrix, all of it is a router.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class Mixtures(NamedTuple):
    """The modules and parameters of a model's mixtures of experts, by id."""

    routing: frozenset[int]
    """Routers and every module inside of one."""
    gates: frozenset[int]
    """Linears beside a router that make one number a token: the weight of a shared expert."""
    experts: frozenset[int]
    """Raw parameters of two or more dimensions beside a router."""


def mixtures_of(model: nn.Module) -> Mixtures:
    """Return what belongs to the mixtures of experts of a model; empty without one."""
    kinds = tuple(_declared(model))
    routers = [m for m in model.modules() if isinstance(m, kinds) and not _is_whole(m)]
    own = {id(router) for router in routers}
    inside = [module for router in routers for module in router.modules()]
    within = {id(parameter) for module in inside for parameter in module.parameters()}
    blocks = [
        module for module in model.modules() if any(id(child) in own for child in module.children())
    ]
    gates = {
        id(child)
        for block in blocks
        for child in block.children()
        if isinstance(child, nn.Linear) and child.out_features == 1
    }
    experts = {
        id(parameter)
        for block in blocks
        for module in block.modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2 and id(parameter) not in within
    }
    return Mixtures(
        frozenset(id(module) for module in inside), frozenset(gates), frozenset(experts)
    )


def _declared(model: nn.Module) -> Iterator[type[nn.Module]]:
    """Yield the classes that choose experts, as the models of transformers declare them."""
    for module in model.modules():
        declared = getattr(module, "_can_record_outputs", None) or {}
        entry = declared.get("router_logits", ())
        for item in entry if isinstance(entry, list | tuple) else (entry,):
            kind = getattr(item, "target_class", item)
            if isinstance(kind, type) and kind is not nn.Linear and "forward" in vars(kind):
                yield kind


def _is_whole(module: nn.Module) -> bool:
    """Return whether a declared module is a mixture as a whole, experts included."""
    return any(
        isinstance(part, nn.Embedding)
        or hasattr(part, "_apply_gate")
        or any(parameter.dim() >= 3 for parameter in part.parameters(recurse=False))
        for part in module.modules()
    )
