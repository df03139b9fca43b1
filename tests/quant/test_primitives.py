"""The arithmetic of integer quantization, property by property."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oasis_eval.quant.primitives import (
    ACTIVATION_DIMS,
    SMALLEST_SCALE,
    WEIGHT_DIMS,
    Range,
    codes_of,
    decode,
    encode,
    fake_quantize,
    join_groups,
    make_grid,
    minmax,
    snap,
    split_groups,
)
from oasis_eval.quant.ranges import fake_quantize_weight
from oasis_eval.spec import Granularity, TensorFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = range(2, 9)
LARGEST = float(torch.finfo(torch.float32).max)


def make_format(
    bits: int, granularity: Granularity = "token", *, symmetric: bool = True, group: int = 5
) -> TensorFormat:
    return TensorFormat(
        bits=bits,
        granularity=granularity,
        group_size=group if granularity == "group" else None,
        symmetric=symmetric,
        ranges="dynamic",
    )


def scales(x: Tensor, fmt: TensorFormat, dims: tuple[int, ...]) -> Tensor:
    """Return the scale of every element."""
    parts = []
    for part in split_groups(x.float(), fmt.group_size):
        grid = make_grid(minmax(part, dims), fmt, x.dtype)
        parts.append(grid.scale.expand(part.shape))
    return join_groups(parts, x.shape)


def naive(x: Tensor, fmt: TensorFormat, axis: str) -> Tensor:
    """Quantize-dequantize by plain loops over numpy fp32 scalars; `axis`: what shares a scale."""
    rows, columns = x.shape
    group = min(fmt.group_size or columns, columns)
    key = {
        "tensor": lambda i, j: 0,
        "row": lambda i, j: i,
        "column": lambda i, j: j,
        "group": lambda i, j: (i, j // group),
    }[axis]
    values = x.float().numpy()
    shared: dict[object, list[np.float32]] = {}
    for i, j in itertools.product(range(rows), range(columns)):
        shared.setdefault(key(i, j), []).append(values[i, j])
    out = np.zeros_like(values)
    for i, j in itertools.product(range(rows), range(columns)):
        members = shared[key(i, j)]
        if fmt.symmetric:
            levels = 2 ** (fmt.bits - 1) - 1
            scale = np.float32(max(abs(v) for v in members)) / np.float32(levels)
            low, high = -levels, levels
        else:
            levels = 2**fmt.bits - 1
            smallest = min(np.float32(0), *members)
            largest = max(np.float32(0), *members)
            scale = (largest - smallest) / np.float32(levels)
            zero_point = 0 if scale == 0 else int(np.rint(-smallest / scale))
            low, high = -zero_point, levels - zero_point
        if scale != 0:
            out[i, j] = np.float32(min(max(int(np.rint(values[i, j] / scale)), low), high)) * scale
    return torch.from_numpy(out).to(x.dtype)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Normal, flat, one-sided and outlier-ridden matrices at any ordinary magnitude."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 13))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    x = torch.randn(rows, columns, generator=generator)
    kind = draw(st.sampled_from(["normal", "flat", "positive", "negative", "outlier", "sparse"]))
    if kind == "flat":
        x = torch.full_like(x, float(x[0, 0]))
    elif kind == "positive":
        x = x.abs() + 10
    elif kind == "negative":
        x = -x.abs() - 10
    elif kind == "outlier":
        x[0, 0] *= 1000
    elif kind == "sparse":
        x = x * (torch.rand(rows, columns, generator=generator) < 0.2)
    return x * 10.0 ** draw(st.integers(-12, 12))


formats = st.builds(
    make_format,
    st.sampled_from(BITS),
    st.sampled_from(["tensor", "channel", "token", "group"]),
    symmetric=st.booleans(),
    group=st.integers(1, 16),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@given(tensors(), formats)
def test_error_is_at_most_half_a_step(x: Tensor, fmt: TensorFormat) -> None:
    """Symmetric or not, no value moves by more than half a step (plus rounding)."""
    dims = ACTIVATION_DIMS[fmt.granularity]
    error = (fake_quantize(x, fmt, dims) - x).abs()
    step = scales(x, fmt, dims)

    assert bool((error <= step / 2 * (1 + 1e-5) + x.abs() * 2.0**-22).all())


@given(tensors(), formats)
def test_symmetric_quantization_is_idempotent(x: Tensor, fmt: TensorFormat) -> None:
    """Quantizing again gives the very codes, and values within two units in the last place."""
    fmt = fmt.model_copy(update={"symmetric": True})
    dims = ACTIVATION_DIMS[fmt.granularity]
    once = fake_quantize(x, fmt, dims)
    twice = fake_quantize(once, fmt, dims)

    assert torch.equal(
        (once / scales(x, fmt, dims)).round(), (twice / scales(once, fmt, dims)).round()
    )
    torch.testing.assert_close(twice, once, rtol=2.0**-22, atol=0.0)


@given(tensors(), formats, dtypes, st.integers(0, 20))
def test_powers_of_two_pass_through_bit_for_bit(
    x: Tensor, fmt: TensorFormat, dtype: torch.dtype, k: int
) -> None:
    """Quantizing x * 2^-k gives 2^-k times the quantized x, for any granularity and symmetry."""
    dims = ACTIVATION_DIMS[fmt.granularity]
    x = x.to(dtype)
    expected = fake_quantize(x, fmt, dims) * 2.0**-k
    actual = fake_quantize(x * 2.0**-k, fmt, dims)

    assert torch.equal(expected, actual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", range(21))
def test_powers_of_two_pass_through_a_weight(k: int, dtype: torch.dtype) -> None:
    """The same on an ordinary weight at 4 bits, exponent by exponent."""
    fmt = TensorFormat(bits=4, granularity="channel")
    weight_NK = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = fake_quantize_weight(weight_NK, fmt) * 2.0**-k
    actual = fake_quantize_weight(weight_NK * 2.0**-k, fmt)

    assert torch.equal(expected, actual)


@given(tensors(), formats, dtypes)
def test_zero_stays_exactly_zero(x: Tensor, fmt: TensorFormat, dtype: torch.dtype) -> None:
    """A zero among other values, and a row of zeros, come back as zeros."""
    x = x.to(dtype)
    x[0] = 0
    x[:, 0] = 0
    y = fake_quantize(x, fmt, ACTIVATION_DIMS[fmt.granularity])

    assert bool((y[x == 0] == 0).all())


EXTREMES = (0.0, 2.0**-149, 2.0**-130, 1.5 * 2.0**-126, 1e-30, 1.0, 1e30, LARGEST / 2, LARGEST)


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([sign * value for sign in (1, -1) for value in EXTREMES]),
            st.floats(width=32, allow_nan=False, allow_infinity=False),
        ),
        min_size=1,
        max_size=12,
    ),
    formats,
    st.sampled_from(DTYPES),
)
def test_finite_input_stays_finite(
    values: list[float], fmt: TensorFormat, dtype: torch.dtype
) -> None:
    """No format makes NaN or infinity of finite numbers, subnormal and near the largest alike."""
    limit = float(torch.finfo(dtype).max)
    x = torch.tensor([values], dtype=torch.float32).clamp(-limit, limit).to(dtype)
    y = fake_quantize(x, fmt, ACTIVATION_DIMS[fmt.granularity])
    weight = fake_quantize_weight(
        x, TensorFormat(bits=fmt.bits, granularity="channel", symmetric=fmt.symmetric)
    )

    assert bool(torch.isfinite(y).all() and torch.isfinite(weight).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_numbers_of_a_dtype_stay_finite(
    bits: int, symmetric: bool, dtype: torch.dtype
) -> None:
    """Ranges that end at the largest number of the dtype, on either side or both."""
    limit = torch.finfo(dtype).max
    fractions = torch.linspace(-1, 1, 41, dtype=torch.float64)
    rows = [fractions * limit, fractions.abs() * limit, -fractions.abs() * limit]
    rows += [
        torch.where(fractions < 0, fractions * share, fractions) * limit for share in (0.1, 0.9)
    ]
    x = torch.stack(rows).to(dtype)
    y = fake_quantize(x, make_format(bits, symmetric=symmetric), (-1,))

    assert bool(torch.isfinite(y).all())


def test_scales_below_the_smallest_normal_number_are_raised_to_it() -> None:
    """The documented rule of underflow."""
    x = torch.tensor([[3.0, 1.0, 0.0]]) * 2.0**-128
    grid = make_grid(minmax(x, (-1,)), make_format(8), torch.float32)

    assert grid.scale.item() == SMALLEST_SCALE


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_turns_what_shares_its_scale_into_nan(
    bad: float, symmetric: bool
) -> None:
    """The documented rule: a broken token is NaN as a whole, its neighbours are untouched."""
    x = torch.tensor([[1.0, bad, -2.0], [1.0, 2.0, 3.0]])
    y = fake_quantize(x, make_format(8, symmetric=symmetric), (-1,))

    assert torch.isnan(y).all(dim=-1).tolist() == [True, False]


CASES: list[tuple[dict[str, object], tuple[int, ...], str]] = [
    ({"granularity": "tensor"}, WEIGHT_DIMS["tensor"], "tensor"),
    ({"granularity": "channel"}, WEIGHT_DIMS["channel"], "row"),
    ({"granularity": "channel"}, ACTIVATION_DIMS["channel"], "column"),
    ({"granularity": "token"}, ACTIVATION_DIMS["token"], "row"),
    ({"granularity": "group", "group": 7}, ACTIVATION_DIMS["group"], "group"),
    ({"granularity": "group", "group": 4}, ACTIVATION_DIMS["group"], "group"),
    ({"granularity": "group", "group": 100}, ACTIVATION_DIMS["group"], "group"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("changes", "dims", "axis"), CASES)
def test_equals_plain_loops(
    changes: dict[str, object],
    dims: tuple[int, ...],
    axis: str,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
) -> None:
    """Every granularity equals an independent implementation by loops, bit for bit."""
    generator = torch.Generator().manual_seed(bits)
    x = (torch.randn(6, 20, generator=generator) * 3 + 1).to(dtype)
    x[2] = 0
    fmt = make_format(bits, symmetric=symmetric, **changes)  # type: ignore[arg-type]

    expected = naive(x, fmt, axis)

    assert torch.equal(expected, fake_quantize(x, fmt, dims))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_survive_storage(bits: int, symmetric: bool) -> None:
    """Stored codes lie in the format's range and decode to the quantized values."""
    x = torch.randn(8, 33, generator=torch.Generator().manual_seed(0)) * 5 + 2
    fmt = make_format(bits, symmetric=symmetric)
    grid = make_grid(minmax(x, (-1,)), fmt, x.dtype)
    codes = encode(x, grid)
    levels = 2 ** (bits - 1) - 1
    low, high = (-levels, levels) if symmetric else (0, 2**bits - 1)

    assert codes.dtype == (torch.int8 if symmetric else torch.uint8)
    assert low <= int(codes.min())
    assert int(codes.max()) <= high
    assert torch.equal(fake_quantize(x, fmt, (-1,)), decode(codes, grid, x.dtype))


