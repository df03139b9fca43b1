"""GPTQ on one weight, against the algorithm written out input by input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.primitives import WEIGHT_DIMS, codes_of, make_grid
from oasis_eval.quant.ranges import weight_range
from oasis_eval.quant.transforms.gptq import BLOCK, quantize_weight
from oasis_eval.quant.weights import WeightCodes, decode, encode
from oasis_eval.spec import Gptq, TensorFormat

FORMATS = {
    "channel": TensorFormat(bits=4, granularity="channel"),
    "channel-3": TensorFormat(bits=3, granularity="channel", symmetric=False),
    "channel-mse": TensorFormat(bits=4, granularity="channel", ranges="mse"),
    "percentile": TensorFormat(bits=4, granularity="channel", ranges="percentile", percentile=99.0),
    "tensor": TensorFormat(bits=4, granularity="tensor"),
    "tensor-asymmetric": TensorFormat(bits=4, granularity="tensor", symmetric=False),
    "group-32": TensorFormat(bits=4, granularity="group", group_size=32),
    "group-48-mse": TensorFormat(bits=4, granularity="group", group_size=48, ranges="mse"),
    "group-150": TensorFormat(bits=3, granularity="group", group_size=150, symmetric=False),
    "group-128": TensorFormat(bits=4, granularity="group", group_size=128),
    "group-999": TensorFormat(bits=4, granularity="group", group_size=999),
    "fp8": TensorFormat(type="fp8_e4m3", bits=8, granularity="channel"),
    "nvfp4": TensorFormat(
        type="fp4_e2m1", bits=4, granularity="group", group_size=16, scales="e4m3"
    ),
    "mxfp4": TensorFormat(
        type="fp4_e2m1", bits=4, granularity="group", group_size=32, scales="e8m0"
    ),
}
SPEC = Gptq()


def _weight(num_outputs: int = 24, num_inputs: int = 270, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_outputs, num_inputs, generator=generator) * 0.1


def _inputs(num_inputs: int = 270, num_tokens: int = 600, seed: int = 1) -> Tensor:
    """Correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(num_inputs, num_inputs, generator=generator, dtype=torch.float64)
    sizes = torch.logspace(-1, 1, num_inputs, dtype=torch.float64)
    order = torch.randperm(num_inputs, generator=generator)
    latent = torch.randn(num_tokens, num_inputs, generator=generator, dtype=torch.float64)
    return (latent @ (mixing / num_inputs**0.5 + torch.eye(num_inputs))) * sizes[order]


def _codes_NK(codes: WeightCodes) -> Tensor:  # noqa: N802 - shape suffix
    return torch.cat([part.codes.reshape(codes.shape[0], -1) for part in codes.parts], dim=1)


def _literally(weight: Tensor, hessian: Tensor, fmt: TensorFormat, spec: Gptq) -> Tensor:
    """Optimal brain surgery, one input after another, without blocks and without Cholesky.

    After input j is rounded, all inputs left change by -(w_j - q_j) / [H^-1]_jj [H^-1]_j,: and j
    is eliminated from H^-1 by a step of Gauss.
    """
    num_inputs = weight.shape[1]
    size = fmt.group_size or num_inputs
    original, work = weight.clone(), weight.double().clone()
    mean = hessian.diagonal().mean()
    inverse = torch.linalg.inv(hessian + spec.damping * mean * torch.eye(num_inputs))
    order = list(range(num_inputs))
    if spec.order == "activation":
        order.sort(key=lambda j: -float(hessian[j, j]))
    codes = torch.zeros_like(weight)
    grids: dict[int, object] = {}
    left = set(order)
    for j in order:
        group = j // size
        if group not in grids:
            source = original if spec.order == "activation" else work.to(weight.dtype)
            part = source[:, group * size : (group + 1) * size].float()
            top = original.float().abs().max().reshape(1, 1) if fmt.scales == "e4m3" else None
            span = weight_range(part, fmt, WEIGHT_DIMS[fmt.granularity], largest=top)
            grids[group] = make_grid(span, fmt, weight.dtype, largest=top)
        grid = grids[group]
        code = codes_of(work[:, j : j + 1].float(), grid, clip=True)
        codes[:, j] = code[:, 0]
        error = work[:, j] - (code * grid.scale)[:, 0].to(weight.dtype).double()
        left.remove(j)
        rest = sorted(left)
        work[:, rest] -= torch.outer(error / inverse[j, j], inverse[j, rest])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j, :]) / inverse[j, j]
    return codes


