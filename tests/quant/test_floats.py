"""Low-bit floats: every code, every tie, and the scales of fp8, MXFP4 and NVFP4."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from oasis_eval.quant.floats import (
    E2M1,
    E4M3,
    block_scale,
    power_of_two_scale,
    round_,
    top_scale,
)
from oasis_eval.quant.names import scheme_of
from oasis_eval.quant.primitives import (
    ACTIVATION_DIMS,
    fake_quantize,
    make_grid,
    minmax,
    split_groups,
)
from oasis_eval.quant.ranges import fake_quantize_weight
from oasis_eval.quant.weights import decode, encode
from oasis_eval.spec import Granularity, TensorFormat

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = float(torch.finfo(torch.float32).max)


def fp8(granularity: Granularity = "token", group: int | None = None) -> TensorFormat:
    return TensorFormat(
        type="fp8_e4m3", bits=8, granularity=granularity, group_size=group, ranges="dynamic"
    )


def weights_of(name: str) -> TensorFormat:
    scheme = scheme_of(name)
    assert scheme is not None
    assert scheme.weights is not None
    return scheme.weights


MX, NV = weights_of("mxfp4"), weights_of("nvfp4")


def to_e4m3(x: Tensor) -> Tensor:
    """Round by torch's own cast, saturating."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def to_e2m1(value: float) -> float:
    """Look the nearest value up; of two equally near ones the even code."""
    magnitude = min(abs(value), 6.0)
    nearest = min(range(8), key=lambda code: (abs(E2M1_VALUES[code] - magnitude), code % 2))
    return math.copysign(E2M1_VALUES[nearest], value)


# --- rounding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e4m3_is_torchs_cast_for_every_16_bit_number(dtype: torch.dtype) -> None:
    """All 65536 patterns of bf16 and of fp16, which hold every e4m3 value and every tie."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    x = x[torch.isfinite(x)]

    assert torch.equal(to_e4m3(x), round_(x.clone(), E4M3))


def test_e4m3_is_torchs_cast_around_every_tie() -> None:
    """The fp32 numbers just below, at and just above the middle of any two neighbours."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])

    assert codes[-1] == 448
    assert torch.equal(codes, round_(codes.clone(), E4M3))
    assert torch.equal(to_e4m3(x), round_(x.clone(), E4M3))
    assert torch.equal(to_e4m3(-x), round_(-x, E4M3))


def test_every_e2m1_code_and_tie() -> None:
    """The sixteen codes stay, ties go to the even code, the rest saturates."""
    codes = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 8.0, 1e30]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0]

    assert torch.equal(codes, round_(codes.clone(), E2M1))
    assert round_(torch.tensor(ties), E2M1).tolist() == expected
    assert round_(-torch.tensor(ties), E2M1).tolist() == [-value for value in expected]


def test_e2m1_is_the_nearest_value() -> None:
    """A fine grid of numbers against a look-up."""
    x = torch.arange(-1600, 1601) / 200

    assert round_(x.clone(), E2M1).tolist() == [to_e2m1(value) for value in x.tolist()]


@pytest.mark.parametrize("kind", [E4M3, E2M1])
def test_non_finite_numbers_become_nan(kind: object) -> None:
    """Neither NaN nor infinity saturates."""
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0])

    assert torch.isnan(round_(x, kind)).tolist() == [True, True, True, False]  # type: ignore[arg-type]


# --- scales -----------------------------------------------------------------------------------


def test_power_of_two_scales() -> None:
    """floor(log2(absmax)) - 2 for every exponent of fp32, ending at 2^-127; zero has that one."""
    magnitudes = [0.0, LARGEST]
    magnitudes += [m * 2.0**e for m in (1.0, 1.25, 1.999) for e in range(-145, 128)]
    expected = [
        2.0 ** max(math.frexp(value)[1] - 3, -127) if value else 2.0**-127 for value in magnitudes
    ]

    assert power_of_two_scale(torch.tensor(magnitudes)).tolist() == expected


