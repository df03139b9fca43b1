"""The fused paths against the eager one, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_eval.modeling.attention import attend
from oasis_eval.modeling.normalizers import Normalizer
from oasis_eval.modeling.null_attention import KernelSettings, _cuda_backward, _cuda_forward
from tests.modeling.attention_calls import (
    BATCH,
    CALLS,
    HEADS,
    SCALING,
    SOFTMAX1,
    WIDTH,
    gradients,
    make,
    mask_of,
    run,
)


@pytest.mark.parametrize("upstream", ["context", "null", "context and null"])
@pytest.mark.parametrize("log_n", [0.0, -2.0, 3.0, None], ids=lambda x: f"log_n={x}")
@pytest.mark.parametrize("name", CALLS)
def test_fused_softmax1_equals_eager(name: str, log_n: float | None, upstream: str) -> None:
    """Context, null mass and every gradient (of the learned logit, too) agree to 1e-6 in fp64."""
    call = CALLS[name]
    leaves = make(call)
    learned = None
    if log_n is None:
        learned = torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_()
        leaves = (*leaves, learned)
    normalizer = Normalizer("softmax1", log_n=log_n or 0.0)

    fused = run(call, leaves[:3], normalizer, null_logit=learned, eager=False)
    eager = run(call, leaves[:3], normalizer, null_logit=learned, eager=True)

    assert fused.probs is None
    assert fused.null_mass is not None
    torch.testing.assert_close(fused.context, eager.context, atol=1e-6, rtol=0)
    torch.testing.assert_close(fused.null_mass, eager.null_mass, atol=1e-6, rtol=0)
    for ours, expected in zip(
        gradients(fused, leaves, upstream), gradients(eager, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["softmax", "sink"])
@pytest.mark.parametrize("name", CALLS)
def test_other_fused_paths_equal_eager(name: str, kind: str) -> None:
    """Plain softmax and sink: context and gradients agree to 1e-6 in fp64, dead rows included."""
    call = CALLS[name]
    leaves = make(call)
    normalizer = Normalizer(kind)  # type: ignore[arg-type]

    fused, eager = (run(call, leaves, normalizer, eager=flag) for flag in (False, True))

    torch.testing.assert_close(fused.context, eager.context, atol=1e-6, rtol=0)
    torch.testing.assert_close(fused.null_mass, eager.null_mass, atol=1e-6, rtol=0)
    for ours, expected in zip(
        gradients(fused, leaves, "context"), gradients(eager, leaves, "context"), strict=True
    ):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["causal, grouped heads", "left-padded", "chunk, padded cache"])
def test_fused_softmax1_in_fp32(name: str) -> None:
    """In fp32 the fused path stays within 1e-6 of the eager path in fp64."""
    call = CALLS[name]
    fused = run(call, make(call, torch.float32), eager=False)
    exact = run(call, make(call), eager=True)

    torch.testing.assert_close(fused.context.double(), exact.context, atol=1e-6, rtol=0)
    assert fused.null_mass is not None
    assert exact.null_mass is not None
    assert fused.null_mass.dtype == torch.float32
    torch.testing.assert_close(fused.null_mass.double(), exact.null_mass, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal, grouped heads", "left-padded", "all keys hidden"])
def test_fused_softmax1_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """bf16 and fp16: outputs, fp32 null mass and gradients are as close as the dtype resolves."""
    call = CALLS[name]
    leaves = make(call, dtype)
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    step = torch.finfo(dtype).eps

    half, exact = run(call, leaves, eager=False), run(call, wide, eager=True)

    assert half.context.dtype == dtype
    assert half.null_mass is not None
    assert half.null_mass.dtype == torch.float32
    torch.testing.assert_close(half.context.double(), exact.context, atol=2 * step, rtol=step)
    torch.testing.assert_close(
        half.null_mass, exact.null_mass, atol=step, rtol=step, check_dtype=False
    )
    for upstream in ("null", "context and null"):
        ours = gradients(run(call, leaves, eager=False), leaves, upstream)
        expected = gradients(run(call, wide, eager=True), wide, upstream)
        for grad, exact_grad in zip(ours, expected, strict=True):
            limit = 8 * step * max(1.0, exact_grad.abs().max().item())
            torch.testing.assert_close(grad.double(), exact_grad, atol=limit, rtol=0)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 999),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    upstream_scale=st.sampled_from([0.0, 1e-20, 1e-6, 1.0, 1e6]),
    hidden=st.floats(0.0, 1.0),
)
def test_gradients_under_any_upstream(
    seed: int, scale: float, upstream_scale: float, hidden: float
) -> None:
    """Any mask, any ratio of the two upstream gradients, zero included: fused equals eager."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.rand(BATCH, HEADS, 5, 6, generator=random) >= hidden
    leaves = tuple(
        (
            scale * torch.randn(BATCH, heads, length, WIDTH, generator=random, dtype=torch.float64)
        ).requires_grad_()
        for heads, length in ((HEADS, 5), (2, 6), (2, 6))
    )
    context_weight = upstream_scale * torch.randn(BATCH, 5, HEADS, WIDTH, generator=random)
    null_weight = torch.randn(BATCH, HEADS, 5, generator=random)
    results = []
    for eager in (False, True):
        output = attend(
            *leaves,
            mask,
            normalizer=SOFTMAX1,
            scaling=SCALING,
            need_probs=eager,
            need_null_mass=True,
        )
        assert output.null_mass is not None
        loss = (output.context * context_weight).sum() + (output.null_mass * null_weight).sum()
        results.append(torch.autograd.grad(loss, leaves))

    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9 * max(1.0, upstream_scale), rtol=1e-7)


@pytest.mark.parametrize("masked", [False, True])
def test_cuda_kernels_are_called_by_their_schema(masked: bool) -> None:
    """On tensors without data, the CUDA forward and backward accept our arguments and shapes."""
    query = torch.empty(BATCH, HEADS, 37, WIDTH, device="meta", dtype=torch.bfloat16)
    key = torch.empty(BATCH, 2, 37 if not masked else 45, WIDTH, device="meta", dtype=query.dtype)
    bias = torch.zeros(BATCH, 1, 37, 45, device="meta") if masked else None
    kernel = KernelSettings(bias, is_causal=not masked, scaling=SCALING)

    context, lse, random = _cuda_forward(query, key, key, kernel)
    grads = _cuda_backward(context, (query, key, key, context, lse), kernel, list(random))

    assert context.shape == query.shape
    assert lse.shape == (BATCH, HEADS, 64)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]


def test_null_mass_is_the_sigmoid_of_the_missing_evidence() -> None:
    """Null mass = sigmoid(log n - logsumexp(scores)) over the visible keys."""
    call = CALLS["left-padded, grouped heads"]
    query, key, _ = tensors = make(call)
    mask = mask_of(call)
    assert mask is not None

    output = run(call, tensors, Normalizer("softmax1", log_n=1.5), eager=False)

    scores = SCALING * query @ key.repeat_interleave(2, 1).transpose(-1, -2)
    evidence = scores.masked_fill(~mask, -math.inf).logsumexp(-1)
    torch.testing.assert_close(output.null_mass, torch.sigmoid(1.5 - evidence))
