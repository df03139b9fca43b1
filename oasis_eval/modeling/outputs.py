"""What the models return: transformers' outputs, with what depth routing adds to them.

Shapes: B batch, T tokens, H heads, S sources of the read at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


@dataclass
class OasisModelOutput(BaseModelOutputWithPast):
    """Output of the decoder without head.

    `hidden_states`, where wanted, are the inputs [B, T, D] of each layer's attention sublayer
    before its norm, and the normed output: under depth routing they are reads, not a stream.
    """

    null_mass: tuple[Tensor | None, ...] | None = None
    """`output_null_mass`: [B, H, T] fp32 per layer; None for normalizers without a null."""
    depth_weights: tuple[Tensor, ...] | None = None
    """`output_depth_weights`: [B, T, S] fp32 per read, in the order of `depth_read_names`."""
    depth_null_mass: tuple[Tensor | None, ...] | None = None
    """With them: [B, T] fp32 per read; None where the depth normalizer has no null."""


@dataclass
class OasisCausalLMOutput(CausalLMOutputWithPast):
    """Output of the language model; the fields mean what they mean in `OasisModelOutput`."""

    null_mass: tuple[Tensor | None, ...] | None = None
    depth_weights: tuple[Tensor, ...] | None = None
    depth_null_mass: tuple[Tensor | None, ...] | None = None
