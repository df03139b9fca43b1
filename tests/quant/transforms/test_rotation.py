"""Applying a rotation factor by factor, and inputs that layers share."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from oasis_eval.quant.transforms.hadamard import hadamard
from oasis_eval.quant.transforms.rotation import OnlineInput, RotatedInput, Rotation, Rotations


@pytest.mark.parametrize("width", [1, 2, 12, 48, 64, 96, 576, 1536, 92, 4096])
def test_rotation_is_orthogonal(width: int) -> None:
    """R R^T = I to 1e-14, and the inverse takes a rotation back."""
    rotation = Rotation(width, 0)
    x = torch.randn(6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = rotation.apply(x)

    torch.testing.assert_close(y @ y.T, x @ x.T, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(rotation.apply(y, inverse=True), x, rtol=0.0, atol=1e-13)
    torch.testing.assert_close(
        rotation.apply(rotation.apply(x, inverse=True)), x, rtol=0.0, atol=1e-13
    )


def test_rotation_is_signs_times_kronecker_product() -> None:
    """Width 1536 is the dense matrix diag(s) (H12 x H16 x H8) / sqrt(n)."""
    rotation = Rotation(1536, 3)
    dense = torch.kron(torch.kron(hadamard(12), hadamard(16)), hadamard(8)) / 1536**0.5
    matrix = rotation.apply(torch.eye(1536, dtype=torch.float64))
    signs = torch.sign(matrix[:, 0] * dense[:, 0])

    assert rotation.blocks.factors == (12, 16, 8)
    assert 650 < int((signs > 0).sum()) < 886  # of 1536 coins, 6 standard deviations
    torch.testing.assert_close(matrix, signs[:, None] * dense, rtol=0.0, atol=1e-14)


def test_blocks_stay_apart() -> None:
    """A width of 23 blocks is rotated inside of each."""
    matrix = Rotation(92, 0).apply(torch.eye(92, dtype=torch.float64))
    is_inside = torch.block_diag(*[torch.ones(4, 4)] * 23).bool()

    assert bool((matrix[is_inside].abs() == 0.5).all())
    assert bool((matrix[~is_inside] == 0).all())


def test_outliers_are_spread() -> None:
    """One channel of 100 becomes 576 of 100 / 24."""
    x = torch.zeros(576)
    x[5] = 100.0

    torch.testing.assert_close(Rotation(576, 0).apply(x).abs(), torch.full((576,), 100 / 24))


def test_seeds_and_widths_choose_signs() -> None:
    """The same seed gives the same matrix, another one another."""
    eye = torch.eye(64)

    assert torch.equal(Rotation(64, 1).apply(eye), Rotation(64, 1).apply(eye))
    assert not torch.equal(Rotation(64, 1).apply(eye), Rotation(64, 2).apply(eye))


def test_half_precision_rounds_once() -> None:
    """bf16 is the fp32 result rounded."""
    x = torch.randn(5, 7, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotation = Rotation(576, 0)

    assert torch.equal(rotation.apply(x), rotation.apply(x.float()).bfloat16())


def test_notes_name_blocks() -> None:
    """Only widths without a matrix of their own are mentioned."""
    rotations = Rotations(0)
    rotations.of(48), rotations.of(92)

    assert rotations.notes() == ["width 92 is rotated in 23 blocks of 4"]
    assert rotations.of(48) is rotations.of(48)


@torch.no_grad()
def test_layers_share_one_rotated_tensor() -> None:
    """The same tensor is rotated once; a new, a changed or a dead one is not taken for it."""
    memory, rotation = OnlineInput(), Rotation(8, 0)
    x = torch.randn(3, 8)
    first = memory.rotate(x, rotation)
    again = memory.rotate(x, rotation)
    assert again is first
    assert memory.rotate(x.clone(), rotation) is not first
    first = memory.rotate(x, rotation)
    x[0] = 5.0
    changed = memory.rotate(x, rotation)

    torch.testing.assert_close(changed, rotation.apply(x))
    other = Rotation(8, 1)
    torch.testing.assert_close(memory.rotate(x, other), other.apply(x))
    del x, first, again, changed
    gc.collect()
    assert memory._rotated is None


def test_gradients_flow_through_online_rotations() -> None:
    """Nothing is shared while gradients are recorded, and the layer stays differentiable."""
    layer = nn.Linear(12, 5)
    rotation = Rotation(12, 0)
    x = torch.randn(3, 12, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    with torch.no_grad():
        layer.weight.copy_(rotation.apply(layer.weight))
    layer.register_forward_pre_hook(RotatedInput(rotation, OnlineInput()))

    torch.testing.assert_close(torch.autograd.grad(layer(x).square().sum(), x)[0], expected)