def test_block_scales_are_e4m3_numbers_times_the_scale_above() -> None:
    """By hand: largest 2688 makes the scale above 1, and blocks have e4m3(absmax / 6)."""
    top = top_scale(torch.tensor(2688.0))
    blocks = torch.tensor([2688.0, 6.0, 6.3, 0.1, 1e-5, 0.0])

    assert top == 1.0
    assert block_scale(blocks, top).tolist() == [
        448.0,
        1.0,
        1.0,  # 1.05, of 1 and 1.125
        0.017578125,  # 1/60, of 8/512 and 9/512
        2.0**-9,  # raised
        2.0**-9,
    ]


# --- whole formats ----------------------------------------------------------------------------


def naive_fp8(x: Tensor, granularity: str, group: int) -> Tensor:
    """By plain loops and torch's cast."""
    work = x.float()
    rows, columns = x.shape
    key = {
        "tensor": lambda i, j: 0,
        "token": lambda i, j: i,
        "channel": lambda i, j: j,
        "group": lambda i, j: (i, j // group),
    }[granularity]
    largest: dict[object, Tensor] = {}
    for i, j in itertools.product(range(rows), range(columns)):
        value = work[i, j].abs()
        largest[key(i, j)] = torch.maximum(largest.get(key(i, j), value), value)
    out = torch.zeros_like(work)
    for i, j in itertools.product(range(rows), range(columns)):
        if largest[key(i, j)] > 0:
            scale = largest[key(i, j)] / 448
            out[i, j] = to_e4m3(work[i, j] / scale) * scale
    return out.to(x.dtype)


def naive_fp4(x: Tensor, size: int, top: Tensor | None) -> Tensor:
    """By plain loops; `top`: the scale above of each row, None for MX."""
    out = torch.zeros(x.shape)
    for i, row in enumerate(x.float()):
        for start in range(0, len(row), size):
            block = row[start : start + size]
            largest = block.abs().max()
            if largest == 0:
                continue
            if top is None:
                scale = torch.tensor(2.0 ** (math.floor(math.log2(float(largest))) - 2))
            else:
                scale = to_e4m3(largest / 6 / top[i]).clamp(min=2.0**-9) * top[i]
            for j, value in enumerate(block / scale):
                out[i, start + j] = to_e2m1(float(value)) * scale
    return out.to(x.dtype)


def sample(dtype: torch.dtype, columns: int = 40) -> Tensor:
    """Normal rows of other magnitudes, one of them zero, with outliers and a zero block."""
    x = torch.randn(6, columns, generator=torch.Generator().manual_seed(3))
    x *= 10.0 ** torch.arange(-3.0, 3.0)[:, None]
    x[1] = 0
    x[2, :16] = 0
    x[3, 5] *= 300
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", ["tensor", "channel", "token", "group"])
def test_fp8_equals_plain_loops(granularity: Granularity, dtype: torch.dtype) -> None:
    """absmax / 448 and torch's cast, whatever shares a scale."""
    fmt = fp8(granularity, 7 if granularity == "group" else None)
    x = sample(dtype)

    assert torch.equal(
        naive_fp8(x, granularity, 7), fake_quantize(x, fmt, ACTIVATION_DIMS[granularity])
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 40, 7])
def test_mxfp4_equals_plain_loops(columns: int, dtype: torch.dtype) -> None:
    """Weights and activations alike, short last group or not."""
    x = sample(dtype, columns)
    expected = naive_fp4(x, 32, None)

    assert torch.equal(expected, fake_quantize(x, MX, (-1,)))
    assert torch.equal(expected, fake_quantize_weight(x, MX))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 40, 7])
def test_nvfp4_equals_plain_loops(columns: int, dtype: torch.dtype) -> None:
    """One scale above per weight, one per token; the last, shorter group is under it too."""
    x = sample(dtype, columns)
    largest = x.float().abs()
    whole = (largest.max() / (448 * 6)).expand(6)
    rows = largest.amax(-1) / (448 * 6)

    assert torch.equal(naive_fp4(x, 16, whole), fake_quantize_weight(x, NV))
    assert torch.equal(naive_fp4(x, 16, rows), fake_quantize(x, NV, (-1,)))


