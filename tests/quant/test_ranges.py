"""Percentiles and least-squared-error clipping of one tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasis_eval.quant.primitives import WEIGHT_DIMS, Range, make_grid, minmax, snap, split_groups
from oasis_eval.quant.ranges import (
    CLIPPING_RATIOS,
    fake_quantize_weight,
    merge_tails,
    percentile_range,
    tail_length,
    tails,
    weight_range,
)
from oasis_eval.spec import Granularity, TensorFormat


def make_format(ranges: str, granularity: Granularity, *, symmetric: bool = True) -> TensorFormat:
    return TensorFormat.model_validate(
        {
            "bits": 4,
            "granularity": granularity,
            "group_size": 7 if granularity == "group" else None,
            "symmetric": symmetric,
            "ranges": ranges,
            "percentile": 95.0 if ranges == "percentile" else 100.0,
        }
    )


@given(
    st.integers(1, 60),
    st.integers(0, 1000),
    st.floats(50.5, 100.0),
    st.integers(1, 59),
)
def test_percentile_equals_numpy(count: int, seed: int, percentile: float, cut: int) -> None:
    """The percentile from tails, in one piece or two, is numpy's linear percentile."""
    x_RM = torch.randn(3, count, generator=torch.Generator().manual_seed(seed))
    length = tail_length(count, percentile)
    whole = tails(x_RM, length)
    if cut < count:
        whole = merge_tails(tails(x_RM[:, :cut], length), tails(x_RM[:, cut:], length), length)
    span = percentile_range(whole, count, percentile)
    values = x_RM.double().numpy()

    for found, at in ((span.high, percentile), (span.low, 100 - percentile)):
        expected = np.percentile(values, at, axis=1)
        np.testing.assert_allclose(found[:, 0].numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_percentile_of_a_weight(granularity: Granularity) -> None:
    """Each tensor, row or group has its own percentile."""
    weight_NK = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    fmt = make_format("percentile", granularity)
    dims = WEIGHT_DIMS[granularity]
    for part in split_groups(weight_NK, fmt.group_size):
        span = weight_range(part, fmt, dims)
        expected = np.percentile(part.double().numpy(), 95.0, axis=dims, keepdims=True)

        np.testing.assert_allclose(span.high.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_clipping_has_the_least_error_of_all_ratios(
    granularity: Granularity, symmetric: bool
) -> None:
    """For every tensor, row or group, no other ratio tried has a smaller squared error."""
    weight_NK = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) + 0.3
    weight_NK[1] *= 50
    weight_NK[2, 0] = 1000
    fmt = make_format("mse", granularity, symmetric=symmetric)
    dims = WEIGHT_DIMS[granularity]
    for part in split_groups(weight_NK, fmt.group_size):
        span = minmax(part, dims)
        chosen = snap(part, make_grid(weight_range(part, fmt, dims), fmt, part.dtype), clip=True)
        error = (chosen - part).double().square().sum(dims)
        for ratio in CLIPPING_RATIOS:
            grid = make_grid(Range(span.low * ratio, span.high * ratio), fmt, part.dtype)
            other = (snap(part, grid, clip=True) - part).double().square().sum(dims)

            assert bool((error <= other * (1 + 1e-6)).all())


def test_clipping_beats_the_extremes_where_there_is_an_outlier() -> None:
    """At 4 bits a row with an outlier is better clipped."""
    weight_NK = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    weight_NK[:, 0] = 12.0
    errors = {
        ranges: float((fake_quantize_weight(weight_NK, fmt) - weight_NK).square().sum())
        for ranges in ("minmax", "mse")
        for fmt in [make_format(ranges, "channel")]
    }

    assert errors["mse"] < 0.8 * errors["minmax"]


@pytest.mark.parametrize("ranges", ["minmax", "percentile", "mse"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_zero_rows_stay_zero(granularity: Granularity, ranges: str) -> None:
    """A row of zeros and a zero block of 16 come back as exact zeros under every estimator."""
    weight_NK = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    weight_NK[1] = 0
    weight_NK[2, 16:32] = 0
    after = fake_quantize_weight(weight_NK, make_format(ranges, granularity))

    assert bool((after[1] == 0).all())
    assert bool((after[2, 16:32] == 0).all())
    assert bool(torch.isfinite(after).all())


@pytest.mark.parametrize("k", [20, 90])
@pytest.mark.parametrize("ranges", ["percentile", "mse"])
def test_powers_of_two_pass_through_estimators(ranges: str, k: int) -> None:
    """Clipped ranges are relative to the data too, even where its squares underflow."""
    weight_NK = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    fmt = make_format(ranges, "channel")
    expected = fake_quantize_weight(weight_NK, fmt) * 2.0**-k

    assert torch.equal(expected, fake_quantize_weight(weight_NK * 2.0**-k, fmt))
