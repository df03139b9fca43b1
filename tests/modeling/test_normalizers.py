"""Every normalizer against its definition in float64 and against the contract all share."""

from __future__ import annotations

import math

import entmax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from oasis_eval.errors import SpecError, UnknownNameError
from oasis_eval.modeling.normalizers import (
    Normalized,
    Normalizer,
    NormalizerName,
    clip_gamma,
    clipped_softmax,
    normalize,
    softmax1,
    softpick,
)

GAMMA = clip_gamma(alpha=12.0, train_length=512)
ALL = (
    Normalizer("softmax"),
    Normalizer("softmax1"),
    Normalizer("softmax1", log_n=2.0),
    Normalizer("clipped_softmax", gamma=GAMMA, zeta=1.1),
    Normalizer("sparsemax"),
    Normalizer("entmax15"),
    Normalizer("softpick"),
    Normalizer("sink"),
)
WITH_NULL = tuple(normalizer for normalizer in ALL if normalizer.has_null)
SINK_LOGIT = 0.7
INF = math.inf


def apply(normalizer: Normalizer, logits: Tensor, mask: Tensor | None = None) -> Normalized:
    """Normalize, with a learned logit where one is required."""
    null_logit = torch.tensor(SINK_LOGIT) if normalizer.kind == "sink" else None
    return normalize(logits, mask, normalizer, null_logit=null_logit)


# The references below work on numpy float64, with formulas of their own: extended softmax for the
# null, bisection for the projections, literal exponentials for softpick.