def off_by_level(ours: Tensor, theirs: Tensor, step: Tensor) -> tuple[int, float]:
    """Return how many elements differ and by how many levels at most."""
    levels = ((ours - theirs) / step).abs()
    differ = levels > 1e-3
    return int(differ.sum()), float(levels.max())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_agrees_with_torch_per_tensor(bits: int, symmetric: bool) -> None:
    """torch multiplies by 1 / scale: at most 5 elements per million, one level apart."""
    x = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(2))
    fmt = make_format(bits, "tensor", symmetric=symmetric)
    grid = make_grid(minmax(x, (-2, -1)), fmt, x.dtype)
    levels = 2 ** (bits - 1) - 1
    zero_point = 0 if grid.zero_point is None else int(grid.zero_point)
    low, high = (-levels, levels) if symmetric else (0, 2**bits - 1)
    theirs = torch.fake_quantize_per_tensor_affine(x, float(grid.scale), zero_point, low, high)
    count, most = off_by_level(fake_quantize(x, fmt, (-2, -1)), theirs, grid.scale)

    assert count <= 5
    assert most < 1.001


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_agrees_with_torch_per_channel(bits: int, symmetric: bool) -> None:
    """The same, a scale for each of 1000 rows."""
    x = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(3))
    fmt = make_format(bits, symmetric=symmetric)
    grid = make_grid(minmax(x, (-1,)), fmt, x.dtype)
    levels = 2 ** (bits - 1) - 1
    low, high = (-levels, levels) if symmetric else (0, 2**bits - 1)
    zero = torch.zeros(1000) if grid.zero_point is None else grid.zero_point.flatten()
    theirs = torch.fake_quantize_per_channel_affine(
        x, grid.scale.flatten(), zero.to(torch.int32), 0, low, high
    )
    count, most = off_by_level(fake_quantize(x, fmt, (-1,)), theirs, grid.scale)

    assert count <= 5
    assert most < 1.001


