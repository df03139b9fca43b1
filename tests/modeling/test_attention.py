"""The eager path against its formula; masks, dead rows, extremes and refusals on every path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oasis_eval.errors import SpecError
from oasis_eval.modeling.attention import attend
from oasis_eval.modeling.normalizers import Normalizer, normalize
from oasis_eval.modeling.taps import AttentionTaps
from tests.modeling.attention_calls import (
    BATCH,
    CALLS,
    EVERY,
    HEADS,
    SCALING,
    SOFTMAX1,
    WIDTH,
    Call,
    gradients,
    make,
    mask_of,
    run,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eager", [False, True])
def test_extreme_scores(dtype: torch.dtype, eager: bool) -> None:
    """Scores of several thousand, both signs: outputs and gradients stay finite."""
    call = CALLS["left-padded, grouped heads"]
    leaves = tuple((100 * x).detach().requires_grad_() for x in make(call, dtype))

    output = run(call, leaves, eager=eager)
    grads = gradients(output, leaves, "context and null")

    assert torch.isfinite(output.context).all()
    assert output.null_mass is not None
    assert torch.isfinite(output.null_mass).all()
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("normalizer", EVERY, ids=lambda n: n.kind)
def test_query_without_keys(normalizer: Normalizer, eager: bool) -> None:
    """Context 0, null mass 1 and finite gradients; weights asked for or not."""
    call = CALLS["left-padded, grouped heads"]
    leaves = make(call, torch.float32)

    output = run(call, leaves, normalizer, eager=eager)
    grads = gradients(output, leaves, "context and null" if normalizer.has_null else "context")

    assert torch.equal(output.context[0, : call.padding], torch.zeros(call.padding, HEADS, WIDTH))
    assert (output.null_mass is not None) == normalizer.has_null
    if output.null_mass is not None:
        assert torch.equal(output.null_mass[0, :, : call.padding], torch.ones(HEADS, call.padding))
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("normalizer", EVERY, ids=lambda n: n.kind)
def test_eager_is_the_formula(normalizer: Normalizer) -> None:
    """normalizer(scaling q k) v, head by head, with shared key heads, written out literally."""
    call = CALLS["left-padded, grouped heads"]
    query, key, value = make(call)
    mask = mask_of(call)
    assert mask is not None

    output = run(call, (query, key, value), normalizer, eager=True)

    assert output.probs is not None
    for row in range(BATCH):
        for head in range(HEADS):
            shared = head // 2
            scores = SCALING * query[row, head] @ key[row, shared].T
            logit = torch.linspace(-1, 2, HEADS)[head] if normalizer.kind == "sink" else None
            expected = normalize(scores, mask[row, 0], normalizer, null_logit=logit).probs
            torch.testing.assert_close(output.probs[row, head], expected)
            torch.testing.assert_close(output.context[row, :, head], expected @ value[row, shared])


@pytest.mark.parametrize("normalizer", EVERY, ids=lambda n: n.kind)
def test_no_mask_is_causal_and_aligned_right(normalizer: Normalizer) -> None:
    """Decoding in chunks of any size gives what one causal pass gives, weights asked for or not."""
    whole = CALLS["causal, grouped heads"]
    query, key, value = make(whole)
    full = run(whole, (query, key, value), normalizer, eager=False)

    for eager in (False, True):
        for start, stop in ((0, 1), (1, 2), (2, 6), (6, 9)):
            call = Call(stop - start, stop, num_key_heads=2, padding=-1)
            tensors = (query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop])
            part = run(call, tensors, normalizer, eager=eager)
            torch.testing.assert_close(part.context, full.context[:, start:stop])


def test_not_causal() -> None:
    """Without a mask and without causality every query sees every key."""
    query, key, value = make(Call(4, 6))
    everything = torch.ones(4, 6, dtype=torch.bool)

    free = attend(query, key, value, None, normalizer=SOFTMAX1, scaling=SCALING, is_causal=False)
    masked = attend(query, key, value, everything, normalizer=SOFTMAX1, scaling=SCALING)

    torch.testing.assert_close(free.context, masked.context)


def test_mask_per_head() -> None:
    """A mask [B, H, T, S] may differ between heads."""
    call = Call(5, 5, num_key_heads=2)
    leaves = make(call)
    mask = torch.rand(BATCH, HEADS, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.6

    fused, eager = (
        attend(*leaves, mask, normalizer=SOFTMAX1, scaling=SCALING, need_probs=flag)
        for flag in (False, True)
    )

    torch.testing.assert_close(fused.context, eager.context, atol=1e-9, rtol=0)


def test_value_width_may_differ() -> None:
    """Values wider or narrower than keys are attended to, by the eager path."""
    query, key, value = make(Call(5, 5))

    output = attend(query, key, value[..., :3], None, normalizer=SOFTMAX1, scaling=SCALING)
    full = attend(query, key, value, None, normalizer=SOFTMAX1, scaling=SCALING)

    torch.testing.assert_close(output.context, full.context[..., :3])


def test_softcap() -> None:
    """Scores are c tanh(score / c) before the normalizer."""
    query, key, value = make(Call(5, 5))
    taps = AttentionTaps()
    seen: list[Tensor] = []
    taps.scores.register_forward_hook(lambda *call: seen.append(call[2]))

    attend(query, key, value, None, normalizer=SOFTMAX1, scaling=SCALING, softcap=0.5, taps=taps)

    raw = SCALING * query @ key.transpose(-1, -2)
    torch.testing.assert_close(seen[0], 0.5 * torch.tanh(raw / 0.5))


def test_dropout_acts_on_weights_and_keeps_the_mean() -> None:
    """Dropped weights leave context unbiased; returned weights and null mass are those before."""
    query, key, value = make(Call(6, 6))
    torch.manual_seed(0)
    plain = attend(
        query,
        key,
        value,
        None,
        normalizer=SOFTMAX1,
        scaling=SCALING,
        need_probs=True,
        need_null_mass=True,
    )
    runs = [
        attend(
            query,
            key,
            value,
            None,
            normalizer=SOFTMAX1,
            scaling=SCALING,
            dropout=0.5,
            need_probs=True,
            need_null_mass=True,
        )
        for _ in range(400)
    ]

    mean = torch.stack([output.context for output in runs]).mean(0)
    assert (mean - plain.context).abs().max() < 0.3
    torch.testing.assert_close(runs[0].probs, plain.probs)
    torch.testing.assert_close(runs[0].null_mass, plain.null_mass)


def test_asking_for_weights_or_null_mass_changes_no_number() -> None:
    """Context is the same, bit for bit, with the null mass asked for, and to rounding otherwise."""
    call = CALLS["left-padded"]
    tensors = make(call, torch.float32)

    def context(*, probs: bool, null: bool) -> Tensor:
        return attend(
            *tensors,
            mask_of(call),
            normalizer=SOFTMAX1,
            scaling=SCALING,
            need_probs=probs,
            need_null_mass=null,
        ).context

    assert torch.equal(context(probs=False, null=False), context(probs=False, null=True))
    torch.testing.assert_close(
        context(probs=False, null=False), context(probs=True, null=True), atol=1e-6, rtol=0
    )


def test_null_logit_must_fit() -> None:
    """`sink` without its logit, and a logit for a normalizer without null, are refused."""
    tensors = make(CALLS["causal"])

    with pytest.raises(SpecError, match="sink needs its learned logit"):
        attend(*tensors, None, normalizer=Normalizer("sink"), scaling=SCALING)
    with pytest.raises(SpecError, match="softpick has no null"):
        attend(
            *tensors,
            None,
            normalizer=Normalizer("softpick"),
            scaling=SCALING,
            null_logit_H=torch.zeros(HEADS),
        )