def reference(normalizer: Normalizer, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return weights and null mass of rows [N, S] without hidden entries."""
    kind = normalizer.kind
    if kind in ("softmax1", "sink"):
        null = normalizer.log_n if kind == "softmax1" else SINK_LOGIT
        peak = np.maximum(logits.max(-1, keepdims=True), null)
        weights = np.exp(logits - peak)
        rest = np.exp(null - peak)
        total = weights.sum(-1, keepdims=True) + rest
        return weights / total, (rest / total)[..., 0]
    if kind == "softpick":
        peak = np.maximum(logits.max(-1, keepdims=True), 0.0)
        signed = np.where(
            np.abs(logits) < 1.0,
            np.expm1(np.clip(logits, -1, 1)) * np.exp(-peak),
            np.exp(logits - peak) - np.exp(-peak),
        )
        total = np.abs(signed).sum(-1, keepdims=True) + normalizer.eps * np.exp(-peak)
        return np.maximum(signed, 0.0) / total, None
    if kind in ("sparsemax", "entmax15"):
        power, scale = (1, 1.0) if kind == "sparsemax" else (2, 0.5)
        scaled = scale * logits
        low, high = scaled.max(-1, keepdims=True) - 1.0, scaled.max(-1, keepdims=True)
        for _ in range(100):
            middle = (low + high) / 2
            above = (np.maximum(scaled - middle, 0.0) ** power).sum(-1, keepdims=True) > 1.0
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.maximum(scaled - low, 0.0) ** power, None
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if kind == "clipped_softmax":
        assert normalizer.gamma is not None
        stretch = normalizer.zeta - normalizer.gamma
        weights = np.clip(stretch * weights + normalizer.gamma, 0.0, 1.0)
    return weights, None


def reference_gradient(
    normalizer: Normalizer, logits: np.ndarray, upstream: np.ndarray, null_upstream: np.ndarray
) -> np.ndarray:
    """Return the gradient of sum(upstream * weights) + sum(null_upstream * null mass) by hand."""
    weights, null = reference(normalizer, logits)
    kind = normalizer.kind
    if kind in ("softmax1", "sink"):
        assert null is not None
        dot = (upstream * weights).sum(-1, keepdims=True) + (null_upstream * null)[..., None]
        return weights * (upstream - dot)
    if kind in ("sparsemax", "entmax15"):
        inner = (weights > 0).astype(np.float64) if kind == "sparsemax" else np.sqrt(weights)
        mean = (upstream * inner).sum(-1, keepdims=True) / inner.sum(-1, keepdims=True)
        return inner * (upstream - mean)
    if kind == "softpick":
        peak = np.maximum(logits.max(-1, keepdims=True), 0.0)
        slope = np.exp(logits - peak)
        total = np.abs(np.exp(logits - peak) - np.exp(-peak)).sum(-1, keepdims=True)
        total += normalizer.eps * np.exp(-peak)
        dot = (upstream * weights).sum(-1, keepdims=True)
        return slope * (upstream * (logits > 0) - dot * np.sign(logits)) / total
    plain, _ = reference(Normalizer("softmax"), logits)
    if kind == "clipped_softmax":
        assert normalizer.gamma is not None
        inside = (weights > 0) & (weights < 1)
        upstream = upstream * inside * (normalizer.zeta - normalizer.gamma)
    return plain * (upstream - (upstream * plain).sum(-1, keepdims=True))


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("normalizer", ALL, ids=str)
def test_float64_agreement(normalizer: Normalizer, scale: float) -> None:
    """1000 random fp32 rows: weights, null mass and gradient within 1e-6 of float64."""
    random = np.random.default_rng(0)
    rows = (scale * random.standard_normal((1000, 32))).astype(np.float32)
    upstream = random.standard_normal(rows.shape)
    null_upstream = random.standard_normal(rows.shape[0])
    logits = torch.from_numpy(rows).requires_grad_()

    probs, null_mass = apply(normalizer, logits)
    loss = (probs * torch.from_numpy(upstream).float()).sum()
    if null_mass is not None:
        loss = loss + (null_mass * torch.from_numpy(null_upstream).float()).sum()
    loss.backward()

    wide = rows.astype(np.float64)
    expected_probs, expected_null = reference(normalizer, wide)
    expected_grad = reference_gradient(normalizer, wide, upstream, null_upstream)
    assert np.abs(expected_probs - probs.detach().numpy()).max() <= 1e-6
    assert (expected_null is None) == (null_mass is None)
    if null_mass is not None:
        assert np.abs(expected_null - null_mass.detach().numpy()).max() <= 1e-6
    assert logits.grad is not None
    assert np.abs(expected_grad - logits.grad.numpy()).max() <= 1e-6 * np.abs(upstream).max()


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([1000.0, 999.0], [0.731058578, 0.268941421]),
        ([-1000.0, -1001.0], [0.0, 0.0]),
        ([0.0, 0.0], [1 / 3, 1 / 3]),
        ([-INF, -INF], [0.0, 0.0]),
        ([-INF, 0.0], [0.0, 0.5]),
    ],
)
def test_softmax1_by_hand(logits: list[float], expected: list[float]) -> None:
    """The null is exp(0) at any size of the logits: stabilising must not turn it into exp(max)."""
    probs = softmax1(torch.tensor([logits])).probs

    torch.testing.assert_close(probs, torch.tensor([expected]), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("log_n", [-3.0, 0.0, 4.0])
def test_softmax1_is_softmax_with_one_more_logit(log_n: float) -> None:
    """n = exp(log n) acts as one key of logit log n whose weight is the null mass."""
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    extended = torch.cat((logits, torch.full((50, 1), log_n)), dim=1).double().softmax(-1)

    probs, null_mass = softmax1(logits, log_n=log_n)

    torch.testing.assert_close(probs.double(), extended[:, :-1], atol=2e-7, rtol=0.0)
    assert null_mass is not None
    torch.testing.assert_close(null_mass.double(), extended[:, -1], atol=2e-7, rtol=0.0)


def test_learned_logit_per_head() -> None:
    """A null logit that broadcasts over rows is used row by row and receives its gradient."""
    logits = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    log_n = torch.tensor([[-1.0], [0.0], [2.0]], dtype=torch.float64, requires_grad=True)

    probs, null_mass = softmax1(logits, log_n=log_n)

    assert null_mass is not None
    for head, number in enumerate(log_n.flatten().tolist()):
        expected, expected_null = softmax1(logits[:, head], log_n=number)
        torch.testing.assert_close(probs[:, head], expected)
        torch.testing.assert_close(null_mass[:, head], expected_null)
    torch.autograd.gradcheck(lambda n: softmax1(logits, log_n=n), (log_n,))


def test_small_null_mass_keeps_its_digits() -> None:
    """The null mass is not 1 - sum(p), which would be 0 or negative here."""
    null_mass = softmax1(torch.full((1, 4), 40.0)).null_mass

    assert null_mass is not None
    assert null_mass.item() == pytest.approx(math.exp(-40.0) / 4, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("normalizer", ALL, ids=str)
def test_dtypes(normalizer: Normalizer, dtype: torch.dtype) -> None:
    """Weights come in the input's dtype, rounded from a computation in fp32 or wider."""
    logits = (5 * torch.randn(20, 9, generator=torch.Generator().manual_seed(1))).to(dtype)
    wide = apply(normalizer, logits.double())

    probs, null_mass = apply(normalizer, logits)

    assert probs.dtype == dtype
    torch.testing.assert_close(probs.double(), wide.probs, atol=1e-6, rtol=torch.finfo(dtype).eps)
    if null_mass is not None:
        assert null_mass.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("normalizer", ALL, ids=str)
def test_hidden_entries_do_not_exist(normalizer: Normalizer) -> None:
    """A masked row equals the row of its visible entries, whatever stands in the hidden ones."""
    random = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(40, 10, generator=random)
    mask = torch.rand(40, 10, generator=random) < 0.5
    mask[:, 3] = True
    logits = torch.where(
        mask, logits, torch.tensor([INF, math.nan, 1e30, -INF]).repeat(10)[:, None]
    )

    probs, null_mass = apply(normalizer, logits, mask)

    assert torch.equal(probs[~mask], torch.zeros(int((~mask).sum())))
    for row in range(40):
        expected = apply(normalizer, logits[row, mask[row]][None])
        torch.testing.assert_close(probs[row, mask[row]], expected.probs[0], atol=2e-7, rtol=0.0)
        if null_mass is not None:
            assert expected.null_mass is not None
            torch.testing.assert_close(null_mass[row], expected.null_mass[0], atol=2e-7, rtol=0.0)


@pytest.mark.parametrize("by", ["mask", "logits"])
@pytest.mark.parametrize("normalizer", ALL, ids=str)
def test_dead_rows(normalizer: Normalizer, by: str) -> None:
    """A row with nothing visible: weights 0, null mass 1, gradient 0, no neighbour affected."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1] = False
    if by == "logits":
        logits = logits.masked_fill(~mask, -INF)
    logits.requires_grad_()

    probs, null_mass = apply(normalizer, logits, mask if by == "mask" else None)
    (probs.sum() + (0.0 if null_mass is None else null_mass.sum())).backward()

    assert torch.equal(probs[1], torch.zeros(6))
    assert torch.equal(probs[0], apply(normalizer, logits[0]).probs)
    assert null_mass is None or null_mass[1].item() == 1.0
    assert logits.grad is not None
    assert torch.equal(logits.grad[1], torch.zeros(6))
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalizer", ALL, ids=str)
def test_extreme_logits(normalizer: Normalizer, dtype: torch.dtype) -> None:
    """At the ends of the dtype's range, weights and gradients are finite and weights in [0, 1]."""
    huge = torch.finfo(dtype).max / 4
    logits = torch.tensor(
        [[huge, huge, 0.0], [-huge, -huge, -huge], [huge, -huge, 1.0], [-huge, 0.0, 0.0]],
        dtype=dtype,
        requires_grad=True,
    )

    probs, null_mass = apply(normalizer, logits)
    ((probs * torch.tensor([1.0, 2.0, 3.0])).sum()).backward()

    assert ((probs >= 0) & (probs <= 1)).all()
    assert null_mass is None or ((null_mass >= 0) & (null_mass <= 1)).all()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("normalizer", ALL, ids=str)
def test_gradient_is_that_of_the_function(normalizer: Normalizer) -> None:
    """Numerical differentiation in float64 agrees, hidden entries included."""
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 6, dtype=torch.float64, generator=random, requires_grad=True)
    mask = torch.rand(4, 6, generator=random) < 0.7

    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part for part in apply(normalizer, x, mask) if part is not None)

    assert torch.autograd.gradcheck(outputs, (logits,))