ROWS = {
    "all negative": [float(v) for v in range(-22, -14)],
    "10 to 11": torch.linspace(10, 11, 16).tolist(),
    "flat": [5.0, 5.0, 5.0, 5.0],
    "touches zero": [-3.0, 0.0],
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_a_range_without_zero_is_extended(row: list[float], bits: int) -> None:
    """One-sided rows keep sign and are at most half of max|x| / (2^b - 1) off."""
    x = torch.tensor([row])
    y = fake_quantize(x, make_format(bits, symmetric=False), (-1,))
    bound = float(x.abs().max()) / (2**bits - 1) / 2

    assert float((y - x).abs().max()) <= bound * (1 + 1e-5)
    assert torch.equal(y.sign(), x.sign())


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_behind_a_gate_plus_ten(bits: int) -> None:
    """Activations that all lie far from zero keep their half-step bound."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).relu() + 10
    y = fake_quantize(x, make_format(bits, symmetric=False), (-1,))
    bound = x.amax(-1, keepdim=True) / (2**bits - 1) / 2

    assert bool(((y - x).abs() <= bound * (1 + 1e-5)).all())


def test_small_bf16_weights_keep_their_precision() -> None:
    """bf16 weights of standard deviation 1e-3 at 4 bits: relative error 0.12, not 1."""
    weight_NK = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 1e-3
    weight_NK = weight_NK.bfloat16()
    after = fake_quantize_weight(weight_NK, TensorFormat(bits=4, granularity="channel"))
    error = (after.float() - weight_NK.float()).norm() / weight_NK.float().norm()

    assert 0.10 < float(error) < 0.15


def test_tiny_fp16_scales_need_no_reciprocal() -> None:
    """An fp16 scale of 6e-8, whose reciprocal is infinite in fp16, quantizes as any other."""
    x = torch.tensor([[6e-8, -4.2e-7, 4.2e-7]], dtype=torch.float16)
    y = fake_quantize(x, make_format(4), (-1,))

    assert bool(torch.isfinite(y).all())
    assert torch.equal(y, x)


@pytest.mark.parametrize(("bits", "decibels"), [(4, 19.0), (8, 44.0)])
def test_signal_to_noise_of_normal_weights(bits: int, decibels: float) -> None:
    """About 19 dB at 4 bits and 44 dB at 8, per output channel of 128 inputs."""
    weight_NK = torch.randn(2048, 128, generator=torch.Generator().manual_seed(0))
    after = fake_quantize_weight(weight_NK, TensorFormat(bits=bits, granularity="channel"))
    noise = (after - weight_NK).square().sum()
    ratio = 10 * torch.log10(weight_NK.square().sum() / noise)

    assert float(ratio) == pytest.approx(decibels, abs=1.0)


def test_codes_are_rounded_half_to_even_after_a_true_division() -> None:
    """2.5 steps go to 2, 3.5 to 4; 7 / 7 * 7 stays 7 at every width."""
    grid = make_grid(
        Range(torch.tensor([[-7.0]]), torch.tensor([[7.0]])), make_format(4), torch.float32
    )
    codes = codes_of(torch.tensor([[0.5, 1.5, 2.5, 3.5, -0.5, -1.5, 7.0]]), grid, clip=True)

    assert codes.tolist() == [[0.0, 2.0, 2.0, 4.0, -0.0, -2.0, 7.0]]


def test_codes_are_those_of_a_division_for_every_element() -> None:
    """Not one code in four million differs from numpy's fp32 division, as 1 / scale would."""
    x = torch.randn(2000, 2000, generator=torch.Generator().manual_seed(4))
    grid = make_grid(minmax(x, (-1,)), make_format(8), torch.float32)
    expected = np.rint(x.numpy() / grid.scale.numpy())

    assert np.array_equal(expected, codes_of(x, grid, clip=False).numpy())
    assert not np.array_equal(expected, np.rint(x.numpy() * (1 / grid.scale.numpy())))


def test_values_outside_of_a_fixed_range_are_clipped() -> None:
    """Clipping ends at the range, on both sides."""
    grid = make_grid(
        Range(torch.tensor([-1.0]), torch.tensor([3.0])),
        make_format(8, symmetric=False),
        torch.float32,
    )
    y = snap(torch.tensor([-50.0, 50.0]), grid, clip=True)

    assert y.tolist() == pytest.approx([-1.0, 3.0], abs=4 / 255)


@pytest.mark.parametrize("width", [1, 5, 48, 96])
@pytest.mark.parametrize("size", [1, 5, 32, 64, 128])
def test_groups_are_put_back_together(width: int, size: int) -> None:
    """Splitting into groups and joining is the identity, short last group or not."""
    x = torch.arange(3.0 * width).reshape(3, width)

    assert torch.equal(x, join_groups(split_groups(x, size), x.shape))


def test_does_not_write_to_its_input() -> None:
    """Quantizing returns a new tensor in every dtype and layout."""
    for dtype, group in itertools.product(DTYPES, (None, 5)):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
        before = x.clone()
        granularity: Granularity = "group" if group else "token"
        fake_quantize(x, make_format(4, granularity), (-1,))

        assert torch.equal(before, x)
