"""Integer products: exact against int64, whatever would saturate; inexact kernels rejected."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from oasis_eval.errors import QuantizationError
from oasis_eval.quant import kernels
from oasis_eval.quant.kernels import Kernel, Prepared

CPU = torch.device("cpu")
WIDTHS = [(127, 127), (127, 255), (7, 7), (7, 127), (15, 255), (255, 255)]
ROWS = (1, 16, 17, 512)
INPUTS = (1, 3, 64, 1041, 4096)


ALWAYS_EXACT = (kernels.ONEDNN_SPLIT, kernels.CARRIED, kernels.INT_MM)
"""At every width and on every CPU; not found by the probe, which is itself to be tested."""


def as_int64(weight_NK: Tensor, codes_MK: Tensor) -> Tensor:
    """The product in int64, column by column of the weight."""
    return torch.stack([(codes_MK.long() * row_K.long()).sum(-1) for row_K in weight_NK], dim=-1)


@pytest.mark.parametrize("kernel", ALWAYS_EXACT, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("num_inputs", INPUTS)
@pytest.mark.parametrize("fill", ["largest", "random"])
def test_sums_are_exact(kernel: Kernel, num_inputs: int, fill: str) -> None:
    """Bit-exact against int64, also where every product is the largest there is."""
    generator = torch.Generator().manual_seed(num_inputs)
    shape = (9, num_inputs)
    weight_NK = torch.randint(-127, 128, shape, dtype=torch.int16, generator=generator)
    codes_MK = torch.randint(-127, 128, (512, num_inputs), dtype=torch.int8, generator=generator)
    if fill == "largest":
        weight_NK.fill_(127)
        codes_MK.fill_(127)
        codes_MK[1::2] = -127
    prepared = kernel.prepare(weight_NK, 127)
    expected = as_int64(weight_NK, codes_MK)
    for rows in ROWS:
        actual = prepared(codes_MK[:rows])

        assert torch.equal(actual.long(), expected[:rows])
        assert actual.dtype == torch.int32 or float(actual.abs().max()) <= 2**24


@pytest.mark.parametrize("kernel", ALWAYS_EXACT, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("weight", "activation"), WIDTHS)
def test_the_probe_accepts_what_is_exact(kernel: Kernel, weight: int, activation: int) -> None:
    """And oneDNN without a split at 4-bit weights."""
    assert kernels.inexact(kernel, CPU, weight, activation) is None
    assert kernels.inexact(kernels.ONEDNN, CPU, 7, 127) is None


@pytest.mark.parametrize(("weight", "activation"), WIDTHS)
def test_the_choice_is_exact(weight: int, activation: int) -> None:
    """The chosen kernel at every width, on inputs of its own choosing and the extremes."""
    kernel = kernels.choose(CPU, weight, activation)
    generator = torch.Generator().manual_seed(5)
    shape = (33, 777)
    weight_NK = torch.randint(-weight, weight + 1, shape, dtype=torch.int16, generator=generator)
    weight_NK[0], weight_NK[1] = weight, -weight
    high = min(activation, 127)
    low = -128 if activation > 127 else -high
    codes_MK = torch.randint(low, high + 1, (20, 777), dtype=torch.int8, generator=generator)
    codes_MK[0], codes_MK[1] = high, low

    assert torch.equal(
        kernel.prepare(weight_NK, activation)(codes_MK).long(), as_int64(weight_NK, codes_MK)
    )


class _Saturating:
    """Adds pairs of products in 16 bits, as CPUs without VNNI do."""

    num_bytes = 0

    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK = weight_NK.int()

    def __call__(self, codes_MK: Tensor) -> Tensor:
        if codes_MK.shape[1] > 64:  # the emulation is slow
            return (codes_MK.double() @ self.weight_NK.double().T).int()
        products = (codes_MK.int() + 128)[:, None] * self.weight_NK
        if products.shape[-1] % 2:
            products = torch.nn.functional.pad(products, (0, 1))
        pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
        return pairs.sum(-1) - 128 * self.weight_NK.sum(-1)


def saturating(weight_NK: Tensor, largest: int) -> Prepared:
    return _Saturating(weight_NK)


def drifting(weight_NK: Tensor, largest: int) -> Prepared:
    """Exact but for sums that fp32 cannot hold."""
    exact = kernels.INT_MM.prepare(weight_NK, largest)

    class _Drifting:
        num_bytes = 0

        def __call__(self, codes_MK: Tensor) -> Tensor:
            return exact(codes_MK).float()

    return _Drifting()


def failing(weight_NK: Tensor, largest: int) -> Prepared:
    raise RuntimeError("no such operation\nhere")


@pytest.mark.parametrize(
    ("prepare", "widths", "accepted"),
    [
        (saturating, (127, 255), False),
        (saturating, (7, 7), True),
        (drifting, (127, 127), False),
        (drifting, (7, 7), True),
        (failing, (7, 7), False),
    ],
)
def test_an_inexact_kernel_is_passed_over(
    prepare: object, widths: tuple[int, int], accepted: bool
) -> None:
    """However fast, and however right at fewer bits."""
    injected = Kernel("injected", prepare)  # type: ignore[arg-type]
    chosen = kernels.choose(CPU, *widths, (injected, kernels.CARRIED))

    assert (chosen is injected) == accepted


def test_no_exact_kernel_is_an_error() -> None:
    """It says which were tried and how they failed."""
    with pytest.raises(QuantizationError, match=r"no exact .* bad: no such operation here"):
        kernels.choose(CPU, 127, 127, (Kernel("bad", failing),))


def test_a_kernel_is_probed_once() -> None:
    """Per device and widths."""
    calls = []

    def counting(weight_NK: Tensor, largest: int) -> Prepared:
        calls.append(1)
        return kernels.CARRIED.prepare(weight_NK, largest)

    among = (Kernel("counting", counting),)
    kernels.choose(CPU, 7, 7, among)
    first = len(calls)
    kernels.choose(CPU, 7, 7, among)

    assert len(calls) == first > 0


def test_sums_beyond_32_bits_are_refused() -> None:
    """By name of the width, before anything is multiplied."""
    weight_NK = torch.full((1, 140_000), 127, dtype=torch.int16)
    for kernel in kernels.candidates(CPU):
        with pytest.raises(QuantizationError, match="140000 inputs"):
            kernel.prepare(weight_NK, 127)


def test_memory_is_counted() -> None:
    """One byte a weight and piece; nothing where the stored codes are used as they are."""
    weight_NK = torch.full((8, 64), 127, dtype=torch.int16)

    assert kernels.ONEDNN_SPLIT.prepare(weight_NK, 127).num_bytes == 2 * 8 * 64
    assert kernels.ONEDNN.prepare(weight_NK // 20, 127).num_bytes == 8 * 64
    assert kernels.CARRIED.prepare(weight_NK, 127).num_bytes == 8 * 64
    narrow_NK = weight_NK.to(torch.int8)
    assert kernels.CARRIED.prepare(narrow_NK, 127).num_bytes == 0
    assert kernels.INT_MM.prepare(narrow_NK, 127).num_bytes == 0
    assert kernels.INT_MM.prepare(narrow_NK[:, :60], 127).num_bytes == 8 * 64
    assert kernels.ONEDNN_SPLIT.prepare(narrow_NK, 127).num_bytes == 2 * 8 * 64


@pytest.mark.parametrize("kernel", ALWAYS_EXACT, ids=lambda kernel: kernel.name)
def test_int8_codes_are_taken_too(kernel: Kernel) -> None:
    """The same sums as from int16, whole and as a part of a wider weight."""
    generator = torch.Generator().manual_seed(2)
    wide_NK = torch.randint(-127, 128, (24, 96), dtype=torch.int8, generator=generator)
    codes_MK = torch.randint(-127, 128, (30, 96), dtype=torch.int8, generator=generator)
    for inputs in (slice(0, 96), slice(16, 32), slice(5, 48)):
        weight_NK, part_MK = wide_NK[:, inputs], codes_MK[:, inputs]
        actual = kernel.prepare(weight_NK, 127)(part_MK)

        assert torch.equal(actual.long(), as_int64(weight_NK, part_MK))


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (8, 8), (12, 20), (33, 41)])
def test_int_mm_is_padded_to_what_cuda_takes(
    rows: int, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 16 rows, inputs and outputs in multiples of 8; the result is cut to size."""
    product = torch._int_mm
    shapes: list[tuple[int, int, int]] = []

    def strict(x_MK: Tensor, weight_KN: Tensor) -> Tensor:
        (num_rows, num_inputs), num_outputs = x_MK.shape, weight_KN.shape[1]
        assert num_rows > 16
        assert num_inputs % 8 == 0
        assert num_outputs % 8 == 0
        shapes.append((num_rows, num_inputs, num_outputs))
        return product(x_MK, weight_KN)

    monkeypatch.setattr(torch, "_int_mm", strict)
    weight_NK = torch.randint(-255, 256, (outputs, inputs), dtype=torch.int16)
    codes_MK = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
    prepared = kernels.INT_MM.prepare(weight_NK, 255)
    prepared = dataclasses.replace(prepared, pads_rows=True)  # type: ignore[type-var]

    assert torch.equal(prepared(codes_MK).long(), as_int64(weight_NK, codes_MK))
    assert len(shapes) == 1