@pytest.mark.parametrize("normalizer", ALL, ids=str)
def test_nan_is_not_hidden(normalizer: Normalizer) -> None:
    """A NaN logit shows in the weights: a broken model must not look like one that attends less."""
    probs = apply(normalizer, torch.tensor([[0.5, math.nan, 1.0], [0.5, -INF, 1.0]])).probs

    assert probs[0].isnan().any()
    assert torch.isfinite(probs[1]).all()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.3, 3.0], ids=lambda scale: f"x{scale}")
@pytest.mark.parametrize("kind", ["sparsemax", "entmax15"])
def test_wide_supports(kind: NormalizerName, scale: float) -> None:
    """From all of 300 entries to a few: more than are sorted at first, and fewer, side by side."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 300, generator=generator, dtype=torch.float64) * scale
    logits[0] *= 10.0
    wanted, _ = reference(Normalizer(kind), logits.numpy())
    probs = apply(Normalizer(kind), logits).probs

    torch.testing.assert_close(probs, torch.from_numpy(wanted), rtol=0.0, atol=1e-10)
    whole = {"sparsemax": entmax.sparsemax, "entmax15": entmax.entmax15}[kind]
    narrow = logits.float()
    shifted = narrow - narrow.amax(-1, keepdim=True)
    assert torch.equal(apply(Normalizer(kind), narrow).probs, whole(shifted, dim=-1))
    if scale < 0.1:
        assert (probs[1:] > 0.0).sum(-1).min() > 32


def test_clipping_reaches_both_bounds() -> None:
    """Bounds apply after normalising: small weights are exactly 0, a large one exactly 1."""
    probs = clipped_softmax(torch.tensor([[12.0, 0.0, 0.0, -3.0]]), gamma=-0.01, zeta=1.01).probs

    assert probs.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_gamma_follows_training_length() -> None:
    """gamma = -alpha / T."""
    assert clip_gamma(alpha=12.0, train_length=1024) == -12.0 / 1024


def test_softpick_of_tiny_logits() -> None:
    """e^x - 1 keeps its digits where x is tiny, and all-zero logits give 0 with gradient 0."""
    tiny = softpick(torch.tensor([[2e-4, 1e-4, -1e-4]])).probs
    zero = torch.zeros(1, 3, requires_grad=True)
    softpick(zero).probs.sum().backward()

    torch.testing.assert_close(
        tiny, torch.tensor([[2.0, 1.0, 0.0]]) / (4.0 + 1e-2), atol=0.0, rtol=3e-4
    )
    assert zero.grad is not None
    assert torch.equal(zero.grad, torch.zeros(1, 3))


ROWS = npst.arrays(
    np.float32,
    npst.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9),
    elements=st.floats(-200, 200, width=32),
)


@settings(deadline=None, max_examples=60)
@given(rows=ROWS)
@pytest.mark.parametrize("normalizer", ALL, ids=str)
def test_mass_is_conserved(normalizer: Normalizer, rows: np.ndarray) -> None:
    """Weights are in [0, 1]; with the null mass they sum to 1, or to at most 1 without one."""
    probs, null_mass = apply(normalizer, torch.from_numpy(rows))
    total = probs.double().sum(-1)

    assert ((probs >= 0) & (probs <= 1 + 1e-6)).all()  # projections round where entries just vanish
    if null_mass is not None:
        torch.testing.assert_close(total + null_mass, torch.ones_like(total), atol=1e-6, rtol=0)
    elif normalizer.kind in ("softmax", "sparsemax", "entmax15"):
        torch.testing.assert_close(total, torch.ones_like(total), atol=2e-6, rtol=0)
    elif normalizer.kind == "softpick":
        assert (total <= 1 + 1e-6).all()


@settings(deadline=None, max_examples=60)
@given(rows=ROWS, seed=st.integers(0, 99))
@pytest.mark.parametrize("normalizer", ALL, ids=str)
def test_permutation(normalizer: Normalizer, rows: np.ndarray, seed: int) -> None:
    """Weights follow their keys when keys are reordered; the null mass does not change."""
    logits = torch.from_numpy(rows)
    order = torch.randperm(logits.shape[1], generator=torch.Generator().manual_seed(seed))

    straight, permuted = apply(normalizer, logits), apply(normalizer, logits[:, order])

    torch.testing.assert_close(permuted.probs, straight.probs[:, order], atol=1e-6, rtol=0)
    torch.testing.assert_close(permuted.null_mass, straight.null_mass, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "clipped_softmax"}, "needs 'gamma'"),
        ({"kind": "clipped_softmax", "gamma": 0.1}, "gamma is 0.1"),
        ({"kind": "clipped_softmax", "gamma": -0.1, "zeta": 0.9}, "zeta is 0.9"),
        ({"kind": "softmax1", "log_n": INF}, "log_n is inf"),
        ({"kind": "softpick", "eps": 0.0}, "eps is 0.0"),
    ],
)
def test_bad_constants(arguments: dict[str, object], message: str) -> None:
    """A constant out of range is refused with what was found."""
    with pytest.raises(SpecError, match=message):
        Normalizer(**arguments)  # type: ignore[arg-type]


def test_unknown_name() -> None:
    """An unknown kind is refused with the nearest known names."""
    with pytest.raises(UnknownNameError, match="did you mean softmax1"):
        Normalizer("softmax-1")  # type: ignore[arg-type]


def test_null_logit_must_fit() -> None:
    """A learned logit goes with normalizers that have a null, and `sink` cannot be without."""
    logits, learned = torch.zeros(1, 2), torch.zeros(())

    with pytest.raises(SpecError, match="sparsemax has no null"):
        normalize(logits, None, Normalizer("sparsemax"), null_logit=learned)
    with pytest.raises(SpecError, match="found none"):
        normalize(logits, None, Normalizer("sink"))