@pytest.mark.parametrize("order", ["natural", "activation"])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_algorithm_written_out(name: str, order: str) -> None:
    """Blocks, Cholesky factors and groups that end in the middle of blocks change no code."""
    weight, x = _weight(), _inputs()
    hessian = x.T @ x / len(x)
    spec = Gptq(order=order)
    found = quantize_weight(weight, hessian, FORMATS[name], spec, name="layer")

    assert weight.shape[1] > 2 * BLOCK
    assert torch.equal(_codes_NK(found), _literally(weight, hessian, FORMATS[name], spec))
    assert not torch.equal(_codes_NK(found), _codes_NK(encode(weight, FORMATS[name])))


@pytest.mark.parametrize("order", ["natural", "activation"])
@pytest.mark.parametrize("name", FORMATS)
def test_uncorrelated_inputs_round_to_nearest(name: str, order: str) -> None:
    """With a diagonal Hessian there is nothing to make up for: codes, scales and values equal."""
    fmt = FORMATS[name]
    for diagonal in (torch.ones(270), torch.logspace(-3, 3, 270)):
        found = quantize_weight(
            _weight(), torch.diag(diagonal).double(), fmt, Gptq(order=order), name="layer"
        )
        expected = encode(_weight(), fmt)

        assert len(found.parts) == len(expected.parts)
        for a, b in zip(found.parts, expected.parts, strict=True):
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.grid.scale, b.grid.scale)
            assert (a.grid.zero_point is None) == (b.grid.zero_point is None)
            if a.grid.zero_point is not None:
                assert torch.equal(a.grid.zero_point, b.grid.zero_point)
                assert torch.equal(a.grid.limits[0], b.grid.limits[0])
                assert torch.equal(a.grid.limits[1], b.grid.limits[1])
            assert a.grid.kind == b.grid.kind


@pytest.mark.parametrize("order", ["natural", "activation"])
@pytest.mark.parametrize("name", FORMATS)
def test_output_error_falls(name: str, order: str) -> None:
    """On correlated inputs the layer's outputs are closer than after rounding to nearest."""
    fmt, weight = FORMATS[name], _weight()
    for seed in range(2):
        x = _inputs(seed=seed, num_tokens=600)
        hessian = x.T @ x
        found = quantize_weight(weight, hessian, fmt, Gptq(order=order), name="layer")

        def error(codes: WeightCodes, x: Tensor = x) -> float:
            difference = decode(codes, torch.float32).double() - weight.double()
            return float((x @ difference.T).square().sum())

        assert error(found) < 0.8 * error(encode(weight, fmt))


@pytest.mark.parametrize("name", FORMATS)
def test_parts_have_the_shapes_of_encode(name: str) -> None:
    """Whatever takes codes that were rounded to nearest takes these."""
    x = _inputs()
    found = quantize_weight(_weight(), x.T @ x, FORMATS[name], SPEC, name="layer")
    expected = encode(_weight(), FORMATS[name])

    assert found.shape == expected.shape
    for a, b in zip(found.parts, expected.parts, strict=True):
        assert a.codes.shape == b.codes.shape
        assert a.grid.scale.shape == b.grid.scale.shape
        assert a.codes.dtype == b.codes.dtype == torch.float32


def test_codes_stay_within_the_format() -> None:
    """Errors can push a weight out of its row's range, and it is clipped."""
    x = _inputs()
    hessian = x.T @ x
    symmetric = quantize_weight(_weight(), hessian, FORMATS["channel"], SPEC, name="layer")
    other = quantize_weight(_weight(), hessian, FORMATS["channel-3"], SPEC, name="layer")
    grid = other.parts[0].grid

    assert int(_codes_NK(symmetric).abs().max()) == 7
    assert bool((_codes_NK(other) >= grid.limits[0]).all())
    assert bool((_codes_NK(other) <= grid.limits[1]).all())
    assert int((_codes_NK(other) + grid.zero_point).max()) == 7


