"""Changes that are taken back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.transforms.edits import Edits, matrix_of, shape_of


@pytest.mark.parametrize("layer", [nn.Linear(3, 5), Conv1D(5, 3)])
def test_matrices_are_outputs_by_inputs(layer: nn.Module) -> None:
    """[5, 3] for a layer of 3 inputs, however it stores its weight; x W^T is its product."""
    x = torch.randn(2, 3, dtype=torch.float64)
    layer = layer.double()
    matrix = matrix_of(layer)

    assert shape_of(layer) == tuple(matrix.shape) == (5, 3)
    torch.testing.assert_close(x @ matrix.T + layer.bias, layer(x))
    edits = Edits()
    edits.set_matrix(layer, matrix * 2)
    torch.testing.assert_close(2 * (x @ matrix.T) + layer.bias, layer(x))


def test_originals_come_back() -> None:
    """The very parameter, through several changes; a tied module never sees them."""
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = layer.weight
    original = layer.weight
    edits = Edits()
    edits.set_matrix(layer, torch.eye(3, dtype=torch.float64))
    edits.set_matrix(layer, 2 * torch.eye(3, dtype=torch.float64))
    edits.add_hook(layer.register_forward_pre_hook(lambda module, args: args))

    assert torch.equal(layer.weight, 2 * torch.eye(3))
    assert other.weight is original
    edits.undo()
    assert layer.weight is original
    assert not layer._forward_pre_hooks


def test_values_beyond_the_dtype_are_refused() -> None:
    """1e5 is no fp16 number; the layer keeps what it had."""
    layer = nn.Linear(3, 3).half()
    original = layer.weight
    with pytest.raises(QuantizationError, match=r"Linear.weight: .*torch.float16.*wider dtype"):
        Edits().set_matrix(layer, torch.full((3, 3), 1e5, dtype=torch.float64))

    assert layer.weight is original
