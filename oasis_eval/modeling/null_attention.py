"""Fused attention with a null: softmax1 and sink at the price of plain fused attention.

A fused kernel returns softmax attention O and the log-sum-exp of its scores. With a null logit b,

    output     = O * sigmoid(lse - b)
    null mass  = sigmoid(b - lse)
    lse1       = logaddexp(lse, b)

are exact. The backward pass needs no formula of its own: a fused backward computes

    weights P = exp(scores - lse),   d scores = P * (dP - rowsum(d out * out))

and with lse1 and the softmax1 output in place of lse and O this is the gradient of softmax1. A
gradient g into the null mass adds `null mass * g` to that row sum; `_raise_row_dot` puts it there.

The kernels are torch's own, called below the autograd layer because the public function keeps the
log-sum-exp to itself.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class KernelSettings(NamedTuple):
    """What the kernels are told besides queries, keys and values."""

    bias: Tensor | None
    """0 where visible, minus infinity where not, [B or 1, H or 1, T, S]; None: no mask."""
    is_causal: bool
    """Without a bias: query t sees keys 0..t (then T = S), else all keys."""
    scaling: float
    """Factor on the dot products."""


def has_fused_kernel(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> bool:
    """Whether a fused kernel that returns the log-sum-exp takes these tensors."""
    if key_BKSD.shape[-1] != value_BKSD.shape[-1] or 0 in query_BHTD.shape + key_BKSD.shape:
        return False
    if query_BHTD.device.type == "cpu":
        return True
    # The memory-efficient CUDA kernel has no fp64 and wants rows of whole 16-byte words.
    return (
        query_BHTD.device.type == "cuda"
        and query_BHTD.dtype is not torch.float64
        and query_BHTD.shape[-1] % 8 == 0
    )


def null_attention(
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    null_logit_H1: Tensor,
    settings: KernelSettings,
) -> tuple[Tensor, Tensor]:
    """Attend with a null of logit `null_logit_H1`; everything is differentiable once.

    Args:
        query_BHTD: Queries; `has_fused_kernel` must hold for the three tensors.
        key_BKSD: Keys; consecutive query heads share a key head.
        value_BKSD: Values.
        null_logit_H1: [H, 1] or [1, 1], finite.
        settings: Which keys are seen, and the scaling.

    Returns:
        Context [B, H, T, D] in the dtype of the query, and null mass [B, H, T] in fp32 (fp64 for
        fp64 inputs). A query without visible keys gets context 0 and null mass 1.
    """
    device_type = query_BHTD.device.type
    if torch.is_autocast_enabled(device_type) and query_BHTD.dtype is not torch.float64:
        # The kernels want one dtype, and below the autograd layer nobody casts for them.
        dtype = torch.get_autocast_dtype(device_type)
        query_BHTD, key_BKSD, value_BKSD = (
            states.to(dtype) for states in (query_BHTD, key_BKSD, value_BKSD)
        )
    context_BHTD, null_BHT = _NullAttention.apply(
        query_BHTD,
        key_BKSD,
        value_BKSD,
        null_logit_H1,
        *settings,
    )
    return context_BHTD, null_BHT


class _NullAttention(torch.autograd.Function):
    """Forward and backward over the kernels; arguments as in `null_attention`."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd passes arguments by position
        ctx: Any,
        query_BHTD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        null_logit_H1: Tensor,
        bias: Tensor | None,
        is_causal: bool,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        settings = KernelSettings(bias, is_causal, scaling)
        kernel = _cuda_forward if query_BHTD.is_cuda else _cpu_forward
        context_BHTD, lse_BHT, random = kernel(query_BHTD, key_BKSD, value_BKSD, settings)
        num_queries = query_BHTD.shape[2]
        if bias is not None:
            # Kernels disagree on the log-sum-exp of a query without keys (0 on CPU).
            dead = bias.amax(dim=-1) == -math.inf
            lse_BHT[..., :num_queries].masked_fill_(dead, -math.inf)
        null_logit_H1 = null_logit_H1.to(lse_BHT.dtype)
        margin_BHT = lse_BHT[..., :num_queries] - null_logit_H1
        null_BHT = torch.sigmoid(-margin_BHT)
        context_BHTD.mul_(torch.sigmoid(margin_BHT).unsqueeze(-1))
        ctx.save_for_backward(
            query_BHTD,
            key_BKSD,
            value_BKSD,
            bias,
            context_BHTD,
            torch.logaddexp(lse_BHT, null_logit_H1),
            null_BHT,
            null_logit_H1,
            *random,
        )
        ctx.is_causal = is_causal
        ctx.scaling = scaling
        ctx.set_materialize_grads(False)
        return context_BHTD, null_BHT

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_BHTD: Tensor | None, grad_null_BHT: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, bias, context, lse1, null_BHT, null_logit_H1, *random = ctx.saved_tensors
        dtype = query.dtype
        if grad_BHTD is None and grad_null_BHT is None:
            return (None,) * 7
        if grad_BHTD is None:
            grad_BHTD = torch.zeros_like(context)
        grad_logit_H1 = None
        if ctx.needs_input_grad[3]:
            dot_BHT = (grad_BHTD.to(lse1.dtype) * context).sum(dim=-1)
            per_row = -null_BHT * dot_BHT
            if grad_null_BHT is not None:
                per_row = per_row + null_BHT * (1 - null_BHT) * grad_null_BHT
            grad_logit_H1 = per_row.sum_to_size(null_logit_H1.shape)
        if grad_null_BHT is not None:
            if dtype is torch.float16:
                # What _raise_row_dot writes can exceed the range of fp16.
                query, key, value, context = (x.float() for x in (query, key, value, context))
                bias = None if bias is None else bias.float()
            grad_BHTD, context = _raise_row_dot(
                grad_BHTD.to(context.dtype), context, null_BHT * grad_null_BHT
            )
        kernel = _cuda_backward if query.is_cuda else _cpu_backward
        grads = kernel(
            grad_BHTD,
            (query, key, value, context, lse1),
            KernelSettings(bias, ctx.is_causal, ctx.scaling),
            random,
        )
        return *(grad.to(dtype) for grad in grads), grad_logit_H1, None, None, None


