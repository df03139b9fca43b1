"""The fused paths against the eager one, the eager one against its formula, taps and masks."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from oasis_eval.errors import SpecError
from oasis_eval.modeling.attention import AttentionOutput, attend
from oasis_eval.modeling.normalizers import Normalizer, normalize
from oasis_eval.modeling.null_attention import KernelSettings, _cuda_backward, _cuda_forward
from oasis_eval.modeling.taps import AttentionTaps, Tap, is_active

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
        for ours, expected in zip(
            gradients(half, leaves, upstream)
            if upstream == "null"
            else gradients(run(call, leaves, eager=False), leaves, upstream),
            gradients(run(call, wide, eager=True), wide, upstream),
            strict=True,
        ):
            limit = 8 * step * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(ours.double(), expected, atol=limit, rtol=0)


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


class Shift(nn.Module):
    """Stands in for whatever replaces a tap."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, value: Tensor) -> Tensor:
        return value + self.by


def test_tap_activity() -> None:
    """A tap is active once hooked or replaced, and idle again when the hook is gone."""
    taps = AttentionTaps()
    idle = is_active(taps.scores)
    handle = taps.scores.register_forward_hook(lambda *_: None)
    hooked = is_active(taps.scores)
    handle.remove()
    removed = is_active(taps.scores)
    taps.scores = Shift(0.0)  # type: ignore[assignment]

    assert (idle, hooked, removed, is_active(taps.scores)) == (False, True, False, True)
    assert not is_active(None)
    assert Tap()(torch.ones(2)) is not None


@pytest.mark.parametrize("normalizer", EVERY, ids=lambda n: n.kind)
@pytest.mark.parametrize("name", ["scores", "probs", "context"])
def test_hooked_taps_see_and_change_nothing(normalizer: Normalizer, name: str) -> None:
    """Watching any tap leaves the result as it is; each sees the tensor it is named for."""
    call = CALLS["left-padded, grouped heads"]
    tensors = make(call)
    mask = mask_of(call)
    logit = torch.linspace(-1, 2, HEADS) if normalizer.kind == "sink" else None
    expected = run(call, tensors, normalizer, eager=True)
    taps = AttentionTaps()
    seen: list[Tensor] = []
    getattr(taps, name).register_forward_hook(lambda *hook: seen.append(hook[2]))

    output = attend(
        *tensors, mask, normalizer=normalizer, scaling=SCALING, null_logit_H=logit, taps=taps
    )

    torch.testing.assert_close(output.context, expected.context)
    raw = SCALING * tensors[0] @ tensors[1].repeat_interleave(2, 1).transpose(-1, -2)
    wanted = {"scores": raw, "probs": expected.probs, "context": expected.context}[name]
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], wanted)


def test_null_mass_tap_keeps_the_fast_path() -> None:
    """The null mass can be watched without weights being formed."""
    call = CALLS["causal"]
    taps = AttentionTaps()
    seen: list[Tensor] = []
    taps.null_mass.register_forward_hook(lambda *hook: seen.append(hook[2]))

    output = attend(*make(call), None, normalizer=SOFTMAX1, scaling=SCALING, taps=taps)

    assert output.null_mass is None
    torch.testing.assert_close(seen[0], run(call, make(call), eager=True).null_mass)


@pytest.mark.parametrize("name", ["scores", "probs", "context"])
def test_replaced_taps_act(name: str) -> None:
    """A replacement changes the tensor on its way: scores before the mask, weights, context."""
    call = CALLS["left-padded"]
    query, key, value = make(call)
    taps = AttentionTaps()
    setattr(taps, name, Shift(0.25))
    mask = mask_of(call)
    assert mask is not None

    output = attend(query, key, value, mask, normalizer=SOFTMAX1, scaling=SCALING, taps=taps)

    scores = SCALING * query @ key.transpose(-1, -2) + (0.25 if name == "scores" else 0.0)
    probs = normalize(scores, mask, SOFTMAX1).probs + (0.25 if name == "probs" else 0.0)
    context = (probs @ value).transpose(1, 2) + (0.25 if name == "context" else 0.0)
    torch.testing.assert_close(output.context, context)


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
