"""One decoder layer: an attention and an MLP sublayer with their places in the depth wiring.

Shapes: B batch, T tokens, D width, C head width, H heads, S sources or keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from oasis_eval.modeling.config import OasisConfig
from oasis_eval.modeling.history import DepthHistory, DepthLayout
from oasis_eval.modeling.routing import DepthPort, DepthRead, DepthRouter
from oasis_eval.modeling.self_attention import Wanted


class Backbone(NamedTuple):
    """The classes that a model family lends."""

    attention: type[nn.Module]
    """With `OasisAttentionMixin` in front of the family's own."""
    mlp: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


class ReadWeights(NamedTuple):
    """What a depth read lets its caller see."""

    weights: Tensor
    """[B, T, S]."""
    null_mass: Tensor | None
    """[B, T]; None where the depth normalizer has no null."""


class Byproducts(NamedTuple):
    """What a layer lets its caller see; None where it was not wanted or does not exist."""

    hidden: Tensor | None
    probs: Tensor | None
    null_mass: Tensor | None
    attention_weights: Tensor | None
    attention_null: Tensor | None
    mlp_weights: Tensor | None
    mlp_null: Tensor | None

    @property
    def reads(self) -> list[ReadWeights]:
        """The depth reads of the layer, in order of execution."""
        pairs = (
            (self.attention_weights, self.attention_null),
            (self.mlp_weights, self.mlp_null),
        )
        return [ReadWeights(weights, null) for weights, null in pairs if weights is not None]


class OasisDecoderLayer(GradientCheckpointingLayer):
    """An attention and an MLP sublayer with their places in the depth wiring."""

    def __init__(self, config: OasisConfig, layer_idx: int, backbone: Backbone) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = backbone.attention(config, layer_idx)
        self.mlp = backbone.mlp(config)
        self.input_layernorm = backbone.norm(width, eps=eps)
        self.post_attention_layernorm = backbone.norm(width, eps=eps)
        self.attn_res_sa = make_port(config, reads=config.wiring != "residual")
        self.attn_res_mlp = make_port(config, reads=config.wiring != "residual")
        self.history = DepthHistory.of(config)
        self.layer_idx = layer_idx

    def forward(
        self,
        *tensors: Tensor,
        layout: DepthLayout,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        wanted: Wanted = Wanted(),  # noqa: B008 - an immutable constant
    ) -> tuple[Any, ...]:
        """Run both sublayers.

        Args:
            tensors: The depth state, flattened; positional, because checkpointing differentiates
                nothing else.
            layout: What the tensors are.
            position_embeddings: Cosines and sines, [B, T, C] each.
            attention_mask: Boolean [B, 1, T, S]; None: causal.
            cache: Keys and values so far.
            wanted: Which by-products to return.

        Returns:
            The layout of the new state, the fields of `Byproducts`, and the state's tensors.
        """
        history = self.history
        attention_step, mlp_step = history.steps[2 * self.layer_idx : 2 * self.layer_idx + 2]
        state = history.unflatten(layout, tensors)

        hidden_BTD, attention_read = history.enter(state, self.attn_res_sa)
        attended = self.self_attn(
            self.input_layernorm(hidden_BTD),
            position_embeddings,
            attention_mask,
            cache,
            wanted=wanted._replace(null_mass=wanted.null_mass or history.keeps_psi),
        )
        psi_BT = None
        if history.keeps_psi:
            psi_BT = self._psi(attended.null_mass, hidden_BTD)
        state, late_read = history.leave(
            state, attended.output, psi_BT, step=attention_step, port=self.attn_res_sa
        )
        attention_read = attention_read or late_read

        read_BTD, mlp_read = history.enter(state, self.attn_res_mlp)
        output_BTD = self.mlp(self.post_attention_layernorm(read_BTD))
        state, late_read = history.leave(
            state, output_BTD, psi_BT, step=mlp_step, port=self.attn_res_mlp
        )
        mlp_read = mlp_read or late_read

        byproducts = Byproducts(
            hidden_BTD if wanted.hidden_states else None,
            attended.probs if wanted.attentions else None,
            attended.null_mass if wanted.null_mass else None,
            *_pair(attention_read, wanted),
            *_pair(mlp_read, wanted),
        )
        layout, tensors = state.flatten()
        return (layout, *byproducts, *tensors)

    def _psi(self, null_mass_BHT: Tensor | None, hidden_BTD: Tensor) -> Tensor:
        """Mean null mass of the heads, [B, T] fp32; 0 where the token normalizer has no null."""
        if null_mass_BHT is None:
            return hidden_BTD.new_zeros(hidden_BTD.shape[:-1], dtype=torch.float32)
        psi_BT: Tensor = null_mass_BHT.mean(dim=1)
        return psi_BT if self.history.psi_flows else psi_BT.detach()


def make_port(config: OasisConfig, *, reads: bool, is_final: bool = False) -> DepthPort:
    """Return a router where something is read, else only the taps."""
    if not reads:
        return DepthPort()
    is_coupled = config.null_coupling and (config.coupling_final_read or not is_final)
    return DepthRouter(config, is_coupled=is_coupled)


def weights_of(read: DepthRead | None, wanted: Wanted) -> ReadWeights | None:
    """Return what the caller wants to see of a read."""
    if read is None or not wanted.depth_weights:
        return None
    return ReadWeights(read.weights, read.null_mass)


def _pair(read: DepthRead | None, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
    return weights_of(read, wanted) or (None, None)
