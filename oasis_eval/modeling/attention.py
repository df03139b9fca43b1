"""Scaled dot-product attention under any token normalizer.

Two paths compute the same function. The eager one forms scores and weights and is the reference;
it runs when somebody needs them (`need_probs`, an active tap) or when nothing faster exists. The
fused one serves softmax, softmax1 and sink at the cost of plain fused attention.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from oasis_eval.errors import SpecError
from oasis_eval.modeling.normalizers import Normalizer, normalize
from oasis_eval.modeling.null_attention import (
    KernelSettings,
    has_fused_kernel,
    null_attention,
    repeat_heads,
)
from oasis_eval.modeling.taps import AttentionTaps, is_active


class AttentionOutput(NamedTuple):
    """Result of `attend`."""

    context: Tensor
    """[B, T, H, D], dtype of the query."""
    probs: Tensor | None
    """[B, H, T, S] before dropout; only when `need_probs`."""
    null_mass: Tensor | None
    """[B, H, T] fp32; only when `need_null_mass` and the normalizer has a null."""


def attend(  # noqa: PLR0913 - the tensors and switches of one attention call
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    mask: Tensor | None,
    *,
    normalizer: Normalizer,
    scaling: float,
    null_logit_H: Tensor | None = None,
    is_causal: bool = True,
    softcap: float | None = None,
    dropout: float = 0.0,
    need_probs: bool = False,
    need_null_mass: bool = False,
    taps: AttentionTaps | None = None,
) -> AttentionOutput:
    """Attend from each query to its visible keys.

    Args:
        query_BHTD: Queries.
        key_BKSD: Keys; H is a multiple of K, consecutive query heads share a key head.
        value_BKSD: Values; their width may differ from that of the keys.
        mask: Boolean, broadcastable to [B, H, T, S], True is visible; it is all that hides keys.
            None: the queries are the last T of S positions, and `is_causal` says what they see.
        normalizer: Token normalizer with its constants.
        scaling: Factor on the dot products.
        null_logit_H: Learned null logit, [H] or one number; for softmax1 it replaces `log_n`.
        is_causal: Used only without a mask: whether queries see no later key, or all keys.
        softcap: Cap c of the scores, c * tanh(score / c).
        dropout: Probability of dropping a weight.
        need_probs: Whether to return the weights.
        need_null_mass: Whether to return the null mass; nearly free, and differentiable.
        taps: Observers of this sublayer.

    Raises:
        SpecError: The null logit does not fit the normalizer.
    """
    if null_logit_H is not None and not normalizer.has_null:
        raise SpecError(f"a learned null logit was given, but {normalizer.kind} has no null")
    if normalizer.kind == "sink" and null_logit_H is None:
        raise SpecError("normalizer sink needs its learned logit, found none")
    num_queries, num_keys = query_BHTD.shape[2], key_BKSD.shape[2]
    if mask is None and is_causal and 1 < num_queries != num_keys:
        mask = _causal_mask(num_queries, num_keys, query_BHTD.device)
    is_causal = is_causal and mask is None and num_queries > 1
    observed = taps is not None and (is_active(taps.scores) or is_active(taps.probs))
    null_mass_BHT: Tensor | None = None
    probs_BHTS: Tensor | None = None
    if need_probs or observed or dropout > 0.0 or softcap is not None:
        fused = False
    elif normalizer.kind == "softmax":
        fused = True
    else:
        fused = normalizer.has_null and has_fused_kernel(query_BHTD, key_BKSD, value_BKSD)
    if not fused:
        scores_BHTS = _scores(query_BHTD, key_BKSD, scaling, softcap)
        if is_causal:
            mask = _causal_mask(num_queries, num_keys, query_BHTD.device)
        if taps is not None:
            scores_BHTS = taps.scores(scores_BHTS, mask)
        probs_BHTS, null_mass_BHT = normalize(
            scores_BHTS,
            mask,
            normalizer,
            null_logit=None if null_logit_H is None else null_logit_H.reshape(-1, 1),
        )
        if taps is not None:
            probs_BHTS = taps.probs(probs_BHTS, mask)
        context_BHTD = _mix(F.dropout(probs_BHTS, dropout) if dropout else probs_BHTS, value_BKSD)
    elif normalizer.kind == "softmax":
        context_BHTD = _softmax_attention(
            query_BHTD, key_BKSD, value_BKSD, mask, is_causal=is_causal, scaling=scaling
        )
    else:
        if null_logit_H is None:
            null_logit_H = torch.full((1,), normalizer.log_n, device=query_BHTD.device)
        context_BHTD, null_mass_BHT = null_attention(
            query_BHTD,
            key_BKSD,
            value_BKSD,
            null_logit_H1=null_logit_H.reshape(-1, 1),
            settings=KernelSettings(
                None if mask is None else _bias(mask, query_BHTD), is_causal, scaling
            ),
        )
    context_BTHD = context_BHTD.transpose(1, 2)
    if taps is not None:
        context_BTHD = taps.context(context_BTHD)
        if null_mass_BHT is not None:
            null_mass_BHT = taps.null_mass(null_mass_BHT)
    return AttentionOutput(
        context_BTHD,
        probs_BHTS if need_probs else None,
        null_mass_BHT if need_null_mass else None,
    )


def _causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return [T, S]: the queries are the last T positions and see no later key."""
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return visible.tril(num_keys - num_queries)


def _scores(query_BHTD: Tensor, key_BKSD: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Return scaled and capped dot products [B, H, T, S]."""
    key_BKDS = key_BKSD.transpose(-1, -2)
    # Scaling the queries is one pass over T x D instead of T x S, and overflows later in fp16.
    query_BKGTD = (query_BHTD * scaling).unflatten(1, (key_BKSD.shape[1], -1))
    scores: Tensor = (query_BKGTD @ key_BKDS.unsqueeze(2)).flatten(1, 2)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _mix(probs_BHTS: Tensor, value_BKSD: Tensor) -> Tensor:
    """Return weighted values [B, H, T, D]."""
    probs_BKGTS = probs_BHTS.unflatten(1, (value_BKSD.shape[1], -1))
    context_BHTD: Tensor = (probs_BKGTS @ value_BKSD.unsqueeze(2)).flatten(1, 2)
    return context_BHTD


def _softmax_attention(  # noqa: PLR0913 - one call of torch
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scaling: float,
) -> Tensor:
    if query_BHTD.is_cuda and mask is not None:
        # With a mask and grouped heads, torch's choice on CUDA is its slow composite.
        key_BKSD = repeat_heads(key_BKSD, query_BHTD.shape[1])
        value_BKSD = repeat_heads(value_BKSD, query_BHTD.shape[1])
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    return F.scaled_dot_product_attention(
        query_BHTD,
        key_BKSD,
        value_BKSD,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query_BHTD.shape[1] != key_BKSD.shape[1],
    )


def _bias(mask: Tensor, query_BHTD: Tensor) -> Tensor:
    """Return the additive form of a boolean mask, 4-dimensional, in the dtype of the query."""
    zero = torch.zeros((), dtype=query_BHTD.dtype, device=query_BHTD.device)
    bias = torch.where(mask, zero, -math.inf)
    return bias[(None,) * (4 - bias.dim())]
