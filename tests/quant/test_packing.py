"""Stored codes: every level under every zero point, odd widths, groups, a new process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from oasis_eval.errors import QuantizationError
from oasis_eval.quant import packing, weights
from oasis_eval.quant.packing import StoredWeight, layout_of
from oasis_eval.quant.primitives import Grid, Limits
from oasis_eval.quant.ranges import fake_quantize_weight
from oasis_eval.quant.weights import CodePart, WeightCodes
from oasis_eval.spec import TensorFormat

WIDTHS = (1, 5, 7, 8, 64)
SIGNED = TensorFormat(bits=4, granularity="channel")
UNSIGNED = TensorFormat(bits=4, granularity="channel", symmetric=False)
READER = """
import sys, torch
from safetensors.torch import load_file, save_file
from oasis_eval.quant.packing import StoredWeight, layout_of, values
from oasis_eval.spec import TensorFormat
tensors, found = load_file(sys.argv[1]), {}
for name in {key.rpartition(".")[0] for key in tensors}:
    symmetric, width = name.split("-")[0] == "signed", int(name.split("-")[-1])
    codes, scale = tensors[name + ".codes"], tensors[name + ".scale"]
    point = tensors.get(name + ".point")
    fmt = TensorFormat(bits=4, granularity="channel", symmetric=symmetric)
    layout = layout_of(fmt, len(codes), width)
    found[name] = values(StoredWeight(codes, scale, point), layout, torch.float32).contiguous()