def _raise_row_dot(
    grad_BHTD: Tensor, out_BHTD: Tensor, amount_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Change `out` along `grad` so that their dot product over D grows by `amount`.

    A row of `grad` that is (almost) zero cannot carry an amount; there `grad` becomes 1e-18 of it
    in one coordinate, which changes the gradient of the values by that much.
    """
    amount_BHT1 = amount_BHT.unsqueeze(-1)
    norm_BHT1 = torch.linalg.vector_norm(grad_BHTD, dim=-1, keepdim=True, dtype=amount_BHT.dtype)
    least_BHT1 = (amount_BHT1.abs() * 1e-18).clamp_min(1e-30)
    silent_BHT1 = norm_BHT1 < least_BHT1
    first_D = torch.zeros_like(grad_BHTD[0, 0, 0])
    first_D[0] = 1
    grad_BHTD = torch.where(silent_BHT1, (least_BHT1 * first_D).to(grad_BHTD.dtype), grad_BHTD)
    norm_BHT1 = torch.where(silent_BHT1, least_BHT1, norm_BHT1)
    step_BHTD = (grad_BHTD / norm_BHT1) * (amount_BHT1 / norm_BHT1)
    return grad_BHTD, (out_BHTD + step_BHTD).to(out_BHTD.dtype)


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, settings: KernelSettings
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    # Grouped heads are the kernel's own: it takes fewer key than query heads.
    context, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, settings.is_causal, attn_mask=settings.bias, scale=settings.scaling
    )
    return context, lse, ()


def _cpu_backward(
    grad_out: Tensor,
    saved: tuple[Tensor, ...],
    settings: KernelSettings,
    random: list[Tensor],
) -> tuple[Tensor, ...]:
    del random
    grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out,
        *saved,
        0.0,
        settings.is_causal,
        attn_mask=settings.bias,
        scale=settings.scaling,
    )
    return grads


# The two CUDA functions follow the kernel's schema and torch's own call of it. They have not been
# run on a GPU; tests check arguments and shapes only. The kernel's log-sum-exp has T rounded up to
# a multiple of 32, in forward and backward.


def _cuda_forward(
    query: Tensor, key: Tensor, value: Tensor, settings: KernelSettings
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    context, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
        query,
        repeat_heads(key, query.shape[1]),
        repeat_heads(value, query.shape[1]),
        _aligned_bias(settings.bias, query, key),
        True,
        0.0,
        settings.is_causal,
        scale=settings.scaling,
    )
    return context, lse, (seed, offset)


def _cuda_backward(
    grad_out: Tensor,
    saved: tuple[Tensor, ...],
    settings: KernelSettings,
    random: list[Tensor],
) -> tuple[Tensor, ...]:
    query, key, value, context, lse = saved
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        query,
        repeat_heads(key, query.shape[1]),
        repeat_heads(value, query.shape[1]),
        _aligned_bias(settings.bias, query, key),
        context,
        lse,
        *random,
        0.0,
        [True, True, True, False],
        settings.is_causal,
        scale=settings.scaling,
    )
    return grads[0], _sum_heads(grads[1], key.shape[1]), _sum_heads(grads[2], key.shape[1])


def _aligned_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Expand to [B, H, T, S] with rows that start at multiples of 16 elements."""
    if bias is None:
        return None
    num_keys = key.shape[2]
    padded = F.pad(bias.to(query.dtype), (0, -num_keys % 16))
    return padded[..., :num_keys].expand(*query.shape[:3], num_keys)


def repeat_heads(states_BKSD: Tensor, num_heads: int) -> Tensor:
    """Repeat each key/value head for the query heads that share it: [B, H, S, D]."""
    repeats = num_heads // states_BKSD.shape[1]
    return states_BKSD if repeats == 1 else states_BKSD.repeat_interleave(repeats, dim=1)


def _sum_heads(grad_BHSD: Tensor, num_key_heads: int) -> Tensor:
    grad_BKGSD: Tensor = grad_BHSD.unflatten(1, (num_key_heads, -1))
    return grad_BKGSD.sum(dim=2)
