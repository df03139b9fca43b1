"""Statistics of one tensor against their definitions, at every scale and in every dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oasis_eval.diagnostics.moments import (
    FLAT_KURTOSIS,
    TokenMoments,
    massive_activations,
    sequence_moments,
    token_moments,
)
from oasis_eval.diagnostics.tensor_sums import TensorStatistics, TensorSums, sums_over_sequences
from tests.diagnostics.naive import kurtosis

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def statistics(x_BTF: Tensor, real_BT: Tensor | None = None) -> TensorStatistics:
    sums = TensorSums()
    moments = token_moments(x_BTF)
    stacked = TokenMoments(*(column[None] for column in moments[:5]), moments.num_features)
    sums.add(sums_over_sequences(stacked, real_BT)[0], len(x_BTF))
    return sums.result()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6, 1e-12, 1e3])
def test_kurtosis_at_every_scale(dtype: torch.dtype, scale: float) -> None:
    """The value is that of float64 on the same rounded data, whatever the scale and dtype."""
    x = (normal(1, 100, 100).double() * scale).to(dtype)
    result = statistics(x)
    if bool((x == x.flatten()[0]).all()):  # fp16 has no number that small
        assert (result.kurtosis, result.is_flat) == (FLAT_KURTOSIS, True)
        return

    assert result.kurtosis == pytest.approx(kurtosis(x), rel=1e-9)
    assert result.kurtosis_literature == pytest.approx(kurtosis(x, 1e-6), rel=1e-9, abs=1e-300)
    assert result.max_inf_norm == float(x.double().abs().max())


@pytest.mark.parametrize("offset", [0.0, 1000.0, -3e4])
def test_kurtosis_far_from_zero(offset: float) -> None:
    """A mean that is large against the spread costs no digits."""
    x = normal(2, 50, 64) + offset

    expected = (kurtosis(x[0]) + kurtosis(x[1])) / 2
    assert statistics(x).kurtosis == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 73.0, 0.1, -1e-30])
def test_flat_tensors_have_one_documented_value(dtype: torch.dtype, value: float) -> None:
    """A constant has no kurtosis: 0 and a flag, never NaN."""
    result = statistics(torch.full((2, 30, 48), value).to(dtype))

    assert (result.kurtosis, result.token_kurtosis_rest) == (FLAT_KURTOSIS, FLAT_KURTOSIS)
    assert (result.kurtosis_literature, result.is_flat) == (0.0, True)
    assert result.max_inf_norm == float(torch.tensor(value).to(dtype).abs())


def test_one_flat_sequence_does_not_enter_the_mean() -> None:
    """Kurtosis averages the sequences that have one; the share of the others is told."""
    x = normal(2, 20, 8)
    x[1] = 5.0
    result = statistics(x)

    assert result.kurtosis == pytest.approx(kurtosis(x[0]), rel=1e-9)
    assert (result.flat_share, result.is_flat) == (0.5, False)


def test_a_single_value_is_flat() -> None:
    """One token of one feature has no variance and no other token."""
    result = statistics(torch.tensor([[[3.0]]]))

    assert (result.kurtosis, result.is_flat, result.max_inf_norm) == (FLAT_KURTOSIS, True, 3.0)
    assert math.isnan(result.max_inf_norm_rest)


def test_first_token_apart() -> None:
    """The first token's norm and kurtosis are its own, also behind padding."""
    x = normal(1, 12, 64)
    x[0, 0, 5] = 900.0
    padded = torch.cat([torch.full((1, 3, 64), 1e6), x], dim=1)
    real = torch.arange(15)[None] >= 3
    for result in (statistics(x), statistics(padded, real)):
        rest = [kurtosis(row) for row in x[0, 1:]]

        assert result.max_inf_norm_first == 900.0
        assert result.max_inf_norm_rest == float(x[0, 1:].abs().max())
        assert result.token_kurtosis_first == pytest.approx(kurtosis(x[0, 0]), rel=1e-9)
        assert result.token_kurtosis_rest == pytest.approx(sum(rest) / 11, rel=1e-9)


@pytest.mark.parametrize("junk", [1e30, math.inf, math.nan])
def test_padding_never_enters(junk: float) -> None:
    """Whatever stands at padded positions, on either side, the statistics stay the same."""
    x = normal(1, 9, 16)
    alone = sequence_moments(token_moments(x), None)
    for left in (0, 4, 7):
        padded = torch.full((1, 16, 16), junk)
        padded[:, left : left + 9] = x
        real = (torch.arange(16) >= left) & (torch.arange(16) < left + 9)
        moments = sequence_moments(token_moments(padded), real[None])

        torch.testing.assert_close(torch.stack(moments[:3]), torch.stack(alone[:3]))


def test_not_finite_values_are_results() -> None:
    """Infinity and NaN show in the numbers instead of being lost."""
    x = normal(1, 5, 8)
    x[0, 2, 3] = math.inf
    assert statistics(x).max_inf_norm == math.inf
    assert math.isnan(statistics(x).kurtosis)
    x[0, 2, 3] = math.nan

    assert math.isnan(statistics(x).max_inf_norm)


def test_a_tensor_larger_than_one_piece() -> None:
    """Reduction in pieces gives the statistics of the whole."""
    x = normal(3, 500, 300) * torch.linspace(0.1, 4.0, 500)[:, None]

    expected = sum(kurtosis(sequence) for sequence in x) / 3
    assert statistics(x).kurtosis == pytest.approx(expected, rel=1e-9)


def test_massive_activations_are_counted_and_placed() -> None:
    """Size above 100 and 1000 times the median; both conditions, padding apart."""
    x = normal(2, 20, 32)
    x[0, 3, 7], x[0, 0, 9], x[0, 1, 1] = 5000.0, -9000.0, 99.0
    x[1] *= 100  # large everywhere: no outlier
    real = torch.ones(2, 20, dtype=torch.bool)
    real[0, :2] = False
    tokens = token_moments(x)
    count, found = massive_activations(x, tokens.peak, None)
    masked, left = massive_activations(x, tokens.peak, real)

    assert (count, [tuple(item) for item in found]) == (
        2,
        [(-9000.0, 0, 0, 9), (5000.0, 0, 3, 7)],
    )
    assert (masked, [tuple(item) for item in left]) == (1, [(5000.0, 0, 1, 7)])