save_file(found, sys.argv[2])
"""


def levels_of(width: int) -> Tensor:
    """Rows of one level each with all other levels as neighbours somewhere, [16, width]."""
    steps = torch.arange(width)[None] * 5
    return (torch.arange(16)[:, None] + steps) % 16


def by_hand(levels: Tensor, zero_points: Tensor, scale: Tensor) -> Tensor:
    """(level - zero point) * scale, one at a time."""
    expected = torch.empty(levels.shape)
    for row in range(levels.shape[0]):
        for column in range(levels.shape[1]):
            difference = int(levels[row, column]) - int(zero_points[row])
            expected[row, column] = torch.tensor(float(difference)) * scale[row]
    return expected


def test_every_level_and_zero_point_survives_a_file_and_a_new_process(tmp_path: Path) -> None:
    """Unsigned: 16 zero points x 16 levels; signed: 15 codes; widths odd and even."""
    tensors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for width in WIDTHS:
        levels = levels_of(width).repeat(16, 1)
        zero_points = torch.arange(16).repeat_interleave(16)
        scale = torch.rand(256, generator=torch.Generator().manual_seed(width)) + 0.01
        relative = (levels - zero_points[:, None]).float()
        grid = Grid(scale[:, None], (-zero_points[:, None], 15 - zero_points[:, None]), None)
        grid = grid._replace(zero_point=zero_points[:, None].float())
        part = WeightCodes((CodePart(relative, grid),), relative.shape)
        stored = packing.store(part, layout_of(UNSIGNED, 256, width))
        assert stored.zero_point is not None
        name = f"unsigned-{width}"
        tensors |= {f"{name}.codes": stored.codes, f"{name}.scale": stored.scale}
        tensors[f"{name}.point"] = stored.zero_point
        expected[name] = by_hand(levels, zero_points, scale)

        signed = levels_of(width)[:15] % 15 - 7
        grid = Grid(scale[:15, None], Limits(-7, 7), None)
        part = WeightCodes((CodePart(signed.float(), grid),), signed.shape)
        stored = packing.store(part, layout_of(SIGNED, 15, width))
        assert stored.zero_point is None
        name = f"signed-{width}"
        tensors |= {f"{name}.codes": stored.codes, f"{name}.scale": stored.scale}
        expected[name] = by_hand(signed, torch.zeros(15), scale)
    save_file(tensors, tmp_path / "in.safetensors")
    subprocess.run(
        [sys.executable, "-c", READER, tmp_path / "in.safetensors", tmp_path / "out.safetensors"],
        check=True,
    )
    from safetensors.torch import load_file

    actual = load_file(tmp_path / "out.safetensors")

    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(actual[name], values), name
    assert {int(level) for level in levels_of(64).flatten()} == set(range(16))


def test_two_inputs_share_a_byte_even_one_low() -> None:
    """The documented byte layout, by hand; the half beyond an odd width is 0."""
    levels = torch.tensor([[1, 15, 8], [0, 7, 2]], dtype=torch.uint8)

    assert packing.pack_nibbles(levels).tolist() == [[0xF1, 0x08], [0x70, 0x02]]


def test_changing_one_level_leaves_its_neighbours() -> None:
    """No carry into the other half of the byte."""
    base = torch.full((1, 8), 9, dtype=torch.uint8)
    for column in range(8):
        for level in range(16):
            changed = base.clone()
            changed[0, column] = level

            assert torch.equal(packing.unpack_nibbles(packing.pack_nibbles(changed), 8), changed)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("granularity", "group_size"), [("tensor", None), ("channel", None), ("group", 16)]
)
@pytest.mark.parametrize("width", [1, 5, 40, 64])
def test_storage_keeps_what_fake_quantization_gives(
    symmetric: bool, bits: int, granularity: str, group_size: int | None, width: int
) -> None:
    """Stored and read, a weight is the fake-quantized weight bit for bit, a zero row included."""
    fmt = TensorFormat.model_validate(
        {"bits": bits, "granularity": granularity, "group_size": group_size, "symmetric": symmetric}
    )
    weight = torch.randn(6, width, generator=torch.Generator().manual_seed(width))
    weight[2] = 0.0
    weight[3] = weight[3].abs() + 10
    layout = layout_of(fmt, 6, width)
    stored = packing.store(weights.encode(weight, fmt), layout)

    assert torch.equal(
        packing.values(stored, layout, torch.float32), fake_quantize_weight(weight, fmt)
    )
    assert stored.codes.shape == layout.code_shape
    assert stored.codes.dtype == layout.code_dtype
    assert stored.scale.shape == layout.scale_shape
    assert (stored.zero_point is None) == symmetric
    assert not packing.values(stored, layout, torch.float32)[2].any()


def test_four_bits_take_half_a_byte() -> None:
    """Memory falls to an eighth of fp32, scales apart."""
    weight = torch.randn(32, 64)
    stored = packing.store(weights.encode(weight, SIGNED), layout_of(SIGNED, 32, 64))

    assert stored.codes.nbytes == weight.nbytes // 8


def test_a_code_that_does_not_fit_is_refused() -> None:
    """A code of 8 at 4 bits would come back as another one."""
    grid = Grid(torch.ones(1, 1), Limits(-7, 7), None)
    codes = WeightCodes((CodePart(torch.tensor([[8.0, -7.0]]), grid),), torch.Size((1, 2)))
    with pytest.raises(QuantizationError, match=r"codes from -7 to 8 do not fit 4 bits"):
        packing.store(codes, layout_of(SIGNED, 1, 2))


def test_stored_weight_is_three_tensors() -> None:
    """What a file holds of a weight."""
    assert StoredWeight._fields == ("codes", "scale", "zero_point")


@pytest.mark.parametrize("width", [4, 5])
def test_the_half_byte_that_means_nothing_is_no_code(width: int) -> None:
    """After an odd number of inputs the last high half is 0, which would be -8."""
    layout = layout_of(SIGNED, 2, width)
    levels_NK = torch.tensor([[1, 15, 8, 7, 3], [2, 1, 14, 9, 1]], dtype=torch.uint8)[:, :width]
    good = StoredWeight(packing.pack_nibbles(levels_NK), torch.ones(2, 1), None)
    assert packing.impossible_code(good, layout) is None
    levels_NK[1, -1] = 0
    assert (
        packing.impossible_code(good._replace(codes=packing.pack_nibbles(levels_NK)), layout)
        is not None
    )
