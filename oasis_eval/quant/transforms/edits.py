"""Changes to a model that can be taken back: parameters put in place of others, and hooks.

The original parameter objects are kept and put back, so undoing is exact and ties are restored.

Dimensions: N output channels, K inputs.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oasis_eval.errors import QuantizationError


def wide(tensor: Tensor) -> Tensor:
    """Return a copy in float64, on the CPU where the device has none."""
    device = "cpu" if tensor.device.type == "mps" else tensor.device
    return tensor.detach().to(device).to(torch.float64, copy=True)


def matrix_of(layer: nn.Module) -> Tensor:
    """Return a copy of a Linear's or Conv1D's weight as [N, K] in float64."""
    weight = wide(cast(Tensor, layer.weight))
    return weight.T.contiguous() if isinstance(layer, Conv1D) else weight


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """Return (N, K) of a Linear or Conv1D."""
    rows, columns = cast(Tensor, layer.weight).shape
    return (columns, rows) if isinstance(layer, Conv1D) else (rows, columns)


def keep_dtype_(parameter: Tensor) -> None:
    """Mark a parameter that no cast of its model may narrow."""
    parameter.keeps_dtype = True  # type: ignore[attr-defined]  # tensors take any attribute


def with_kept_dtype(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that no cast of the model may narrow, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "keeps_dtype")
    }


class Edits:
    """Parameters replaced and hooks added so far."""

    def __init__(self) -> None:
        self._originals: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def set_parameter(
        self, module: nn.Module, name: str, value: Tensor, *, dtype: torch.dtype | None = None
    ) -> nn.Parameter:
        """Put a new parameter in place of one.

        Args:
            module: Its owner; other owners of a shared parameter keep the old one.
            name: Of the parameter in its owner.
            value: Float64; cast once.
            dtype: Of the new parameter; None: that of the old one.

        Returns:
            The new parameter.

        Raises:
            QuantizationError: The value does not fit into the dtype.
        """
        original = module._parameters[name]
        assert original is not None
        cast_value = value.to(dtype or original.dtype).to(original.device).contiguous()
        if not bool(torch.isfinite(cast_value).all()):
            raise QuantizationError(
                f"{type(module).__name__}.{name}: a transform leads outside of "
                f"{cast_value.dtype}; use a wider dtype (fp32)"
            )
        self._originals.append((module, name, original))
        parameter = nn.Parameter(cast_value, requires_grad=False)
        module._parameters[name] = parameter
        return parameter

    def set_matrix(self, layer: nn.Module, matrix_NK: Tensor) -> None:
        """Give a Linear or Conv1D another weight [N, K]."""
        self.set_parameter(layer, "weight", matrix_NK.T if isinstance(layer, Conv1D) else matrix_NK)

    def add_hook(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Remember a hook that was added."""
        self._handles.append(handle)

    def undo(self) -> None:
        """Take everything back, last first."""
        while self._handles:
            self._handles.pop().remove()
        while self._originals:
            module, name, original = self._originals.pop()
            module._parameters[name] = original