def test_dead_inputs_are_rounded_to_nearest() -> None:
    """Inputs that are always 0 neither fail nor change anything else, and keep their weights."""
    weight, x = _weight(), _inputs()
    dead = torch.zeros(270, dtype=torch.bool)
    dead[[0, 5, 127, 128, 269]] = True
    x[:, dead] = 0.0
    # The grid is that of the whole row, so the rest alone must not have a smaller range.
    weight[:, dead] *= 0.5
    for order in ("natural", "activation"):
        spec = Gptq(order=order)
        found = quantize_weight(weight, x.T @ x, FORMATS["channel"], spec, name="layer")
        nearest = encode(weight, FORMATS["channel"])
        alive = x[:, ~dead]
        rest = quantize_weight(
            weight[:, ~dead], alive.T @ alive, FORMATS["channel"], spec, name="layer"
        )

        assert torch.equal(_codes_NK(found)[:, dead], _codes_NK(nearest)[:, dead])
        assert torch.equal(_codes_NK(found)[:, ~dead], _codes_NK(rest))


def test_all_dead_inputs_round_to_nearest() -> None:
    """A layer that only ever saw zeros."""
    found = quantize_weight(
        _weight(), torch.zeros(270, 270), FORMATS["channel"], SPEC, name="layer"
    )

    assert torch.equal(_codes_NK(found), _codes_NK(encode(_weight(), FORMATS["channel"])))


def test_factor_of_the_hessian_does_not_matter() -> None:
    """Sums or means, 1e-12 or 1e12: damping is relative."""
    x = _inputs()
    hessian = x.T @ x
    expected = quantize_weight(_weight(), hessian, FORMATS["channel"], SPEC, name="layer")
    for exponent in (-40, 40):
        found = quantize_weight(
            _weight(), hessian * 2.0**exponent, FORMATS["channel"], SPEC, name="layer"
        )

        assert torch.equal(_codes_NK(found), _codes_NK(expected))


def test_singular_hessians_are_damped() -> None:
    """Fewer tokens than inputs, and two inputs that are the same."""
    x = _inputs(num_tokens=40)
    x[:, 3] = x[:, 4]
    found = quantize_weight(_weight(), x.T @ x, FORMATS["channel"], SPEC, name="layer")
    difference = (decode(found, torch.float32) - _weight()).double()
    nearest = (decode(encode(_weight(), FORMATS["channel"]), torch.float32) - _weight()).double()

    assert float((x @ difference.T).norm()) < 0.5 * float((x @ nearest.T).norm())


def test_much_damping_rounds_to_nearest() -> None:
    """The more is added to the diagonal, the less is made up for."""
    x = _inputs()
    nearest = _codes_NK(encode(_weight(), FORMATS["channel"]))
    differing = []
    for damping in (0.01, 1.0, 1e6):
        found = quantize_weight(
            _weight(), x.T @ x, FORMATS["channel"], Gptq(damping=damping), name="layer"
        )
        differing.append(int((_codes_NK(found) != nearest).sum()))

    assert differing[0] > differing[1] > differing[2] == 0


def test_bf16_weights_are_rounded_as_they_compute() -> None:
    """Errors are those of the values that the layer will hold in bf16."""
    weight, x = _weight().bfloat16(), _inputs()
    fmt = TensorFormat(bits=8, granularity="channel")
    found = quantize_weight(weight, x.T @ x, fmt, SPEC, name="layer")

    assert torch.equal(_codes_NK(found), _literally(weight, x.T @ x, fmt, SPEC).float())


def test_non_finite_values_are_refused() -> None:
    """By the layer's name."""
    weight = _weight()
    weight[3, 3] = float("nan")
    with pytest.raises(QuantizationError, match=r"mlp\.up_proj: the weight holds non-finite"):
        quantize_weight(weight, torch.eye(270), FORMATS["channel"], SPEC, name="mlp.up_proj")
    with pytest.raises(QuantizationError, match=r"mlp\.up_proj: inputs on the calibration text"):
        quantize_weight(
            _weight(),
            torch.full((270, 270), float("inf")),
            FORMATS["channel"],
            SPEC,
            name="mlp.up_proj",
        )