@pytest.mark.parametrize("fmt", [MX, NV, fp8("channel"), fp8("tensor"), fp8("group", 7)])
def test_codes_and_scales_are_the_quantized_weight(fmt: TensorFormat) -> None:
    """Codes decode to the fake-quantized weight, and each of them is a value of its type."""
    weight_NK = sample(torch.float32)
    fmt = fmt.model_copy(update={"ranges": "minmax"})
    encoded = encode(weight_NK, fmt)
    kind = E4M3 if fmt.bits == 8 else E2M1

    assert torch.equal(fake_quantize_weight(weight_NK, fmt), decode(encoded, torch.float32))
    for part in encoded.parts:
        assert torch.equal(part.codes, round_(part.codes.clone(), kind))


@pytest.mark.parametrize("name", ["fp8", "fp8-g16", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("ranges", ["percentile", "mse"])
def test_other_ranges_of_a_weight(ranges: str, name: str) -> None:
    """Clipping by squared error is no worse than the extremes; percentiles clip."""
    weight_NK = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    plain = weights_of(name)
    fields = plain.model_dump() | {"ranges": ranges}
    fmt = TensorFormat.model_validate(
        fields | ({"percentile": 90.0} if ranges == "percentile" else {})
    )
    errors = [
        float((fake_quantize_weight(weight_NK, each) - weight_NK).square().sum())
        for each in (plain, fmt)
    ]

    assert math.isfinite(errors[1])
    if ranges == "mse":
        assert errors[1] <= errors[0]
    elif name != "mxfp4":  # whose clipped range may have the same power of two
        assert errors[1] > errors[0]


@pytest.mark.parametrize("name", ["fp8", "fp8-g16", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_powers_of_two_pass_through(name: str, dtype: torch.dtype) -> None:
    """Quantizing x * 2^-k gives 2^-k times the quantized x, bit for bit, k from -20 to 20."""
    fmt = weights_of(name)
    x = sample(dtype)
    for k in range(-20, 21):
        expected = fake_quantize_weight(x, fmt) * 2.0**-k

        assert torch.equal(expected, fake_quantize_weight(x * 2.0**-k, fmt))


def test_mxfp4_is_idempotent_bit_for_bit() -> None:
    """Values that are on the grid stay."""
    for dtype in DTYPES:
        once = fake_quantize(sample(dtype), MX, (-1,))

        assert torch.equal(once, fake_quantize(once, MX, (-1,)))


def test_nvfp4_is_idempotent_within_rounding_of_the_scale_above() -> None:
    """Groups no smaller than 2^-14 of the largest, whose e4m3 scales are not subnormal."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    once = fake_quantize_weight(x, NV)

    torch.testing.assert_close(fake_quantize_weight(once, NV), once, rtol=2.0**-22, atol=0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", [fp8(), fp8("group", 16), MX, NV])
def test_a_non_finite_value_is_not_hidden(fmt: TensorFormat, bad: float) -> None:
    """Its group (under NVFP4 its token) becomes NaN, other tokens do not."""
    x = sample(torch.float32)
    x[3, 2] = bad
    y = fake_quantize(x, fmt, (-1,))

    assert bool(torch.isnan(y[3, :16]).all())
    assert bool(torch.isfinite(y[[0, 1, 2, 4, 5]]).all())


def test_rows_of_nvfp4_activations_are_independent() -> None:
    """What else is in the batch does not change a token."""
    x = sample(torch.float32)

    assert torch.equal(fake_quantize(x, NV, (-1,))[4:5], fake_quantize(x[4:5], NV, (-1,)))


def test_tiny_groups_beside_a_large_one_are_not_lost() -> None:
    """An NVFP4 group whose e4m3 scale would round to 0 has the smallest one."""
    x = torch.full((1, 32), 1.0)
    x[0, 0] = 2688 * 6.0
    x[0, 16:] = 2.0**-8 * 6 * 1.5
    y = fake_quantize(x, NV, (-1,))

    assert y[0, 16:].unique().item() == pytest.approx(2.0**-9 * 6 * 3, rel=0.2)


# --- every format -----------------------------------------------------------------------------


def every_format() -> list[TensorFormat]:
    """All integer widths and floats at every granularity."""
    formats = [MX, NV, MX.model_copy(update={"scales": "fp32"})]
    places: list[tuple[Granularity, int | None]] = [
        ("tensor", None),
        ("channel", None),
        ("token", None),
        ("group", 1),
        ("group", 5),
        ("group", 16),
    ]
    for granularity, group in places:
        formats.append(fp8(granularity, group))
        for bits, symmetric in itertools.product(range(2, 9), (True, False)):
            formats.append(
                TensorFormat(
                    bits=bits,
                    granularity=granularity,
                    group_size=group,
                    symmetric=symmetric,
                    ranges="dynamic",
                )
            )
    return formats


def random_tensors(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """36 matrices: normal, flat, one-sided, sparse, with outliers; any magnitude of the dtype."""
    x = torch.randn(36, 3, 23, generator=generator, dtype=torch.float64)
    x[6:12] = x[6:12, :1, :1]
    x[12:18] = x[12:18].abs() + 10
    x[18:24] = -x[18:24].abs() - 10
    x[24:30] *= torch.rand(6, 3, 23, generator=generator) < 0.2
    x[30:36, 0, 0] *= 1000
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal) - 10, math.log2(info.max)
    x *= 2.0 ** (low + (high - low) * torch.rand(36, 1, 1, generator=generator))
    x[::6] *= info.max / x[::6].abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)
    return x.clamp(-info.max, info.max).to(dtype)


def spacing(x: Tensor, fmt: TensorFormat, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the distance of neighbouring levels around every element."""
    largest = x.abs().amax(-1, keepdim=True)[..., None] if fmt.scales == "e4m3" else None
    out = []
    for part in split_groups(x, fmt.group_size):
        scale = make_grid(minmax(part, dims), fmt, dtype, largest=largest).scale.expand(part.shape)
        if fmt.type != "int":
            smallest, digits = (-6, 3) if fmt.bits == 8 else (0, 1)
            power = torch.log2((part / scale).abs().clamp(min=2.0**smallest)).floor()
            scale = scale * 2.0 ** (power - digits)
        out.append(scale.reshape(*x.shape[:2], -1))
    return torch.cat(out, -1)


def test_ten_thousand_random_tensors() -> None:
    """Finite in, finite out, zeros stay; half a step at most; idempotent: each in its scope.

    MX and NV formats saturate and have rounded scales, so the half-step bound is not theirs.
    Asymmetric levels next to the largest number of a dtype are given up, so that bound ends there.
    """
    generator = torch.Generator().manual_seed(0)
    count = 0
    for dtype, fmt in itertools.product(DTYPES, every_format()):
        x = random_tensors(dtype, generator)
        count += len(x)
        dims = ACTIVATION_DIMS[fmt.granularity]
        y = fake_quantize(x, fmt, dims)

        assert bool(torch.isfinite(y).all()), fmt
        assert bool((y[x == 0] == 0).all()), fmt
        if fmt.granularity != "token":
            of_weights = fmt.model_copy(update={"ranges": "minmax"})
            weights = [fake_quantize_weight(weight, of_weights) for weight in x[:6]]
            assert bool(torch.isfinite(torch.stack(weights)).all()), fmt
        if fmt.scales != "fp32":
            continue
        work = x.float()
        info = torch.finfo(dtype)
        bound = spacing(work, fmt, dims, dtype) / 2 * (1 + 1e-5)
        bound = bound + work.abs() * info.eps + info.smallest_normal * info.eps
        inside = fmt.symmetric | (work.abs() < info.max / 4)

        assert bool(((y.float() - work).abs() <= bound)[inside].all()), fmt
        if fmt.symmetric and dtype == torch.float32:
            torch.testing.assert_close(
                fake_quantize(y, fmt, dims), y, rtol=2.0**-22, atol=2.0**-148
            )
    assert count >= 10_000
