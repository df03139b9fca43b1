"""Hadamard matrices of many orders."""

from __future__ import annotations

import pytest
import torch

from oasis_eval.quant.transforms.hadamard import blocks, hadamard

WIDTHS = [
    *[2**k for k in range(10)],
    *[12, 20, 24, 28, 36, 40, 44, 52, 56, 60, 68, 72, 76, 84, 100, 108, 124, 140, 148],
    *[576, 640, 960],
]


def _matrix(width: int) -> torch.Tensor:
    found = blocks(width)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for order in found.factors:
        matrix = torch.kron(matrix, hadamard(order))
    return matrix


@pytest.mark.parametrize("width", WIDTHS)
def test_whole_widths_have_hadamard_matrices(width: int) -> None:
    """Entries are +-1 and H H^T = n I exactly, in integers."""
    matrix = _matrix(width).long()

    assert blocks(width).number == 1
    assert torch.equal(matrix.abs(), torch.ones(width, width, dtype=torch.long))
    assert torch.equal(
        (matrix.double() @ matrix.double().T).long(), width * torch.eye(width).long()
    )


@pytest.mark.parametrize(
    ("width", "size", "number"),
    [(92, 4, 23), (11008, 256, 43), (30, 2, 15), (9, 1, 9), (172, 4, 43), (1, 1, 1)],
)
def test_other_widths_have_the_largest_blocks(width: int, size: int, number: int) -> None:
    """Orders without Paley's constructions fall apart into blocks that are said."""
    found = blocks(width)

    assert (found.size, found.number) == (size, number)


@pytest.mark.parametrize("width", [4864, 5632, 6656, 8192, 8960, 13824, 14336, 18944])
def test_widths_of_public_models_are_whole(width: int) -> None:
    """Feed-forward widths of public models have one block of their width."""
    found = blocks(width)

    assert (found.size, found.number) == (width, 1)


def test_unconstructed_orders_are_refused() -> None:
    """What neither construction gives is no matrix of another kind."""
    for order in (3, 6, 92, 172):
        with pytest.raises(ValueError, match=f"order {order}"):
            hadamard(order)
