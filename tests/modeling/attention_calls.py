"""Attention calls that several test modules make: shapes, masks, gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oasis_eval.modeling.attention import AttentionOutput, attend
from oasis_eval.modeling.normalizers import Normalizer

BATCH, HEADS, WIDTH = 2, 4, 8
SCALING = WIDTH**-0.5
SOFTMAX1 = Normalizer("softmax1")
EVERY = (
    Normalizer("softmax"),
    SOFTMAX1,
    Normalizer("clipped_softmax", gamma=-0.02),
    Normalizer("sparsemax"),
    Normalizer("entmax15"),
    Normalizer("softpick"),
    Normalizer("sink"),
)


class Call(NamedTuple):
    """Shapes and mask of one attention call."""

    num_queries: int
    num_keys: int
    num_key_heads: int = HEADS
    padding: int = 0
    """Hidden keys at the left of batch row 0; -1: no mask at all."""


CALLS = {
    "causal": Call(9, 9, padding=-1),
    "causal, grouped heads": Call(9, 9, num_key_heads=2, padding=-1),
    "one key head": Call(9, 9, num_key_heads=1, padding=-1),
    "left-padded": Call(9, 9, padding=4),
    "left-padded, grouped heads": Call(9, 9, num_key_heads=2, padding=4),
    "one query, cached keys": Call(1, 9, num_key_heads=2, padding=-1),
    "one query, padded cache": Call(1, 9, num_key_heads=2, padding=3),
    "chunk, cached keys": Call(4, 9, num_key_heads=2, padding=-1),
    "chunk, padded cache": Call(4, 9, num_key_heads=2, padding=3),
    "all keys hidden": Call(3, 5, num_key_heads=2, padding=5),
    "longer than a kernel block": Call(300, 300, num_key_heads=2, padding=17),
}


def make(call: Call, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    """Return query, key and value of unit variance, requiring gradients."""
    random = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(BATCH, heads, length, WIDTH, generator=random, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads, length in (
            (HEADS, call.num_queries),
            (call.num_key_heads, call.num_keys),
            (call.num_key_heads, call.num_keys),
        )
    )


def mask_of(call: Call) -> Tensor | None:
    """Return the boolean mask [B, 1, T, S] of a call."""
    if call.padding < 0:
        return None
    mask = torch.ones(BATCH, 1, call.num_queries, call.num_keys, dtype=torch.bool)
    mask = mask.tril(call.num_keys - call.num_queries)
    mask[0, ..., : call.padding] = False
    return mask


def run(
    call: Call,
    tensors: tuple[Tensor, ...],
    normalizer: Normalizer = SOFTMAX1,
    *,
    null_logit: Tensor | None = None,
    eager: bool,
) -> AttentionOutput:
    """Attend with null mass; weights are asked for exactly where the eager path is wanted."""
    if normalizer.kind == "sink" and null_logit is None:
        null_logit = torch.linspace(-1, 2, HEADS)
    return attend(
        *tensors,
        mask_of(call),
        normalizer=normalizer,
        scaling=SCALING,
        null_logit_H=null_logit,
        need_probs=eager,
        need_null_mass=True,
    )


def gradients(
    output: AttentionOutput, leaves: tuple[Tensor, ...], upstream: str
) -> tuple[Tensor, ...]:
    """Differentiate a fixed random combination of context, null mass or both."""
    random = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64)
    weights = torch.randn(output.context.shape, generator=random, dtype=torch.float64)
    if "context" in upstream:
        loss = loss + (output.context * weights).sum()
    if "null" in upstream:
        assert output.null_mass is not None
        weights = torch.randn(output.null_mass.shape, generator=random, dtype=torch.float64)
        loss = loss + (output.null_mass * weights).sum()
    return torch.autograd.grad(loss, leaves, materialize_grads=True)
